"""Where the time goes: sections of ``run.clock`` in, window averages, rates, the time to go and a profile out.

Time of this rank (``system/clock.py``: on CUDA that of the device), averaged over a window of updates, because one
update's share of waiting varies much. The time of an evaluation is left out. It costs one clock read per update and no
synchronisation.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict, deque
from contextlib import ExitStack
from datetime import datetime, timedelta
from typing import Annotated

import torch
from annotated_types import Ge
from torch.profiler import ProfilerActivity, profile

from unigen_ds.config.registry import HOOKS, checked
from unigen_ds.core.batch import Batch
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.system import dist
from unigen_ds.system.clock import COMMUNICATION, EVALUATION, count_communication
from unigen_ds.system.files import write_text_atomic
from unigen_ds.system.journals import PROFILE_FILE
from unigen_ds.system.log import logger

SECTIONS = ("data", "forward_backward", COMMUNICATION, "step")
BEFORE_PROFILE = 3  # updates of a process before those that are profiled
TOTAL_AFTER_UPDATES = 20
"""Updates of a process after which the time of the whole training is estimated; its first is left out."""
WARM_UP_UPDATES = 50
"""Updates before a share is checked: compilation, caches and worker start-up are over by then."""
BOUNDS = {
    "data": (0.0, 0.10, "raise train_dataloader.num_workers or prefetch_factor"),
    "forward_backward": (0.70, 1.0, "see which other share is large"),
    COMMUNICATION: (0.0, 0.15, "accumulate more micro-batches; under FSDP, shard inside of a node (HYBRID_SHARD)"),
    "other": (0.0, 0.05, "look for slow hooks: previews, checkpoints and logging count here"),
}
"""Share of an update's time: lower bound, upper bound, what to do outside it."""
PEAK_TFLOPS = {
    "B200": 2250, "GH200": 989, "H200 NVL": 835, "H200": 989, "H100 NVL": 835, "H100 PCIe": 756, "H100": 989,
    "H20": 148, "A100": 312, "A800": 312, "A40": 150, "A30": 165, "A10": 125, "RTX A6000": 155, "RTX 3090": 71,
    "L40S": 362, "L40": 181, "L4": 121, "RTX 6000 Ada": 364, "RTX 4090": 165, "RTX 5090": 209,
    "V100 PCIE": 112, "V100": 125, "T4": 65, "MI300X": 1307,
}  # fmt: skip
"""Words of a device's name -> 10**12 dense bf16 operations a second with fp32 sums, from the maker's data sheet (V100
and T4 have no bf16: fp16). The first that fits is used. MFU is a share of it."""


def device_peak_tflops(name: str) -> float | None:
    """Return the peak of the device named ``name`` in 10**12 operations a second, or None if it is unknown."""
    words = f" {name.replace('-', ' ')} "
    return next((float(peak) for part, peak in PEAK_TFLOPS.items() if f" {part} " in words), None)


