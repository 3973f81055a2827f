"""What the run needs, against what there is: memory of a device, the disk, and time.

The memory and the size of a checkpoint are those of one traced update (``checks/memory/``); the time is an estimate
from the operations that the model counts, for a share of the device's peak (MFU) that is assumed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta

from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.listing import size_text
from unigen_ds.checks.dry_run.first_batches import FirstBatches
from unigen_ds.checks.dry_run.known import Checked, Known, ok, problem, unchecked, untraced, warning
from unigen_ds.checks.dry_run.this_machine import number_in
from unigen_ds.checks.memory.fits import GIB, Reserve, device_bytes
from unigen_ds.checks.memory.planned import CHOSEN, largest_batches, preload, trace_engines
from unigen_ds.core.progress import Ruler
from unigen_ds.hooks.evaluate.evaluate import EvaluateHook
from unigen_ds.hooks.log.timer import device_peak_tflops
from unigen_ds.hooks.save.checkpoint import CheckpointHook
from unigen_ds.runner.start.stages import free_bytes


def check_memory(known: Known) -> Iterator[Checked]:
    """Adds ``traced``: one update of the engine on the largest micro-batch, without memory."""
    settings, start, geometry = known.section("optim_wrapper", "backend"), known.need("start"), known.need("geometry")
    known.need("model")  # of one that cannot be built the problem is listed
    preload()
    largest = largest_batches(start.data, geometry)
    plan = trace_engines({CHOSEN: settings}, start.data.processor, largest, geometry, jobs=1)[CHOSEN]
    traced = known.traced = plan.traced
    if traced is None:
        yield untraced(plan.problem)
        return
    reserve = Reserve(2 * GIB, 0.05, 4 * GIB)
    phases = device_bytes(traced, reserve)
    phase = max(phases, key=lambda name: phases[name])
    memory = known.asked.device_memory or known.hardware.memory
    text = (
        f"{size_text(phases[phase])} on a device ({phase}; {size_text(reserve.device)} and 5 % of it reserved),"
        f" {largest.text}"
    )
    if not memory:
        yield ok(text)
        yield unchecked("the memory of a device: --device-memory 80GiB")
    elif phases[phase] > memory:
        lighter = f", --backend {known.need('backend').lighter}" if known.need("backend").lighter else ""
        yield problem(
            f"{text}; it has {size_text(memory)}, {size_text(phases[phase] - memory)} too few",
            remedy=f"model.activation_checkpointing=True, a smaller batch_size{lighter}; tools/plan.py compares all"
            " engines",
        )
    else:
        yield ok(f"{text}; it has {size_text(memory)}")


# ---- the disk -------------------------------------------------------------------------------------------------------


def check_disk(known: Known) -> Iterator[Checked]:
    """The checkpoints that the run will keep at a time, against the free space."""
    settings = known.section("default_hooks", "train_cfg")
    start, traced = known.need("start"), known.need("traced")
    component = settings.default_hooks.checkpoint
    if component is None:
        yield warning("default_hooks.checkpoint is None: nothing is saved")
        return
    hook = component.build()
    if not isinstance(hook, CheckpointHook):
        yield unchecked(f"{component.name}: how often it saves is not known")
        return
    saves = num_saves(hook, start.ruler, start.total_sequences)
    best = any(issubclass(one.cls, EvaluateHook) and one.get("save_best") for one in settings.custom_hooks)
    have = len(store.list_checkpoints(settings.checkpoints))
    copies = num_kept(hook, saves=saves, have=have) + best
    size = traced.saved * (2 if hook.form == "both" else 1)
    extra = traced.saved * (hook.form == "full")  # made from the files of the engine, which are deleted then
    needed, free = copies * size + extra, free_bytes(settings.checkpoints)
    kept = "all are kept" if hook.max_keep_ckpts == -1 else f"max_keep_ckpts={hook.max_keep_ckpts}"
    text = f"{saves} saves of {size_text(size)} ({kept}) need {size_text(needed)}"
    if free is None:
        yield unchecked(f"{text}; how much is free is not known")
    elif free < needed:
        yield problem(
            f"{text}, and {size_text(free)} are free where {settings.checkpoints} is",
            remedy="free space, CheckpointHook(max_keep_ckpts=...) or a longer interval, or another --checkpoint-dir",
        )
    else:
        yield ok(f"{text}; {size_text(free)} are free")


def num_saves(hook: CheckpointHook, ruler: Ruler, total_sequences: float) -> int:
    """Checkpoints that a run of ``total_sequences`` writes, the last one included."""
    if hook.interval <= 0:
        return 1
    every = ruler.duration(hook.interval, hook.unit).value
    return max(1, -int(-total_sequences // every))


def num_kept(hook: CheckpointHook, *, saves: int, have: int) -> int:
    """Checkpoints that are there at a time at most, beyond those that the folder has: the new one is durable before
    the oldest is deleted.
    """
    if hook.max_keep_ckpts == -1:
        return saves
    return max(1, min(saves, hook.max_keep_ckpts + 1 - have))


# ---- time -----------------------------------------------------------------------------------------------------------


def seconds_of_update(batches: FirstBatches, *, peak_tflops: float, mfu: float) -> float | None:
    """Estimated: of each update the rank that has most to compute. None: the model counts no operations."""
    updates = [max(sum(one.flops for one in rank) for rank in update) for update in batches.updates()]
    flops = sum(updates) / max(len(updates), 1)
    return flops / (peak_tflops * 1e12 * mfu) if flops else None


def check_time(known: Known) -> Iterator[Checked]:
    """Of the whole run, and whether the loading processes are fast enough and the job is long enough."""
    settings, start, batches = known.section("train_cfg"), known.need("start"), known.need("batches")
    geometry = known.need("geometry")
    known.need("model")
    of_device = device_peak_tflops(known.hardware.name) if known.hardware.count else None
    peak = known.asked.peak_tflops or settings.env.peak_tflops or of_device
    num_workers = settings.train_dataloader.num_workers
    load_s = batches.seconds_each / max(num_workers, 1) * geometry.accumulative_counts
    yield ok(f"the loader of a process needs {load_s:.3g} s for an update ({num_workers} processes)")
    if peak is None:
        yield unchecked("the time of the run: --peak-tflops, of the device that it will use")
        return
    update_s = seconds_of_update(batches, peak_tflops=peak, mfu=known.asked.mfu)
    if update_s is None:
        yield unchecked("the time of the run: the model has no flops()")
        return
    done = start.manifest.progress.sequences if start.manifest else 0
    updates = max(0.0, start.total_sequences - done) / geometry.global_batch_size
    total = updates * max(update_s, load_s)
    yield ok(
        f"estimated: {_duration(total)} for {updates:,.0f} updates of {update_s:.3g} s, at {known.asked.mfu:.0%} of"
        f" {peak:g} TFLOPS, or of the loader's time where that is more; evaluations and saves are not in it"
    )
    end = number_in(os.environ, "SLURM_JOB_END_TIME")
    if end is not None and end - time.time() < total and not (settings.resume or "SLURM_RESTART_COUNT" in os.environ):
        yield warning(
            f"SLURM ends the job in {_duration(end - time.time())}, before the run would end. Remedy:"
            " scripts/train_slurm.sh requeues a job that continues with --resume."
        )


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
