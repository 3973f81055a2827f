"""Where the time goes: sections of ``run.clock`` in, window averages, rates and the time to go out.

Time of this rank (``core/clock.py``: on CUDA that of the device), averaged over a window of updates, because one
update's share of waiting varies much. The time of an evaluation is left out. It costs one clock read per update and no
synchronisation.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from unigen_ds.core.batch import Batch
from unigen_ds.core.clock import EVALUATION
from unigen_ds.core.log import logger
from unigen_ds.core.registry import HOOKS, checked
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.hooks.peak import peak_tflops

SECTIONS = ("data", "forward_backward", "step")
WARM_UP_UPDATES = 50
"""Updates before a share is checked: compilation, caches and worker start-up are over by then."""
BOUNDS = {
    "data": (0.0, 0.10, "raise train_dataloader.num_workers or prefetch_factor"),
    "forward_backward": (0.70, 1.0, "see which other share is large"),
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
        self.peak_tflops: float | None = None
        """10**12 operations a second that one device can do; None where that is not known, and before training."""

    def before_train(self, run: Run) -> None:
        self.peak_tflops = peak_tflops(run.peak_tflops)
        run.clock.read()  # building the run is not part of the first update

    def before_train_iter(self, run: Run, index: int, batch: Batch) -> None:
        count = getattr(run.backend.model, "flops", None)
        self._flops += count(batch) if count else 0.0

    def after_update(self, run: Run, result: UpdateResult) -> None:
        seconds, sections = run.clock.read()
        seconds -= sections.get(EVALUATION, 0.0)
        self._updates.append(
            _Update(
                seconds,
                sections,
                sequences=run.progress.sequences - run.previous.sequences,
                samples=run.progress.samples - run.previous.samples,
                tokens=result.tokens,
                flops=self._flops,
            )
        )
        self._flops = 0.0
        self._seen += 1
        self._sequences_left = max(0.0, run.total_sequences - run.progress.sequences)
        if self._seen > WARM_UP_UPDATES:
            self._check_shares()

    def summary(self) -> dict[str, float]:
        """Averages over the window; empty before the first update.

        ``time/update`` and ``time/data`` in seconds per update; ``share/<section>`` and ``share/other`` in 0 .. 1;
        ``tokens_per_second`` and ``samples_per_second`` over all ranks; ``eta`` in seconds.
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
            "samples_per_second": sum(update.samples for update in self._updates) / seconds,
            "eta": self._sequences_left / rate if rate else float("inf"),
        }

    def flops_per_second(self) -> float:
        """Of this rank's model over the window; 0 where the model has no ``flops``."""
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


def find_timer(run: Run) -> IterTimerHook | None:
    """The timer of a run, if it has one."""
    return next((hook for hook in run.hooks if isinstance(hook, IterTimerHook)), None)


# Former names, for one release.
BANDS = BOUNDS
