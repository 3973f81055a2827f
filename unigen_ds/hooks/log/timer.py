"""Where the time goes: sections of ``run.clock`` in, window averages, rates and the time to go out.

Time of this rank (``system/clock.py``: on CUDA that of the device), averaged over a window of updates, because one
update's share of waiting varies much. The time of an evaluation is left out. It costs one clock read per update and no
synchronisation.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated

import torch
from annotated_types import Ge

from unigen_ds.config.registry import HOOKS, checked
from unigen_ds.core.batch import Batch
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.system import dist
from unigen_ds.system.clock import COMMUNICATION, EVALUATION, count_communication
from unigen_ds.system.log import logger

SECTIONS = ("data", "forward_backward", COMMUNICATION, "step")
TOTAL_AFTER_UPDATES = 20
"""Updates of a process after which the time of the whole training is estimated; its first is left out."""
WARM_UP_UPDATES = 50
"""Updates before a share is checked: compilation, caches and worker start-up are over by then."""
BOUNDS = {
    "data": (0.0, 0.10, "raise train_dataloader.num_workers or prefetch_factor"),
    "forward_backward": (0.70, 1.0, "see which other share is large"),
    COMMUNICATION: (0.0, 0.15, "accumulate more micro-batches in an update, or shard inside of a node (HYBRID_SHARD)"),
    "other": (0.0, 0.05, "look for slow hooks: previews, checkpoints and logging count here"),
}
"""Share of an update's time: lower bound, upper bound, what to do outside it."""


@dataclass(frozen=True)
class _Update:
    seconds: float
    sections: dict[str, float]
    sequences: int
    samples: int
    tokens: int
    flops: float
    own_tokens: int
    """This rank's share, as are the next two."""
    own_samples: int
    own_images: int

    def statistics(self) -> dict[str, float]:
        """nanoVLM's five, and the time shares, of one update of this rank."""
        times = {name: self.sections.get(name, 0.0) for name in SECTIONS}
        other = max(0.0, self.seconds - sum(times.values()))
        return {
            "tokens_per_second": self.own_tokens / self.seconds,
            "data_load_time": times["data"],
            "fw_bw_time": times["forward_backward"],
            "post_process_time": times["step"] + other,
            "communication_time": times[COMMUNICATION],
            "images_per_sample": self.own_images / max(self.own_samples, 1),
            **{f"share_{name}": seconds / self.seconds for name, seconds in times.items()},
            "share_other": other / self.seconds,
        }


@HOOKS.register_module()
class IterTimerHook(Hook):
    """Keeps the last ``window`` updates; ``summary`` is what the logger prints.

    Args:
        window: updates that rates and time shares are averaged over.
    """

    name = "timer"

    @checked()
    def __init__(self, *, window: Annotated[int, Ge(1)] = 50) -> None:
        self._updates: deque[_Update] = deque(maxlen=window)
        self._seen = 0
        self._warned: set[str] = set()
        self._sequences_left = 0.0
        self._flops = 0.0
        self._own = [0, 0, 0]
        self._statistics: list[dict[str, float]] = []
        self._so_far_s = 0.0
        self._timed = ExitStack()
        self.peak_tflops: float | None = None
        """10**12 operations a second that one device can do; None where that is not known, and before training."""

    def before_train(self, run: Run) -> None:
        self.peak_tflops = peak_tflops(run.peak_tflops)
        self._timed.enter_context(count_communication(run.clock))
        run.clock.read()  # building the run is not part of the first update

    def after_run(self, run: Run) -> None:
        self._timed.close()

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._timed.close()

    def before_train_iter(self, run: Run, index: int, batch: Batch) -> None:
        count = getattr(run.backend.model, "flops", None)
        self._flops += count(batch) if count else 0.0
        for index, number in enumerate((batch.num_tokens, batch.num_samples, batch.num_images)):
            self._own[index] += number

    def after_update(self, run: Run, result: UpdateResult) -> None:
        seconds, sections = run.clock.read()
        seconds -= sections.get(EVALUATION, 0.0)
        update = _Update(
            seconds,
            sections,
            sequences=run.progress.sequences - run.previous.sequences,
            samples=run.progress.samples - run.previous.samples,
            tokens=result.tokens,
            flops=self._flops,
            own_tokens=self._own[0],
            own_samples=self._own[1],
            own_images=self._own[2],
        )
        self._updates.append(update)
        self._statistics.append(update.statistics())
        self._flops, self._own = 0.0, [0, 0, 0]
        self._seen += 1
        self._sequences_left = max(0.0, run.total_sequences - run.progress.sequences)
        self._so_far_s += seconds if self._seen > 1 else 0.0
        if self._seen == TOTAL_AFTER_UPDATES and dist.is_main():
            self._estimate(run)
        if self._seen > WARM_UP_UPDATES:
            self._check_shares()

    def summary(self) -> dict[str, float]:
        """Averages over the window; empty before the first update.

        ``time/update`` and ``time/data`` in seconds per update; ``share/<section>`` and ``share/other`` in 0 .. 1;
        ``tokens_per_second`` and ``samples_per_second`` over all ranks, ``tokens_per_second_per_device`` their mean;
        ``eta`` in seconds.
        """
        seconds = sum(update.seconds for update in self._updates)
        if seconds <= 0:
            return {}
        by_section = {name: sum(u.sections.get(name, 0.0) for u in self._updates) for name in SECTIONS}
        rate = sum(update.sequences for update in self._updates) / seconds
        return {
            "time/update": seconds / len(self._updates),
            "time/data": by_section["data"] / len(self._updates),
            **{f"share/{name}": spent / seconds for name, spent in by_section.items()},
            "share/other": max(0.0, 1.0 - sum(by_section.values()) / seconds),
            "tokens_per_second": sum(update.tokens for update in self._updates) / seconds,
            "tokens_per_second_per_device": sum(update.tokens for update in self._updates)
            / seconds
            / dist.world_size(),
            "samples_per_second": sum(update.samples for update in self._updates) / seconds,
            "eta": self._sequences_left / rate if rate else float("inf"),
        }

    def _estimate(self, run: Run) -> None:
        """Log the time of the whole training at the speed of the first updates."""
        per_update = self._so_far_s / (self._seen - 1)
        size = run.geometry.global_batch_size
        left = self._sequences_left / size * per_update
        if left < float("inf"):
            total = run.total_sequences / size * per_update
            logger().info(
                "Estimated total time: %s (%.0f updates of %.3g s); %s to go, until %s.",
                timedelta(seconds=round(total)), run.total_sequences / size, per_update,
                timedelta(seconds=round(left)), (datetime.now() + timedelta(seconds=left)).strftime("%Y-%m-%d %H:%M"),
            )  # fmt: skip

    def take_statistics(self) -> list[dict[str, float]]:
        """``_Update.statistics`` of each update since the last call, of this rank."""
        statistics, self._statistics = self._statistics, []
        return statistics

    def flops_per_second(self) -> float:
        """Return the operations a second of this rank's model over the window; 0 where the model has no ``flops``."""
        seconds = sum(update.seconds for update in self._updates)
        return sum(update.flops for update in self._updates) / seconds if seconds else 0.0

    def _check_shares(self) -> None:
        """Warn once for each share that is outside its bounds."""
        if self._warned.issuperset(BOUNDS):
            return
        summary = self.summary()
        for name, (low, high, advice) in BOUNDS.items():
            share = summary.get(f"share/{name}", low)
            if name not in self._warned and not low <= share <= high:
                self._warned.add(name)
                bound = f"at most {high:.0%}" if share > high else f"at least {low:.0%}"
                logger().warning("%.0f %% of the time is %s; expected is %s: %s", 100 * share, name, bound, advice)


