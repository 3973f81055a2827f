"""A share of the training records that is never trained on: ``val_dataloader=dict(split=0.02)``.

In: a source, a share and a seed. Out: two sources, one of all other records and one of the share. Whether a record is
in the share is a function of (seed, digest of the record's content): equal records are on the same side, in whichever
source they are, and records that are appended later move no other one. Numbers of records stay those of the data file,
so a sample id names the same record with and without a split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.data.cache.array_cache import fingerprint
from unigen_ds.data.datasets.dataset import PlannedDataset, source_names
from unigen_ds.data.datasets.filtered import FirstRecords, Selected
from unigen_ds.data.order.order import mix_many
from unigen_ds.data.samples.counts import Array
from unigen_ds.system.log import notice
from unigen_ds.system.seeding import derive_seed


class Digested(Protocol):
    """A source whose records can be divided."""

    def content_digests(self) -> Array:
        """[N] 64 bits of the content of each record, as its file has it: no setting of the run changes it."""
        ...


@dataclass(frozen=True)
class Division:
    """How the records are divided."""

    share: float
    """Of the records, in (0, 1), that are not trained on; of many records: each is drawn on its own."""
    seed: int

    def held_out(self, digests: Array) -> NDArray[np.bool_]:
        """[N] whether each record is in the share. A larger share contains a smaller one."""
        return self._drawn(digests) < self.share

    def smallest(self, digests: Array) -> float:
        """The largest share that selects no record: a larger one selects at least one."""
        return float(self._drawn(digests).min(initial=1.0))

    def _drawn(self, digests: Array) -> NDArray[np.float64]:
        """[N] in [0, 1), of each record."""
        key = np.uint64(derive_seed(self.seed, "validation"))
        drawn = mix_many(digests.astype(np.int64).view(np.uint64) ^ key) >> np.uint64(11)
        return drawn.astype(np.float64) / 2.0**53

    @property
    def facts(self) -> dict[str, float]:
        """For the manifest."""
        return {"share": self.share, "seed": self.seed}


class Part(Selected):
    """The records of one side of a division."""

    def __init__(self, whole: PlannedDataset, numbers: Array, division: Division, which: str) -> None:
        super().__init__(whole, numbers)
        self.division, self._which = division, which

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.whole.fingerprint, self.division, self._which)

    def prefix_digest(self, number: int) -> str:
        """Covers the records of the other side between them, too."""
        return fingerprint(number, self._whole_digest(number), self.division, self._which)


def whole_of(dataset: PlannedDataset) -> PlannedDataset:
    """The source that a sample id refers to."""
    while isinstance(dataset, (Selected, FirstRecords)):
        dataset = dataset.whole
    return dataset


def record_number(dataset: PlannedDataset, index: int) -> int:
    """The number of a record of ``dataset`` in ``whole_of(dataset)``."""
    while isinstance(dataset, (Selected, FirstRecords)):
        index = index if isinstance(dataset, FirstRecords) else int(dataset.numbers[index])
        dataset = dataset.whole
    return index


def division_of(datasets: Sequence[PlannedDataset]) -> Division | None:
    """How the records of the sources are divided; None: they are not."""
    return next((dataset.division for dataset in datasets if isinstance(dataset, Part)), None)


def divided(datasets: Sequence[PlannedDataset], division: Division) -> tuple[list[Part], list[Part]]:
    """Each source without the share, and the share of each, which may be empty.

    Raises ``DataError`` where nothing would be left to train on, or nothing to validate on; ``ConfigError`` for a
    source whose records have no digests.
    """
    left, held, least = [], [], 1.0
    for name, dataset in zip(source_names(datasets), datasets, strict=True):
        digests: Any = getattr(dataset, "content_digests", None)
        if digests is None:
            kind = type(dataset).__name__
            raise ConfigError(
                f"val_dataloader.split divides {name}, and {kind} has no content_digests()",
                remedy=f"add content_digests(self) to {kind}: 64 bits of each record as an int64 array; or give"
                " val_dataloader a dataset of its own",
            )
        found = digests()
        chosen, least = division.held_out(found), min(least, division.smallest(found))
        left.append(Part(dataset, np.flatnonzero(~chosen), division, "train"))
        held.append(Part(dataset, np.flatnonzero(chosen), division, "validation"))
        if not len(left[-1]):
            raise DataError(
                f"val_dataloader.split={division.share:g} leaves none of the {len(dataset):,} records of {name} to"
                " train on",
                remedy="a smaller share, more data, or a dataset of its own for val_dataloader",
            )
        if not len(held[-1]):
            notice(f"val_dataloader.split={division.share:g} selects none of the {len(dataset):,} records of {name}.")
    if not any(map(len, held)):
        total = sum(map(len, datasets))
        raise DataError(
            f"val_dataloader.split={division.share:g} selects none of {total:,} records (each is drawn on its own)",
            remedy=f"val_dataloader.split={_above(least)} selects at least one of these; or more data, or a dataset of"
            " its own for val_dataloader",
        )
    return left, held


def _above(share: float) -> str:
    """A short number that is larger."""
    step = 10.0 ** (math.floor(math.log10(share)) - 1) if share else 1e-6
    return f"{(math.floor(share / step) + 1) * step:.6g}"
