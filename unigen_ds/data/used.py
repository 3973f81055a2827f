"""``num_used_data`` of a data set: only its first records are trained on."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

from unigen_ds.core import dist
from unigen_ds.core.log import logger
from unigen_ds.data.array_cache import fingerprint
from unigen_ds.data.counts import COLUMNS, Array, Counts
from unigen_ds.data.datasets import PlannedDataset


class FirstRecords:
    """The first ``number`` records of a source, under their own numbers; everything else is the source's."""

    def __init__(self, whole: PlannedDataset, number: int) -> None:
        self.whole, self.number = whole, number
        if hasattr(whole, "content_digests"):
            self.content_digests = partial(_first_digests, whole, number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "whole":  # not yet unpickled
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __len__(self) -> int:
        return self.number

    def lengths(self) -> tuple[Array, Array]:
        tokens, tiles = self.whole.lengths()
        return tokens[: self.number], tiles[: self.number]

    @cached_property
    def _counts(self) -> Counts:
        counts = self.whole.counts()
        return Counts(*(getattr(counts, name)[: self.number] for name in COLUMNS))

    def counts(self) -> Counts:
        return self._counts

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.whole.fingerprint, "num_used_data", self.number)


def _first_digests(whole: Any, number: int) -> Array:
    digests: Array = whole.content_digests()[:number]
    return digests


def used_of(dataset: Any) -> FirstRecords | None:
    """The first records that a data set is made of; None: it has all."""
    while not isinstance(dataset, FirstRecords):
        if (dataset := getattr(dataset, "whole", None)) is None:
            return None
    return dataset


def used_line(found: FirstRecords) -> str:
    """As a sentence."""
    return f"num_used_data={found.number:,}: the first {found.number:,} of {len(found.whole):,} records are used"


def used(dataset: Any) -> Any:
    """The data set, or the part of it that its ``num_used_data`` asks for. Warns where it has no more than that."""
    number = getattr(dataset, "num_used_data", None)
    if number is None or number == len(dataset):
        return dataset
    if number < len(dataset):
        return FirstRecords(dataset, number)
    if dist.env_rank() == 0:
        logger().warning(
            "%s: num_used_data is %d, and there are %d records: all of them are used", dataset.name, number,
            len(dataset),
        )  # fmt: skip
    return dataset
