"""Some records of a source: the first ones, those that filters keep, or one side of a share for validation.

In: a source and the numbers of its records. Out: a ``Subset``, which is a ``PlannedDataset`` of these records. Numbers
stay those of the data file (``record_number``), so a sample id names the same record with and without a subset. Whether
a record is in a share for validation (``val_dataloader=dict(split=0.02)``) is a function of (seed, digest of the
record's content): equal records are on the same side, in whichever source they are, and records that are appended later
move no other one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.data.cache.array_cache import fingerprint
from unigen_ds.data.datasets.dataset import PlannedDataset, source_names
from unigen_ds.data.order.order import mix_many
from unigen_ds.data.samples.sample import COLUMNS, Array, Counts, Sample
from unigen_ds.system import dist
from unigen_ds.system.log import logger, notice
from unigen_ds.system.seeding import derive_seed


class Choice(Protocol):
    """The reason why a subset has its records: ``FirstRecords``, ``Side`` or ``Filtering``."""

    def facts(self, numbers: Array) -> tuple[object, ...]:
        """Return what the fingerprint of the records ``numbers`` has beside that of the source."""
        ...

    def prefix_facts(self, numbers: Array) -> tuple[object, ...] | None:
        """Return the same for ``prefix_digest``, or None if their digest is the source's own."""
        ...


class Subset:
    """Some records of a source, in its order.

    Args:
        whole: the source, or a subset of it.
        numbers: the numbers of the records in ``whole``, ascending.
        choice: a ``Choice``.
    """

    def __init__(self, whole: PlannedDataset, numbers: Array, choice: Any) -> None:
        self.whole, self.numbers, self.choice = whole, numbers, choice
        self.name, self.weight, self.group = whole.name, whole.weight, getattr(whole, "group", None)

    @property
    def cache_folder(self) -> Path | None:
        return self.whole.cache_folder

    def __len__(self) -> int:
        return len(self.numbers)

    def lengths(self) -> tuple[Array, Array]:
        return self.counts().tokens, self.counts().tiles

    def counts(self) -> Counts:
        return self._counts

    @cached_property
    def _counts(self) -> Counts:
        counts = self.whole.counts()
        if len(self) == int(self.numbers[-1:].sum()) + 1:  # the first ones: views, which need no memory
            return Counts(*(getattr(counts, name)[: len(self)] for name in COLUMNS))
        return counts.some(self.numbers, self.cache_folder, lambda: fingerprint(self.fingerprint, COLUMNS))

    def sample(self, index: int, *, pass_number: int = 0) -> Sample:
        return self.whole.sample(int(self.numbers[index]), pass_number=pass_number)

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.whole.fingerprint, *self.choice.facts(self.numbers))

    def prefix_digest(self, number: int) -> str:
        """As of ``PlannedDataset``. Covers the records between them that are not chosen, too."""
        numbers = self.numbers[:number]
        whole = self.whole.prefix_digest(int(numbers[-1]) + 1 if number else 0)
        facts = self.choice.prefix_facts(numbers)
        return whole if facts is None else fingerprint(number, whole, *facts)

    def content_digests(self) -> Array:
        """[N] as of ``UnifiedGenerationDataset``: a record is on the same side of a share in each subset."""
        whole: Any = self.whole
        digests: Array = whole.content_digests()[self.numbers]
        return digests


def subsets(dataset: PlannedDataset) -> Iterator[Subset]:
    """Yield the subsets through which a data set was made, the last one first; none for a source itself."""
    while isinstance(dataset, Subset):
        yield dataset
        dataset = dataset.whole


def subset_by(dataset: PlannedDataset, kind: type) -> Subset | None:
    """Return the subset of a data set whose choice has the type ``kind``, or None if there is none."""
    return next((one for one in subsets(dataset) if isinstance(one.choice, kind)), None)


def whole_of(dataset: PlannedDataset) -> PlannedDataset:
    """Return the source that a sample id refers to."""
    while isinstance(dataset, Subset):
        dataset = dataset.whole
    return dataset


def record_number(dataset: PlannedDataset, index: int) -> int:
    """Return the number that a record of ``dataset`` has in sample ids: that in ``whole_of(dataset)``."""
    for subset in subsets(dataset):
        index = int(subset.numbers[index])
    return getattr(whole_of(dataset), "first_number", 0) + index


