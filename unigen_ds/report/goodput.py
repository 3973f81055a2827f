"""Where the time of a run was spent, from the lines of ``timeline.jsonl`` and ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unigen_ds.report.reading import RunStart, number

PARTS = {
    "training": "training",
    "data": "waiting for data",
    "saves": "saves",
    "evaluation": "evaluation and own hooks",
    "start_up": "start-up",
    "repeated": "repeated work",
}
"""Field of ``Spent`` -> what a reader calls it."""
_SAVES = "hook:checkpoint"
_OF_TRAINING = {
    f"hook:{name}"
    for name in ("timer", "nan_guard", "skipped", "ema", "ledger", "logger", "signals", "continuity", "timeline")
}
"""Hooks of every run. The time of a user's own hooks is counted with evaluation."""


@dataclass(frozen=True)
class Spent:
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

    def __add__(self, other: Spent) -> Spent:
        parts = {part: getattr(self, part) + getattr(other, part) for part in PARTS}
        return Spent(**parts, estimated=self.estimated or other.estimated)


def spent_by_start(starts: Sequence[RunStart]) -> list[Spent]:
    """One for each start. An update counts in the last start that made it."""
    until = [min([later.update for later in starts[i:]], default=start.reached) for i, start in enumerate(starts, 1)]
    return [_spent(start, updates) for start, updates in zip(starts, until, strict=True)]


def _spent(start: RunStart, until: int) -> Spent:
    """Divide the time of the updates up to ``until``. Updates after the last line count with the average."""
    seconds: dict[float, dict[str, float]] = {start.update: {}}
    for line in start.times:
        sections = line.get("sections")
        clean = {k: n for k, v in sections.items() if (n := number(v))} if isinstance(sections, Mapping) else {}
        seconds[line.get("update", start.update)] = {**clean, "": number(line.get("seconds")) or 0.0}
    last, *_ = reversed(seconds)
    updates = sorted(seconds)

    def at(update: float, section: str) -> float:
        """After an update: that of its line, or between those of the two lines around it."""
        return float(np.interp(update, updates, [seconds[one].get(section, 0.0) for one in updates]))

    own = [n for line in start.lines if (n := number(line.get("time/update"))) is not None]
    average = at(last, "") / (last - start.update) if last > start.update else sum(own) / max(len(own), 1)
    counted = min(until, last)
    spent = at(counted, "") + max(0, min(until, start.reached) - last) * average
    names = {name for sections in seconds.values() for name in sections if name.startswith("hook:")}
    data, saves = at(counted, "data"), at(counted, _SAVES)
    hooks = sum(at(counted, name) for name in sorted(names - _OF_TRAINING - {_SAVES}))
    start_up = number(start.record.get("start_up"))
    return Spent(
        training=max(0.0, spent - data - saves - hooks),
        data=data,
        saves=saves,
        evaluation=hooks,
        start_up=start_up or 0.0,
        repeated=max(0.0, at(last, "") + (start.reached - last) * average - spent),
        estimated=start.reached > last or start_up is None,
    )
