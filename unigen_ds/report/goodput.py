"""Where the time of a run was spent, from the lines of ``timeline.jsonl`` and ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unigen_ds.report.reading import RunStart, finite

PARTS = {
    "training": "training",
    "data": "waiting for data",
    "saves": "saves",
    "evaluation": "evaluation and own hooks",
    "start_up": "start-up",
    "repeated": "repeated work",
}
"""Field of ``TimeSpent`` -> what a reader calls it."""
_SAVES = "hook:checkpoint"
_OF_TRAINING = {
    f"hook:{name}"
    for name in ("timer", "nan_guard", "skipped", "ema", "ledger", "logger", "signals", "continuity", "timeline")
}
"""Hooks of every run. The time of a user's own hooks is counted with evaluation."""


@dataclass(frozen=True)
class TimeSpent:
    """Seconds of one start, or of a whole run, by part; what a killed start did after its last line is estimated.

    **Goodput** is the time spent on updates that count, without waiting for data, divided by the time of all processes
    of the run from their start to their end (rank 0's). Time between two starts is not part of it. Work that a later
    resume repeats is lost as a whole, its data and saves included, as Google's ML Goodput Measurement defines it.
    """

    training: float = 0.0
    """Updates that count, without waiting for data."""
    data: float = 0.0
    saves: float = 0.0
    evaluation: float = 0.0
    """Validation, previews and hooks of a user's own."""
    start_up: float = 0.0
    repeated: float = 0.0
    """Everything done after the update at which a later start continued."""
    estimated: bool = False
    """Whether a part is estimated, or is not known."""

    @property
    def total(self) -> float:
        return sum(getattr(self, part) for part in PARTS)

    @property
    def goodput(self) -> float | None:
        """0 .. 1; None where no time is recorded."""
        return self.training / self.total if self.total > 0 else None

    def __add__(self, other: TimeSpent) -> TimeSpent:
        parts = {part: getattr(self, part) + getattr(other, part) for part in PARTS}
        return TimeSpent(**parts, estimated=self.estimated or other.estimated)


def spent_by_start(starts: Sequence[RunStart]) -> list[TimeSpent]:
    """One for each start. An update counts in the last start that made it."""
    until = [min([later.update for later in starts[i:]], default=start.end_update) for i, start in enumerate(starts, 1)]
    return [_time_of(start, updates) for start, updates in zip(starts, until, strict=True)]


def _time_of(start: RunStart, until: int) -> TimeSpent:
    """Divide the time of the updates up to ``until``. Updates after the last line count with the average."""
    seconds: dict[float, dict[str, float]] = {start.update: {}}
    for line in start.times:
        sections = line.get("sections")
        clean = {k: n for k, v in sections.items() if (n := finite(v))} if isinstance(sections, Mapping) else {}
        seconds[line.get("update", start.update)] = {**clean, "": finite(line.get("seconds")) or 0.0}
    last, *_ = reversed(seconds)
    updates = sorted(seconds)

    def at(update: float, section: str) -> float:
        """After an update: that of its line, or between those of the two lines around it."""
        return float(np.interp(update, updates, [seconds[one].get(section, 0.0) for one in updates]))

    own = [n for line in start.lines if (n := finite(line.get("time/update"))) is not None]
    average = at(last, "") / (last - start.update) if last > start.update else sum(own) / max(len(own), 1)
    end = min(until, last)
    in_updates = at(end, "") + max(0, min(until, start.end_update) - last) * average
    names = {name for sections in seconds.values() for name in sections if name.startswith("hook:")}
    data, saves = at(end, "data"), at(end, _SAVES)
    hooks = sum(at(end, name) for name in sorted(names - _OF_TRAINING - {_SAVES}))
    start_up = finite(start.record.get("start_up"))
    return TimeSpent(
        training=max(0.0, in_updates - data - saves - hooks),
        data=data,
        saves=saves,
        evaluation=hooks,
        start_up=start_up or 0.0,
        repeated=max(0.0, at(last, "") + (start.end_update - last) * average - in_updates),
        estimated=start.end_update > last or start_up is None,
    )
