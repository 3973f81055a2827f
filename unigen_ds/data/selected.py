"""Some records of a data set, under their own numbers: what ``Filtered`` and ``Part`` have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path

from unigen_ds.data.array_cache import fingerprint
from unigen_ds.data.counts import COLUMNS, Array, Counts
from unigen_ds.data.datasets import PlannedDataset
from unigen_ds.data.samples import Sample


class Selected(ABC):
    """Some records of a source, in its order; a ``PlannedDataset`` of their own number, but for what identifies them.

    Args:
        whole: the source.
        numbers: of the records, ascending.
    """

    def __init__(self, whole: PlannedDataset, numbers: Array) -> None:
        self.whole, self.numbers = whole, numbers
        self.name, self.weight, self.group = whole.name, whole.weight, getattr(whole, "group", None)

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Of the records and of what selected them."""

    @property
    def cache_folder(self) -> Path | None:
        return self.whole.cache_folder

    def __len__(self) -> int:
        return len(self.numbers)

    def lengths(self) -> tuple[Array, Array]:
        return self._counts.tokens, self._counts.tiles

    @cached_property
    def _counts(self) -> Counts:
        return self.whole.counts().some(self.numbers, self.cache_folder, lambda: fingerprint(self.fingerprint, COLUMNS))

    def counts(self) -> Counts:
        return self._counts

    def sample(self, index: int, *, pass_number: int = 0) -> Sample:
        return self.whole.sample(int(self.numbers[index]), pass_number=pass_number)

    def _whole_digest(self, number: int) -> str:
        """Of the first ``number`` records and all that are between them."""
        return self.whole.prefix_digest(int(self.numbers[number - 1]) + 1 if number else 0)
