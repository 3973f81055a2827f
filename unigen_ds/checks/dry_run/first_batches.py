"""The first micro-batches of every rank, made by the loader's own code, and counted.

In: the start of the run. Out: numbers of each micro-batch by rank, and one or two micro-batches of each kind. Batches
differ in kind where a tensor or a list of one is empty and that of the other is not, or a loss term has no targets:
images, drawn images, texts. What a model computes may depend on that, so it is what ``collectives.py`` compares.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from unigen_ds.checks.memory.traced import copy_batch
from unigen_ds.core.batch import Batch
from unigen_ds.core.errors import UnigenError
from unigen_ds.core.progress import Geometry
from unigen_ds.data.batches.loader import BatchLoader, RowSource
from unigen_ds.runner.settings.tree import Settings
from unigen_ds.runner.start.stages import Start
from unigen_ds.system.log import logger
from unigen_ds.system.machine import num_cores

SHOWN_EVERY_S = 30.0
"""A line about how many micro-batches are made."""
_OF_EVERY_BATCH = {field.name for field in dataclasses.fields(Batch)}


@dataclass(frozen=True)
class Kind:
    """What a micro-batch has none of, and the terms that its targets are counted by."""

    empty: tuple[str, ...]
    terms: tuple[str, ...]

    @classmethod
    def of(cls, batch: Batch) -> Kind:
        values = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.name not in _OF_EVERY_BATCH}
        targets = batch.target_counts()
        sizes = {name: value.numel() if isinstance(value, Tensor) else len(value) for name, value in values.items()
                 if isinstance(value, (Tensor, tuple))}  # fmt: skip
        empty = [name for name, size in sizes.items() if not size]
        empty += ["images"] * (not batch.num_images)  # a family may have them in a mapping
        empty += [f"targets of {term}" for term, number in targets.items() if not number]
        return cls(tuple(empty), tuple(sorted(targets)))


def titles(kinds: Collection[Kind]) -> dict[Kind, str]:
    """Each as a person reads it: by the first of what is empty, but not in all of them."""
    common = set.intersection(*(set(kind.empty) for kind in kinds))
    firsts = {kind: [name for name in kind.empty if name not in common][:1] for kind in kinds}
    return {kind: f"without {first[0]}" if first else "with all parts" for kind, first in firsts.items()}


@dataclass(frozen=True)
class MadeBatch:
    """A micro-batch in numbers."""

    kind: Kind
    samples: int
    tokens: int
    images: int
    targets: Mapping[str, float]
    flops: float


@dataclass
class FirstBatches:
    """All that were made."""

    geometry: Geometry
    of_rank: list[list[MadeBatch | None]]
    """By rank and iteration; None: it could not be made."""
    examples: dict[Kind, list[Batch]] = field(default_factory=dict)
    """Of each kind that with the fewest, and that with the most images and tokens."""
    skipped: list[Mapping[str, str]] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    seconds_each: float = 0.0
    """Of one loading process for a micro-batch."""

    @property
    def made(self) -> list[MadeBatch]:
        return [one for rank in self.of_rank for one in rank if one is not None]

    def updates(self) -> Iterator[list[list[MadeBatch]]]:
        """The whole updates: [rank][iteration of the update]."""
        step = self.geometry.accumulative_counts
        for first in range(0, len(self.of_rank[0]) - step + 1, step):
            update = [[one for one in rank[first : first + step] if one is not None] for rank in self.of_rank]
            if all(len(rank) == step for rank in update):
                yield update

    def add(self, rank: int, batch: Batch, model: torch.nn.Module | None) -> None:
        """Count a micro-batch, and keep it where its kind has none with fewer or with more images and tokens."""
        flops = getattr(model, "flops", None)
        counts = MadeBatch(
            Kind.of(batch), batch.num_samples, batch.num_tokens, batch.num_images, batch.target_counts(),
            flops=float(flops(batch)) if flops else 0.0,
        )  # fmt: skip
        self.of_rank[rank].append(counts)
        examples = self.examples.get(counts.kind, [])
        sizes = [(one.num_images, one.num_tokens) for one in examples]
        if not sizes or not min(sizes) <= (batch.num_images, batch.num_tokens) <= max(sizes):
            ordered = sorted([*examples, copy_batch(batch)], key=lambda one: (one.num_images, one.num_tokens))
            self.examples[counts.kind] = [ordered[0], *ordered[1:][-1:]]
        self.skipped += batch.skipped


def make_first_batches(settings: Settings, start: Start, model: torch.nn.Module | None, geometry: Geometry,
                       number: int) -> FirstBatches:  # fmt: skip
    """``number`` micro-batches of each rank, at least one update. ``model``: None: it cannot be built, and operations
    are not counted. Raises what the stream raises.
    """
    stream, size = start.data.stream, geometry.sequences_per_iteration
    number = max(number, geometry.accumulative_counts)
    rows = [row for row, _ in islice(stream.rows(start.cursor), number * size)]
    of_ranks = [rows[i : i + size][rank :: geometry.dp_size] for i in range(0, len(rows), size)
                for rank in range(geometry.dp_size)]  # fmt: skip
    loading = settings.train_dataloader
    processes = min(loading.num_workers, num_cores())
    batches = FirstBatches(geometry, [[] for _ in range(geometry.dp_size)])
    source = RowSource(stream.sources, stream.names, stream.sample_length)
    loader = BatchLoader(source, start.data.processor, of_ranks, num_workers=processes,
                         prefetch_factor=loading.prefetch_factor, timeout=loading.timeout)  # fmt: skip
    begin = last_line = time.perf_counter()
    try:
        for i in range(len(of_ranks)):
            if time.perf_counter() - last_line > SHOWN_EVERY_S:
                last_line = time.perf_counter()
                logger().warning("%d of %d micro-batches are made (--batches makes fewer)", i, len(of_ranks))
            begin = begin if i != 1 else time.perf_counter()  # the first waits for the loading processes to start
            try:
                batches.add(i % geometry.dp_size, loader.next(), model)
            except UnigenError as error:
                batches.errors[str(error)] += 1
                batches.of_rank[i % geometry.dp_size].append(None)
    finally:
        loader.close()
    batches.seconds_each = (time.perf_counter() - begin) * max(processes, 1) / max(len(of_ranks) - 1, 1)
    return batches
