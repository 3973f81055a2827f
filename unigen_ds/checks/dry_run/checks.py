"""The checks of a dry run, in their order: each a function of what is ``Known`` that returns its results.

A check calls a stage of the start (``runner/start/stages.py``), adds the result to ``Known``, asks with ``need`` for
what it cannot do without, and may raise: every error is one more problem of the list. A new check is a function here,
or in a module of its own, and a row of ``CHECKS``; one of a user's own is registered in ``DRY_RUN_CHECKS``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from unigen_ds.checkpoint.home import same
from unigen_ds.checks.dry_run.batches import check_batches, check_collectives
from unigen_ds.checks.dry_run.known import Checked, Known, ok, problem, problems_of, warning
from unigen_ds.checks.dry_run.this_machine import check_devices, check_folders, check_job, check_paths
from unigen_ds.config.paths import expand_paths
from unigen_ds.config.registry import TOKENIZERS, build
from unigen_ds.core.choices import AUTO
from unigen_ds.optim.optimizer import AUTO as AUTO_PRECISION
from unigen_ds.resume.plan import NOT_RESUMED
from unigen_ds.runner.settings.naming import name_and_folder
from unigen_ds.runner.settings.tree import Settings
from unigen_ds.runner.start.build import build_hooks, check_states
from unigen_ds.runner.start.stages import build_engine, plan_start, read_start, run_checklist, settle
from unigen_ds.tracking.settings import Visualizer

Check = Callable[[Known], Iterable[Checked]]


def check_config(known: Known) -> Iterator[Checked]:
    """Adds ``settings``."""
    settings = Settings.from_config(known.config)
    known.settings = settings.with_resume(AUTO) if known.asked.resume_auto else settings
    yield ok(f"{known.asked.config}: every key and value")


def check_engine(known: Known) -> Iterator[Checked]:
    """Adds ``backend`` and ``geometry``: versions, precision and the split of the batch."""
    settings, hardware = known.need("settings"), known.hardware
    if hardware.count and not hardware.bf16:
        if settings.optim_wrapper.precision == "bf16":
            yield problem(
                f"precision is 'bf16', which {hardware.name} cannot compute",
                allowed="bf16 on a device of compute capability 8.0 or more",
                remedy="optim_wrapper.precision='fp16', 'fp32', or 'auto'",
            )
        if settings.optim_wrapper.precision == AUTO_PRECISION:
            settings = known.settings = settings.with_precision("fp16")
    known.backend, known.geometry = build_engine(settings)
    engine = known.backend.topology()["engine"]
    yield ok(f"{engine}, {settings.optim_wrapper.precision}; {known.geometry} sequences per update")
    if hardware.count and "RANK" in os.environ and known.per_node > hardware.count:
        yield problem(
            f"{known.per_node} processes are on a machine with {hardware.count} CUDA devices",
            remedy=f"start at most {hardware.count} processes on a machine, one for each device",
        )


def check_trackers(known: Known) -> Iterator[Checked]:
    """Packages and keys of log writers; no server is asked."""
    for component in Visualizer.parse(known.config.values.get("visualizer") or {}).vis_backends:
        writer = component.build()
        errors = [*getattr(writer, "lacks", list)()]
        yield from (result for error in errors for result in problems_of(error))
        if not errors:
            yield ok(f"{component.name}: installed, and with a key where it needs one; its server was not asked")


def check_tokenizer(known: Known) -> Iterator[Checked]:
    """The tokenizer loads, and has the special tokens of the processor."""
    spec = known.config.values.get("tokenizer")
    if spec is None:
        yield ok("the config has none")
        return
    expand_paths(spec, where="tokenizer")
    tokenizer: Any = build(TOKENIZERS, spec, where="tokenizer")
    names = ("bos_id", "eos_id", "pad_id", "image_start_id", "image_end_id", "image_id")
    ids = {name: token_id for name in names if isinstance(token_id := getattr(tokenizer, name, None), int)}
    outside = {name: number for name, number in ids.items() if not 0 <= number < len(tokenizer)}
    for name, number in outside.items():
        yield problem(f"the tokenizer's {name} is {number}", allowed=f"0 to {len(tokenizer) - 1}")
    if not outside:
        yield ok(f"{len(tokenizer):,} ids; " + ", ".join(f"{name} {number}" for name, number in ids.items()))


def check_hooks(known: Known) -> Iterator[Checked]:
    """All hooks can be built, and their states can be stored."""
    hooks = build_hooks(known.need("settings"))
    check_states(hooks)
    yield ok(", ".join(hook.name or type(hook).__name__ for hook in hooks))


def check_start(known: Known) -> Iterator[Checked]:
    """Adds ``start``: the checkpoint to begin with, the checklist of a resume, and all data sets."""
    settings, backend, geometry = known.need("settings"), known.need("backend"), known.need("geometry")
    run = name_and_folder(settings, geometry)
    settings = settings.named(run.name, run.folder)
    plan = plan_start(settings, hashes=False)
    yield from (warning(message) for message in plan.messages if message.startswith(NOT_RESUMED))
    if settings.work_dir and not same(settings.folder, settings.checkpoints):
        yield ok(f"checkpoints in {settings.checkpoints}")
    known.settings = settings = settle(settings, plan, backend=backend, geometry=geometry)
    start = known.start = read_start(settings, plan, geometry=geometry)
    if plan.mode == "resume":
        yield ok(f"resumes from {plan.checkpoint} (its files' sizes were compared, not their content)")
        for finding in run_checklist(start, plan, backend=backend, geometry=geometry, hashed=False):
            text = f"{finding.id}: {finding.was} -> {finding.now}. {finding.why}"
            if finding.status == "block":
                yield problem(text, remedy=finding.remedy or None)
            elif finding.status == "warn":
                yield warning(text)
    else:
        yield ok("a new run" + (f" with the weights of {plan.checkpoint}" if plan.checkpoint else ""))
    for skipped in start.data.skipped:
        yield warning(f"data set {skipped.name} is skipped (on_error='skip'): {skipped.why}")
    stream = start.data.stream
    yield ok(
        f"{sum(map(len, stream.datasets)):,} records of {len(stream.names)} data set(s),"
        f" {stream.sequences_per_epoch:,} sequences an epoch"
    )


def check_model(known: Known) -> Iterator[Checked]:
    """Adds ``model``, without memory, with the files of published weights read; too small a vocabulary is refused."""
    model = known.model = known.need("start").meta_model
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    yield ok(f"{type(model).__name__}: {sum(p.numel() for p in model.parameters()):,} parameters, {trained:,} trained")


CHECKS: dict[str, Check] = {
    "devices": check_devices,
    "job": check_job,
    "config": check_config,
    "paths": check_paths,
    "folders": check_folders,
    "engine": check_engine,
    "trackers": check_trackers,
    "tokenizer": check_tokenizer,
    "hooks": check_hooks,
    "start": check_start,
    "model": check_model,
    "batches": check_batches,
    "collectives": check_collectives,
}
"""Name -> check, in the order in which they run."""
BEFORE_CONFIG = ("devices", "job")
"""Checks after which the number of processes is known, for which the config is checked."""
