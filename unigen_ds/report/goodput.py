"""Where the time of a run was spent, and the share of it that trained: its goodput.

**Goodput** is the time spent on updates that count, without waiting for data, divided by the time of all processes of
the run from their start to their end (rank 0's). Time between two starts is not part of it. Work that a later resume
repeats is lost as a whole, its data and saves included. Google's ML Goodput Measurement has the same definition.

In: the starts of a run with their lines of ``timeline.jsonl``. What a killed start did after the last of them is
estimated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unigen_ds.evaluation.metric_lines import number
from unigen_ds.report.reading import RunStart
from unigen_ds.report.value_formats import time_of

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
    """Seconds of one start, or of a whole run, by part."""

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


def idle_before(starts: Sequence[RunStart], spent: Sequence[Spent]) -> list[float | None]:
    """Seconds between the end of the start before and each start; None where that is not known."""
    began = [time_of(start.record.get("time")) for start in starts]
    seconds: list[float | None] = [None] * len(starts[:1])
    for index in range(1, len(starts)):
        now, before, previous = began[index], began[index - 1], spent[index - 1]
        if now is None or before is None:
            seconds.append(None)
        else:
            worked = previous.total - previous.start_up + spent[index].start_up
            seconds.append(max(0.0, (now - before).total_seconds() - worked))
    return seconds


@dataclass(frozen=True)
class _Point:
    update: float
    seconds: float
    sections: Mapping[str, float]


def _spent(start: RunStart, until: int) -> Spent:
    """Divide the time of the updates up to ``until``. Updates after the last line count with the average."""
    points = [_Point(start.update, 0.0, {})]
    for line in start.times:
        sections = line.get("sections")
        clean = {k: n for k, v in sections.items() if (n := number(v))} if isinstance(sections, Mapping) else {}
        points.append(_Point(line.get("update", start.update), number(line.get("seconds")) or 0.0, clean))
    last = points[-1]
    missing = start.reached - last.update
    per_update = last.seconds / (last.update - start.update) if last.update > start.update else _average(start)
    total = last.seconds + missing * per_update
    counted = _at(points, min(until, last.update)) if until < last.update else last
    seconds = counted.seconds + max(0, min(until, start.reached) - last.update) * per_update
    data, saves = (counted.sections.get(name, 0.0) for name in ("data", _SAVES))
    hooks = sum(v for k, v in counted.sections.items() if k[:5] == "hook:" and k not in {*_OF_TRAINING, _SAVES})
    start_up = number(start.record.get("start_up"))
    return Spent(
        training=max(0.0, seconds - data - saves - hooks),
        data=data,
        saves=saves,
        evaluation=hooks,
        start_up=start_up or 0.0,
        repeated=max(0.0, total - seconds),
        estimated=missing > 0 or start_up is None,
    )


def _at(points: Sequence[_Point], update: float) -> _Point:
    """After an update: the line of that update, or between the two lines around it."""
    exact = [point for point in points if point.update == update]
    if exact:
        return exact[-1]
    for first, second in zip(points, points[1:], strict=False):
        if first.update < update < second.update:
            share = (update - first.update) / (second.update - first.update)

            def between(before: float, after: float, share: float = share) -> float:
                return before + (after - before) * share

            a, b = first.sections, second.sections
            sections = {name: between(a.get(name, 0.0), b.get(name, 0.0)) for name in {*a, *b}}
            return _Point(update, between(first.seconds, second.seconds), sections)
    return points[0]


def _average(start: RunStart) -> float:
    """Seconds of an update, of a start without a line of times."""
    times = [n for line in start.lines if (n := number(line.get("time/update"))) is not None]
    return sum(times) / len(times) if times else 0.0


def changes(starts: Sequence[RunStart]) -> list[dict[str, tuple[Any, Any]]]:
    """For each start what differs from the one before: ``geometry.batch_size -> (before, now)``, of the effective
    batch, the engine and its processes, the code and the versions.
    """
    identities = [_identity(start.record) for start in starts]
    return [
        {key: (a.get(key), b.get(key)) for key in sorted({*a, *b}) if a.get(key) != b.get(key)}
        for a, b in zip(identities[:1] + identities, identities, strict=False)
    ]


def _identity(record: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in ("geometry", "topology", "versions", "git"):
        part = record.get(name)
        values |= {f"{name}.{key}": value for key, value in part.items()} if isinstance(part, Mapping) else {}
    for name, value in values.items():
        if name.startswith("git.") and isinstance(value, Mapping):
            values[name] = value.get("commit")
    machine = record.get("machine")
    values["machine.device"] = machine.get("device") if isinstance(machine, Mapping) else None
    return values
