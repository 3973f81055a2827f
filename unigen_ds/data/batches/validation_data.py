"""The records of an evaluation as batches: the same sequences, noise and time steps at every evaluation.

In: sources fitted to ``seq_length``. Out: batches of one source each, so that a loss can be given for every source,
with one sample a sequence. An iteration has the next ``batch_size * dp_size`` samples of a source, of which rank r has
every ``dp_size``-th from the r-th on; empty sequences fill up the last iteration of a source, so that all ranks make
the same calls of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
from typing_extensions import Unpack

from unigen_ds.core.batch import Batch
from unigen_ds.data.batches.loader import BatchLoader, Loading, collate
from unigen_ds.data.batches.stream import PackedRow
from unigen_ds.data.datasets.overflow import FittedSource
from unigen_ds.data.datasets.subset import whole_of
from unigen_ds.data.order.order import Draw, shares


class ValidationData:
    """What is evaluated on, without condition dropout and augmentation. Every rank has one; nothing is collective.
    ``names``: of its sources; ``seed``: of noise and time steps.
    """

    def __init__(
        self,
        fitted_sources: Sequence[FittedSource],
        names: Sequence[str],
        *,
        processor: Any,
        seed: int,
        batch_size: int,
        **loading: Unpack[Loading],
    ) -> None:
        self.fitted_sources, self.names = tuple(fitted_sources), tuple(names)
        self.datasets = tuple(source.dataset for source in fitted_sources)
        self.sources = tuple(whole_of(dataset) for dataset in self.datasets)
        self.processor, self.seed = copy.copy(processor), seed
        for random_change, none in (("dropout", {}), ("augment", ()), ("vit_augment", ())):
            if hasattr(processor, random_change):
                setattr(self.processor, random_change, none)
        self.seq_length = fitted_sources[0].overflow.seq_length
        self.batch_size, self._loading = batch_size, loading

    def __len__(self) -> int:
        return sum(map(len, self.fitted_sources))

    def draws(self, limit: int | None = None) -> list[list[Draw]]:
        """The samples of each source; ``limit``: at most so many of all, spread evenly over each source."""
        sizes = [len(source) for source in self.fitted_sources]
        numbers = sizes if limit is None or limit >= sum(sizes) else shares(limit, sizes)
        return [
            [source.record(Draw(k, int(index), 0)) for index in np.arange(number) * len(source) // max(number, 1)]
            for k, (source, number) in enumerate(zip(self.fitted_sources, numbers, strict=True))
        ]

    def num_batches(self, max_batches: int | None = None, *, dp_size: int = 1) -> int:
        """How many ``batches`` has on each rank."""
        step = self.batch_size * dp_size
        draws = self.draws(None if max_batches is None else max_batches * self.batch_size)
        return sum(-(-len(of_source) // step) for of_source in draws)

    def batches(
        self, max_batches: int | None = None, *, dp_rank: int = 0, dp_size: int = 1
    ) -> Iterator[tuple[str, Batch]]:
        """All samples once, over all ranks: this rank's part of each iteration, with the name of the source that it is
        of. ``max_batches``: at most so many times ``batch_size`` of them, however many ranks there are.
        """
        limit = None if max_batches is None else max_batches * self.batch_size
        iterations: list[tuple[str, list[PackedRow]]] = []
        step = self.batch_size * dp_size
        for name, draws in zip(self.names, self.draws(limit), strict=True):
            for first in range(0, len(draws), step):
                rows: list[PackedRow] = [(draw,) for draw in draws[first : first + step]]
                rows += [()] * (step - len(rows))
                iterations.append((name, rows[dp_rank::dp_size]))
        make = partial(collate, datasets=self.sources, processor=self.processor, seq_length=self.seq_length,
                       seed=self.seed, names=self.names)  # fmt: skip
        with closing(BatchLoader(make, [rows for _, rows in iterations], **self._loading)) as loader:
            for name, _ in iterations:
                yield name, loader.next()