def statistics_over_ranks(timer: IterTimerHook) -> dict[str, float]:
    """``training_stats/avg_<name>``, ``max_`` and ``min_`` over the updates since the last call and over all ranks.
    Collective.

    The names are nanoVLM's (``tokens_per_second``, ``data_load_time``, ``fw_bw_time``, ``post_process_time``,
    ``images_per_sample``; seconds of an update), ``communication_time``, and ``share_<section>``;
    ``training_stats/tokens_per_second/rank<k>`` is the mean of one device.
    """
    own = timer.take_statistics()
    values = {name: [update[name] for update in own] for name in own[0]} if own else {}
    ranks = dist.gather_objects({name: (sum(v) / len(v), max(v), min(v)) for name, v in values.items()})
    values_over_ranks: dict[str, float] = {}
    for name in ranks[0]:
        averages, largest, smallest = zip(*(rank[name] for rank in ranks), strict=True)
        values_over_ranks[f"training_stats/avg_{name}"] = sum(averages) / len(ranks)
        values_over_ranks[f"training_stats/max_{name}"] = max(largest)
        values_over_ranks[f"training_stats/min_{name}"] = min(smallest)
    for rank, of_rank in enumerate(ranks if values_over_ranks else ()):
        values_over_ranks[f"training_stats/tokens_per_second/rank{rank}"] = of_rank["tokens_per_second"][0]
    return values_over_ranks


def find_timer(run: Run) -> IterTimerHook | None:
    """The timer of a run, if it has one."""
    return next((hook for hook in run.hooks if isinstance(hook, IterTimerHook)), None)


# The peak of a device: dense bf16 operations a second, from the maker's data sheet. MFU is a share of it.

PEAK_TFLOPS = {
    "B200": 2250, "GH200": 989, "H200 NVL": 835, "H200": 989, "H100 NVL": 835, "H100 PCIe": 756, "H100": 989,
    "H20": 148, "A100": 312, "A800": 312, "A40": 150, "A30": 165, "A10": 125, "RTX A6000": 155, "RTX 3090": 71,
    "L40S": 362, "L40": 181, "L4": 121, "RTX 6000 Ada": 364, "RTX 4090": 165, "RTX 5090": 209,
    "V100 PCIE": 112, "V100": 125, "T4": 65, "MI300X": 1307,
}  # fmt: skip
"""Words of a device's name -> 10**12 dense bf16 operations a second with fp32 sums (V100 and T4 have no bf16: fp16).
The first that fits is used."""


def device_peak_tflops(name: str) -> float | None:
    """Return the peak of the device named ``name`` in 10**12 operations a second, or None if it is unknown."""
    words = f" {name.replace('-', ' ')} "
    return next((float(peak) for part, peak in PEAK_TFLOPS.items() if f" {part} " in words), None)


def peak_tflops(setting: float | None) -> float | None:
    """Return ``setting``, or the device's peak where it is None and the device is known."""
    if setting is not None:
        return setting
    return device_peak_tflops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
