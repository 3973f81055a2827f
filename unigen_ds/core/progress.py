"""How far a run is: counted in data and in updates, never in a bare "step".

``Progress`` is what a checkpoint stores and what schedules are functions of. An iteration is only a view of it, as its
size depends on the geometry, which a resume may change. ``Ruler`` turns what a user writes (epochs, iterations, ...)
into sequences with the geometry of the first start, and is stored: "100 iterations" stay the same amount of data.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from unigen_ds.core.errors import ConfigError


@dataclass(frozen=True)
class Geometry:
    """How one update is split: sequences per device per iteration, iterations per update, data-parallel ranks."""

    batch_size: int
    accumulative_counts: int = 1
    dp_size: int = 1

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}", allowed="an integer of at least 1")

    @property
    def sequences_per_iteration(self) -> int:
        return self.batch_size * self.dp_size

    @property
    def global_batch_size(self) -> int:
        """Sequences of one update over all ranks: the effective batch size."""
        return self.sequences_per_iteration * self.accumulative_counts

    def __str__(self) -> str:
        return (
            f"{self.batch_size} per device x {self.dp_size} process(es) x {self.accumulative_counts} accumulated"
            f" = {self.global_batch_size}"
        )


def split_global_batch(
    total: int, *, accumulative_counts: int, dp_size: int, batch_size: int | None = None
) -> Geometry:
    """The geometry whose update has ``total`` sequences. Raises ``ConfigError`` naming the nearest valid totals."""
    unit = accumulative_counts * dp_size
    below = max(total // unit, 1) * unit
    if total < 1 or total % unit:
        raise ConfigError(
            f"global_batch_size {total} cannot be split over {dp_size} process(es) x {accumulative_counts} accumulated",
            allowed=f"multiples of {unit}; the nearest are {below} and {below + unit}",
        )
    if batch_size is not None and batch_size * unit != total:
        raise ConfigError(
            f"batch_size {batch_size} x {dp_size} process(es) x {accumulative_counts} accumulated is"
            f" {batch_size * unit}, and global_batch_size is {total}",
            remedy=f"leave batch_size out, or make it {total // unit}",
        )
    return Geometry(total // unit, accumulative_counts, dp_size)


@dataclass(frozen=True)
class Progress:
    """Global completed counts. ``updates`` includes skipped ones (their data was consumed); ``epoch``: of the next
    data.
    """

    sequences: int = 0
    samples: int = 0
    tokens: int = 0
    updates: int = 0
    skipped_updates: int = 0
    epoch: int = 0

    def advance(self, *, sequences: int, samples: int, tokens: int, epoch: int, applied: bool) -> Progress:
        """Return the progress after one more update, which consumed these counts over all ranks."""
        return Progress(
            sequences=self.sequences + sequences,
            samples=self.samples + samples,
            tokens=self.tokens + tokens,
            updates=self.updates + 1,
            skipped_updates=self.skipped_updates + (not applied),
            epoch=epoch,
        )

    def iteration(self, geometry: Geometry) -> int:
        return self.sequences // geometry.sequences_per_iteration

    def count(self, unit: str) -> int:
        """The completed count of a unit that progress itself counts (all but ``iteration``)."""
        names = {"sequence": "sequences", "sample": "samples", "token": "tokens", "update": "updates", "epoch": "epoch"}
        if unit not in names:
            raise ConfigError(f"progress does not count in unit {unit!r}", allowed=", ".join(names))
        return getattr(self, names[unit])


@dataclass(frozen=True)
class Duration:
    """An amount of a unit that ``Progress`` counts. Made by ``Ruler.duration`` from what a user wrote."""

    value: float
    unit: str = "sequence"

    def __post_init__(self) -> None:
        if not (isinstance(self.value, (int, float)) and self.value > 0):
            raise ConfigError(f"a duration of {self.value!r} {self.unit}(s)", allowed="a positive number")

    def reached(self, progress: Progress) -> bool:
        return progress.count(self.unit) >= self.value

    def every(self, progress: Progress, previous: Progress) -> bool:
        """Whether a multiple was crossed since ``previous``: once, although accumulation or a resume jumped over it."""
        return math.floor(progress.count(self.unit) / self.value) > math.floor(previous.count(self.unit) / self.value)


@dataclass(frozen=True)
class Ruler:
    """Converts user units to data, with the geometry and epoch length of the first start. Stored in the manifest."""

    geometry: Geometry
    sequences_per_epoch: int

    def to_sequences(self, value: float, unit: str) -> float:
        """Sequences in ``value`` epochs, iterations, updates or sequences (may be fractional)."""
        sizes = {
            "epoch": self.sequences_per_epoch,
            "iteration": self.geometry.sequences_per_iteration,
            "update": self.geometry.global_batch_size,
            "sequence": 1,
        }
        if unit not in sizes:
            raise ConfigError(f"unit {unit!r} cannot be expressed in sequences", allowed=", ".join(sizes))
        return value * sizes[unit]

    def duration(self, value: float, unit: str) -> Duration:
        """A duration whose meaning survives a change of geometry: samples and tokens as they are, else sequences."""
        if unit in ("sample", "token"):
            return Duration(value, unit)
        return Duration(self.to_sequences(Duration(value, unit).value, unit), "sequence")


class Skip(NamedTuple):
    """Global sequence numbers ``first .. stop - 1`` that a run leaves out. They count in its position as if used."""

    first: int
    stop: int
    why: str = "by hand"

    def __str__(self) -> str:
        return f"{self.first}:{self.stop}"

    @classmethod
    def parse(cls, text: Any) -> Skip:
        """``96:128``. Raises ``ConfigError``."""
        first, _, stop = str(text).partition(":")
        if not (first.isdecimal() and stop.isdecimal() and int(first) < int(stop)):
            raise ConfigError(f"skip_sequences has {text!r}", allowed="A:B with A < B: sequences A .. B-1 of the run")
        return cls(int(first), int(stop))


def merged_skips(skips: Iterable[Skip]) -> tuple[Skip, ...]:
    """Sort skips; those that overlap become one."""
    disjoint: list[Skip] = []
    for skip in sorted(set(skips)):
        if disjoint and skip.first < disjoint[-1].stop:
            last = disjoint.pop()
            whys = [last.why] + [skip.why] * (skip.stop > last.stop and skip.why != last.why)
            skip = Skip(last.first, max(last.stop, skip.stop), "; ".join(whys))
        disjoint.append(skip)
    return tuple(disjoint)