@dataclass(frozen=True)
class FirstRecords:
    """``num_used_data`` of a data set: only its first records are trained on."""

    def facts(self, numbers: Array) -> tuple[object, ...]:
        """See ``Choice``."""
        return "num_used_data", len(numbers)

    def prefix_facts(self, numbers: Array) -> None:
        """See ``Choice``."""


def first_records(dataset: Any) -> Any:
    """Return the data set, or the part that its ``num_used_data`` asks for. Warns where it has no more than that."""
    number = getattr(dataset, "num_used_data", None)
    if number is None or number == len(dataset):
        return dataset
    if number < len(dataset):
        return Subset(dataset, np.arange(number), FirstRecords())
    if dist.env_rank() == 0:
        text = "%s: num_used_data is %d, and there are %d records: all of them are used"
        logger().warning(text, dataset.name, number, len(dataset))
    return dataset


def first_records_line(subset: Subset) -> str:
    """A subset by ``FirstRecords`` as a sentence."""
    number = f"{len(subset):,}"
    return f"num_used_data={number}: the first {number} of {len(subset.whole):,} records are used"


@dataclass(frozen=True)
class Division:
    """How the records are divided into those that are trained on and those for validation."""

    share: float
    """Of the records, in (0, 1), that are not trained on; of many records: each is drawn on its own."""
    seed: int

    def drawn(self, digests: Array) -> NDArray[np.float64]:
        """[N] a number in [0, 1) of each record: below ``share`` it is in the share, so a larger one contains it."""
        key = np.uint64(derive_seed(self.seed, "validation"))
        drawn = mix_many(digests.astype(np.int64).view(np.uint64) ^ key) >> np.uint64(11)
        return drawn.astype(np.float64) / 2.0**53


@dataclass(frozen=True)
class Side:
    """The records of one side of a division."""

    division: Division
    name: str
    """``train`` or ``validation``."""

    def facts(self, numbers: Array) -> tuple[object, ...]:
        """See ``Choice``."""
        return self.division, self.name

    prefix_facts = facts


def division_of(datasets: Sequence[PlannedDataset]) -> Division | None:
    """Return how the records of the sources are divided, or None if they are not."""
    sides = (subset_by(dataset, Side) for dataset in datasets)
    return next((side.choice.division for side in sides if side is not None), None)


def divide(datasets: Sequence[PlannedDataset], division: Division) -> tuple[list[Subset], list[Subset]]:
    """Return each source without the share, and the share of each, which may be empty.

    Raises ``DataError`` where nothing would be left to train on, or nothing to validate on; ``ConfigError`` for a
    source whose records have no digests.
    """
    training: list[Subset] = []
    validation: list[Subset] = []
    least, what = 1.0, f"val_dataloader.split={division.share:g}"
    for name, dataset in zip(source_names(datasets), datasets, strict=True):
        kind: Any = type(whole_of(dataset))
        if not hasattr(kind, "content_digests"):
            raise ConfigError(
                f"val_dataloader.split divides {name}, and {kind.__name__} has no content_digests()",
                remedy=f"add content_digests(self) to {kind.__name__}: 64 bits of each record as an int64 array; or"
                " give val_dataloader a dataset of its own",
            )
        drawn = division.drawn(dataset.content_digests())  # type: ignore[attr-defined]
        is_held_out, least = drawn < division.share, min(least, float(drawn.min(initial=1.0)))
        training.append(Subset(dataset, np.flatnonzero(~is_held_out), Side(division, "train")))
        validation.append(Subset(dataset, np.flatnonzero(is_held_out), Side(division, "validation")))
        if not len(training[-1]):
            raise DataError(
                f"{what} leaves none of the {len(dataset):,} records of {name} to train on",
                remedy="a smaller share, more data, or a dataset of its own for val_dataloader",
            )
        if not len(validation[-1]):
            notice(f"{what} selects none of the {len(dataset):,} records of {name}.")
    if not any(map(len, validation)):
        raise DataError(
            f"{what} selects none of {sum(map(len, datasets)):,} records (each is drawn on its own)",
            remedy=f"val_dataloader.split={_above(least)} selects at least one of these; or more data, or a dataset of"
            " its own for val_dataloader",
        )
    return training, validation


def _above(share: float) -> str:
    """A short number that is larger."""
    step = 10.0 ** (math.floor(math.log10(share)) - 1) if share else 1e-6
    return f"{(math.floor(share / step) + 1) * step:.6g}"
