"""The micro-batches of a run that need the most memory, from the planned lengths of its real data."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import numpy as np

from unigen_ds.core.batch import Batch
from unigen_ds.core.progress import Geometry
from unigen_ds.data.batches.loader import collate
from unigen_ds.data.batches.stream import Row, SequenceStream
from unigen_ds.data.datasets.dataset import planned_tokens
from unigen_ds.data.samples.sample import unit_tokens
from unigen_ds.runner.start.build import Data

MOST_SEQUENCES = 100_000
"""Sequences that are looked at."""


@dataclass(frozen=True)
class Largest:
    """The micro-batches with the most tokens, the most text targets (each has logits) and the most images."""

    batches: tuple[Batch, ...]
    """Different ones, that with the most tokens first."""
    tokens: int
    """Of the longest micro-batch, as planned."""
    sequences: int
    """How many were looked at, from the first on."""
    per_epoch: int

    @property
    def text(self) -> str:
        share = "all" if self.sequences >= self.per_epoch else f"the first {self.sequences:,} of {self.per_epoch:,}"
        return f"largest micro-batch: {self.tokens:,} tokens (of {share} sequences of the first epoch)"


def largest_batches(data: Data, geometry: Geometry, *, most: int = MOST_SEQUENCES) -> Largest:
    """Look at the micro-batches of all ranks in the first epoch. Reads only the samples of those it returns."""
    stream, step = data.stream, geometry.sequences_per_iteration
    number = max(min(most, stream.sequences_per_epoch) // step, 1) * step
    rows = [row for row, _ in islice(stream.rows(), number)]
    sizes = np.array([_size(row, stream) for row in rows])
    members = np.arange(number).reshape(-1, geometry.batch_size, geometry.dp_size).swapaxes(1, 2)
    members = members.reshape(-1, geometry.batch_size)  # the sequences of each micro-batch
    totals = sizes[members].sum(axis=1)
    chosen = dict.fromkeys(int(totals[:, measure].argmax()) for measure in range(totals.shape[1]))
    batches = tuple(
        collate([rows[i] for i in members[one]], stream.sources, data.processor, seq_length=stream.sample_length,
                names=stream.names)
        for one in chosen
    )  # fmt: skip
    return Largest(batches, int(totals[:, 0].max()), number, stream.sequences_per_epoch)


def _size(row: Row, stream: SequenceStream) -> tuple[int, int, int]:
    """(tokens, text targets, images) of a sequence, as planned; of a streamed source the tokens alone are known."""
    tokens = targets = images = 0
    for draw in row:
        source = stream.sources[draw.source]
        tokens += unit_tokens(planned_tokens(source, draw.index), draw.piece, stream.sample_length)
        if not stream.walks:
            counts = source.counts()
            targets += int(counts.text_targets[draw.index])
            images += int(counts.images[draw.index])
    return tokens, targets, images