@HOOKS.register_module()
class IterTimerHook(Hook):
    """Keeps the last ``window`` updates; ``summary`` is what the logger prints.

    Args:
        window: updates that rates and time shares are averaged over.
    """

    name = "timer"

    @checked()
    def __init__(self, *, window: Annotated[int, Ge(1)] = 50) -> None:
        self._updates: deque[dict[str, float]] = deque(maxlen=window)
        """Seconds of each, by section and in all, its counts over all ranks, and this rank's operations."""
        self._own: dict[str, float] = defaultdict(float)
        """This rank's counts of the present update."""
        self._statistics: list[dict[str, float]] = []
        """Statistics of each update since the last ``statistics_over_ranks``."""
        self._num_updates, self._seconds, self._sequences_left = 0, 0.0, 0.0
        self._warnings: set[str] = set()
        self._timing = ExitStack()
        self.peak_tflops: float | None = None
        """10**12 operations a second that one device can do; None where that is not known, and before training."""

    def before_train(self, run: Run) -> None:
        self.peak_tflops = run.peak_tflops
        if run.peak_tflops is None and torch.cuda.is_available():
            self.peak_tflops = device_peak_tflops(torch.cuda.get_device_name())
        self._timing.enter_context(count_communication(run.clock))
        run.clock.read()  # building the run is not part of the first update

    def after_run(self, run: Run) -> None:
        self._timing.close()

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._timing.close()

    def before_train_iter(self, run: Run, index: int, batch: Batch) -> None:
        count = getattr(run.backend.model, "flops", None)
        self._own["flops"] += count(batch) if count else 0.0
        self._own["tokens"] += batch.num_tokens
        self._own["samples"] += batch.num_samples
        self._own["images"] += batch.num_images

    def after_update(self, run: Run, result: UpdateResult) -> None:
        seconds, sections = run.clock.read()
        seconds -= sections.get(EVALUATION, 0.0)
        times = {name: sections.get(name, 0.0) for name in SECTIONS}
        times["other"] = max(0.0, seconds - sum(times.values()))
        own, self._own = self._own, defaultdict(float)
        progress, previous = run.progress, run.previous
        counts = {"sequences": progress.sequences - previous.sequences, "samples": progress.samples - previous.samples}
        self._updates.append({**times, **counts, "tokens": result.tokens, "flops": own["flops"], "seconds": seconds})
        self._statistics.append({  # nanoVLM's five, and the time shares
            "tokens_per_second": own["tokens"] / seconds,
            "data_load_time": times["data"],
            "fw_bw_time": times["forward_backward"],
            "post_process_time": times["step"] + times["other"],
            "communication_time": times[COMMUNICATION],
            "images_per_sample": own["images"] / max(own["samples"], 1),
            **{f"share_{name}": value / seconds for name, value in times.items()},
        })  # fmt: skip
        self._num_updates += 1
        self._sequences_left = max(0.0, run.total_sequences - progress.sequences)
        self._seconds += seconds if self._num_updates > 1 else 0.0
        if self._num_updates == TOTAL_AFTER_UPDATES and dist.is_main() and self._sequences_left < float("inf"):
            per_update, size = self._seconds / (self._num_updates - 1), run.geometry.global_batch_size
            total = timedelta(seconds=round(run.total_sequences // size * per_update))
            until = f"{datetime.now() + timedelta(seconds=self._sequences_left / size * per_update):%Y-%m-%d %H:%M}"
            logger().info("Estimated total time: %s (%.0f updates of %.3g s), until %s.",
                          total, run.total_sequences // size, per_update, until)  # fmt: skip
        if self._num_updates > WARM_UP_UPDATES and self._num_updates % 10 == 1:  # each look sums up the window
            self._check_shares()

    def _sum(self, name: str) -> float:
        return sum(update.get(name, 0.0) for update in self._updates)

    def summary(self) -> dict[str, float]:
        """Averages over the window; empty before the first update.

        ``time/update`` and ``time/data`` in seconds per update; ``share/<section>`` and ``share/other`` in 0 .. 1;
        ``tokens_per_second`` and ``samples_per_second`` over all ranks, ``tokens_per_second_per_device`` their mean;
        ``eta`` in seconds.
        """
        if (seconds := self._sum("seconds")) <= 0:
            return {}
        tokens, rate = self._sum("tokens") / seconds, self._sum("sequences") / seconds
        return {
            "time/update": seconds / len(self._updates),
            "time/data": self._sum("data") / len(self._updates),
            **{f"share/{name}": self._sum(name) / seconds for name in (*SECTIONS, "other")},
            "tokens_per_second": tokens,
            "tokens_per_second_per_device": tokens / dist.world_size(),
            "samples_per_second": self._sum("samples") / seconds,
            "eta": self._sequences_left / rate if rate else float("inf"),
        }

    def flops_over_ranks(self) -> dict[str, float]:
        """``tflops``: 10**12 operations a second of one device, mean over ranks; ``mfu``: that as a share of its peak.
        Collective. Each is left out where it is not known."""
        seconds = self._sum("seconds")
        (total,) = dist.sum_floats([self._sum("flops") / seconds if seconds else 0.0])
        tflops = total / dist.world_size() / 1e12
        if not tflops:
            return {}
        return {"tflops": tflops, "mfu": tflops / self.peak_tflops} if self.peak_tflops else {"tflops": tflops}

    def statistics_over_ranks(self) -> dict[str, float]:
        """``training_stats/avg_<name>``, ``max_`` and ``min_`` over the updates since the last call and over all ranks.
        Collective.

        The names are nanoVLM's (``tokens_per_second``, ``data_load_time``, ``fw_bw_time``, ``post_process_time``,
        ``images_per_sample``; seconds of an update), ``communication_time``, and ``share_<section>``;
        ``training_stats/tokens_per_second/rank<k>`` is the mean of one device.
        """
        updates, self._statistics = self._statistics, []
        columns = {name: [update[name] for update in updates] for name in updates[0]} if updates else {}
        ranks = dist.gather_objects({name: (sum(v) / len(v), max(v), min(v)) for name, v in columns.items()})
        values: dict[str, float] = {}
        for name in ranks[0]:
            averages, largest, smallest = zip(*(rank[name] for rank in ranks), strict=True)
            values[f"training_stats/avg_{name}"] = sum(averages) / len(ranks)
            values[f"training_stats/max_{name}"] = max(largest)
            values[f"training_stats/min_{name}"] = min(smallest)
        for number, rank in enumerate(ranks if values else ()):
            values[f"training_stats/tokens_per_second/rank{number}"] = rank["tokens_per_second"][0]
        return values

    def _check_shares(self) -> None:
        summary = self.summary()
        for name, (low, high, advice) in BOUNDS.items():
            share = summary.get(f"share/{name}", low)
            if name not in self._warnings and not low <= share <= high:
                self._warnings.add(name)
                bound = f"at most {high:.0%}" if share > high else f"at least {low:.0%}"
                logger().warning("%.1f %% of the time is %s; expected is %s: %s", 100 * share, name, bound, advice)


class ProfileHook(Hook):
    """Profiles ``num_updates`` updates of this process, after ``BEFORE_PROFILE`` others: a trace of each rank, and the
    table of all. The device is waited for at both ends, so that the table has all of each update; no number of the run
    changes."""

    name = "profile"

    def __init__(self, *, num_updates: int) -> None:
        self._num_updates, self._number, self._before = num_updates, -BEFORE_PROFILE, dict[str, float]()
        self._profiler: profile | None = None

    def after_update(self, run: Run, result: UpdateResult) -> None:
        self._number += 1
        if self._profiler is not None and (self._number == self._num_updates or run.done):
            self._end(run, self._profiler)
        elif self._number == 0 and not run.done:
            self._profiler = profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * run.clock.on_cuda)
            self._profiler.start()
            run.clock.labels, self._before = True, self._times(run)

    def after_run(self, run: Run) -> None:
        if self._number <= 0:
            logger().warning("No update is profiled: the training ends, and the first %d warm up.", BEFORE_PROFILE)

    def on_exception(self, run: Run, error: BaseException) -> None:
        if self._profiler is not None:
            self._profiler.stop()

    @staticmethod
    def _times(run: Run) -> dict[str, float]:
        """Milliseconds by section, and in all, once the device has nothing left to do."""
        if run.clock.on_cuda:
            torch.cuda.synchronize()
        run.clock.read()
        return {name: 1e3 * seconds for name, seconds in {**run.clock.totals, "update": time.perf_counter()}.items()}

    def _end(self, run: Run, profiler: profile) -> None:
        """Write the trace of each rank, and the table. Collective."""
        now, rank, last = self._times(run), dist.rank(), run.progress.updates
        profiler.stop()
        self._profiler, run.clock.labels = None, False
        times = {name: (value - self._before.get(name, 0.0)) / self._number for name, value in now.items()}
        hooks = [value for name, value in times.items() if name.startswith("hook:") and name != f"hook:{self.name}"]
        parts = {**{name: times.get(name, 0.0) for name in SECTIONS}, "hooks": sum(hooks)}
        parts = {"update": times["update"], **parts, "other": max(0.0, times["update"] - sum(parts.values()))}
        row = {"rank": rank, "first": last + 1 - self._number, "last": last, **parts}
        ranks, file = dist.gather_to_main(row), run.work_dir / PROFILE_FILE
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(file.with_name(f"rank{rank}.json.gz")))
            if ranks is not None:
                write_text_atomic(file, json.dumps(ranks, indent=1))
                own = {file.with_name(f"rank{k}.json.gz") for k in range(len(ranks))}
                for old in {*file.parent.glob("rank*.json.gz")} - own:  # of an earlier profile with more ranks
                    old.unlink()
        except OSError as error:
            logger().warning("The profile of rank %d cannot be written: %s", rank, error)
        if ranks is not None:
            text = "Profile of %d of %d updates on %d rank(s), the slowest 16, milliseconds of an update: %s"
            logger().info(text, self._number, self._num_updates, len(ranks), file)
            logger().info("".join(f"{name:>17}" for name in row))
            for one in sorted(ranks, key=lambda one: -one["update"])[:16]:  # the slowest
                logger().info("".join(f"{value:17.6g}" for value in one.values()))
        run.clock.read()  # what was written is no part of the next update
