"""Where the time of a run was spent, and the share of it that trained: its goodput.

**Goodput** is the time spent on updates that count, without waiting for data, divided by the time of all processes of
the run from their start to their end (rank 0's). Time between two starts is not part of it. Work that a later resume
repeats is lost as a whole, its data and saves included. Google's ML Goodput Measurement has the same definition.

In: the starts of a run with their lines of ``timeline.jsonl``. For starts without them the averages of
``metrics.jsonl`` are used, which have neither start-up nor saves: ``estimated``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from unigen_ds.evaluation.report.lines import is_update, number
from unigen_ds.evaluation.report.reading import RunStart

PARTS = ("training", "data", "saves", "evaluation", "start_up", "repeated")
_EVALUATION = ("hook:evaluate", "hook:preview", "hook:async_evaluate")
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
    """Whether a part was computed from averages, or is not known."""

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
    found = []
    for index, start in enumerate(starts):
        kept = min([later.update for later in starts[index + 1 :]], default=start.reached)
        found.append(_recorded(start, kept) if start.record is not None else _estimated(start, kept))
    return found


def idle_before(starts: Sequence[RunStart], spent: Sequence[Spent]) -> list[float | None]:
    """Seconds between the end of the start before and each start; None where that is not known."""
    found: list[float | None] = []
    for index, start in enumerate(starts):
        now, before = _began(start), _began(starts[index - 1]) if index else None
        if now is None or before is None:
            found.append(None)
            continue
        previous = spent[index - 1]
        ended = before + previous.total - previous.start_up
        found.append(max(0.0, now - spent[index].start_up - ended))
    return found


def _began(start: RunStart) -> float | None:
    """When its training began, in seconds since 1970."""
    try:
        return datetime.fromisoformat(str((start.record or {}).get("time"))).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


@dataclass(frozen=True)
class _Point:
    update: float
    seconds: float
    sections: Mapping[str, float]


def _recorded(start: RunStart, kept: int) -> Spent:
    """From the lines of the timeline. A kill leaves updates after the last line: they count with the average."""
    points = [_Point(start.update, 0.0, {})]
    for line in start.times:
        sections = line.get("sections")
        clean = {k: n for k, v in sections.items() if (n := number(v))} if isinstance(sections, Mapping) else {}
        points.append(_Point(line.get("update", start.update), number(line.get("seconds")) or 0.0, clean))
    last = points[-1]
    missing = start.reached - last.update
    per_update = last.seconds / (last.update - start.update) if last.update > start.update else _average(start)
    total = last.seconds + missing * per_update
    counted = _at(points, min(kept, last.update)) if kept < last.update else last
    seconds = counted.seconds + max(0, min(kept, start.reached) - last.update) * per_update
    data = counted.sections.get("data", 0.0)
    saves = counted.sections.get("hook:checkpoint", 0.0)
    known = {*_OF_TRAINING, "hook:checkpoint"}
    hooks = sum(v for k, v in counted.sections.items() if k in _EVALUATION or (k[:5] == "hook:" and k not in known))
    start_up = number((start.record or {}).get("start_up"))
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
            names = {*first.sections, *second.sections}
            sections = {n: _between(first.sections.get(n, 0.0), second.sections.get(n, 0.0), share) for n in names}
            return _Point(update, _between(first.seconds, second.seconds, share), sections)
    return points[0]


def _between(first: float, second: float, share: float) -> float:
    return first + (second - first) * share


def _average(start: RunStart) -> float:
    times = [n for line in start.lines if (n := number(line.get("time/update"))) is not None]
    return sum(times) / len(times) if times else 0.0


def _estimated(start: RunStart, kept: int) -> Spent:
    """From the averages of ``metrics.jsonl``: neither start-up nor saves are known."""
    training = data = repeated = 0.0
    before = start.update
    for line in start.lines:
        if not is_update(line):
            continue
        each, waited = (number(line.get(f"time/{name}")) or 0.0 for name in ("update", "data"))
        count, after = max(0, line["update"] - before), max(0, line["update"] - max(kept, before))
        before = line["update"]
        repeated += min(after, count) * each
        data += (count - min(after, count)) * waited
        training += (count - min(after, count)) * max(0.0, each - waited)
    return Spent(training=training, data=data, repeated=repeated, estimated=True)


def changes(starts: Sequence[RunStart]) -> list[dict[str, tuple[Any, Any]]]:
    """For each start what differs from the one before: ``geometry.batch_size -> (before, now)``, of the effective
    batch, the engine and its processes, the code and the versions. Empty where that is not recorded.
    """
    found: list[dict[str, tuple[Any, Any]]] = []
    before: dict[str, Any] | None = None
    for start in starts:
        now = _identity(start)
        found.append(
            {k: (before.get(k), now.get(k)) for k in sorted({*before, *now}) if before.get(k) != now.get(k)}
            if before is not None and now is not None
            else {}
        )
        before = now if now is not None else before
    return found


def _identity(start: RunStart) -> dict[str, Any] | None:
    if start.record is None:
        return None
    found: dict[str, Any] = {}
    for name in ("geometry", "topology", "versions"):
        part = start.record.get(name)
        found |= {f"{name}.{key}": value for key, value in part.items()} if isinstance(part, Mapping) else {}
    git = start.record.get("git")
    for name, part in git.items() if isinstance(git, Mapping) else ():
        found[f"git.{name}"] = part.get("commit") if isinstance(part, Mapping) else part
    machine = start.record.get("machine")
    found["machine.device"] = machine.get("device") if isinstance(machine, Mapping) else None
    return found
