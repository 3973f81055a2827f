"""Rows (which samples make which sequences) -> micro-batches of one rank, update by update, by worker processes.

In: a ``SequenceStream`` and a cursor. Out: per update ``accumulative_counts`` micro-batches, endlessly, each with the
cursor after its iteration. Iteration i has the next ``batch_size * dp_size`` rows of the stream; rank r has rows r, r +
dp_size, ... of them. Workers receive the rows themselves (a few numbers), so 0, 1 or many return the same batches.

The processor defines a batch: its ``builder`` collects the documents, and each split loads and adds itself.
Everything random is keyed by (seed, pass, sample id, purpose, number of the split in its sample). A sample that cannot
be loaded, or whose length is no longer the one it was planned with, becomes a document of padding of the planned length
and is named in ``skipped``. A row without any token becomes one padding token, so that no micro-batch is empty.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypedDict

import torch
from torch import Tensor
from typing_extensions import Unpack

from unigen_ds.core.batch import Batch
from unigen_ds.core.progress import Geometry
from unigen_ds.data.batches.stream import PackedRow, SequenceStream
from unigen_ds.data.datasets.dataset import PlannedDataset, planned_tokens, source_names
from unigen_ds.data.images.image_files import UnreadableImage
from unigen_ds.data.order.order import Cursor, Draw
from unigen_ds.data.samples.processor import Processor
from unigen_ds.data.samples.sample import LoadedSplit, piece_bounds, unit_tokens
from unigen_ds.system.seeding import generator
from unigen_ds.system.workers import Workers


@dataclass(frozen=True)
class MicroBatch:
    batch: Batch
    """This rank's part, on the CPU."""
    cursor: Cursor
    """Global position after the whole iteration."""
    rows: list[PackedRow]
    """Rows of the iteration over all ranks, in global order."""


class Loading(TypedDict, total=False):
    """How batches are loaded. It changes nothing of a batch."""

    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    timeout: float
    """Seconds to wait for a worker's batch before an error; 0: for ever."""


class UpdateLoader:
    """Endless updates. Iterate once; ``close`` when done. ``seed``: of noise and dropout; None: the processor's."""

    def __init__(
        self,
        stream: SequenceStream,
        *,
        processor: Processor,
        geometry: Geometry,
        dp_rank: int = 0,
        cursor: Cursor | None = None,
        seed: int | None = None,
        **loading: Unpack[Loading],
    ) -> None:
        assert 0 <= dp_rank < geometry.dp_size, (dp_rank, geometry)
        self.geometry, self._dp_rank = geometry, dp_rank
        self._pending: deque[tuple[Cursor, list[PackedRow]]] = deque()
        """Cursor and rows of each iteration that is loaded and not yet used."""
        make = partial(collate, datasets=stream.sources, processor=processor, seq_length=stream.sample_length,
                       seed=seed, names=stream.names)  # fmt: skip
        self._batches = BatchLoader(make, self._rows(stream, cursor or Cursor()), **loading)

    def _rows(self, stream: SequenceStream, cursor: Cursor) -> Iterator[list[PackedRow]]:
        """Yield the rows of this rank, iteration by iteration, in the main process."""
        stream.fetch_ahead()  # after workers were started: a thread does not survive a fork
        rows_and_cursors, number = stream.rows(cursor), self.geometry.sequences_per_iteration
        while True:
            iteration = list(islice(rows_and_cursors, number))
            rows = [row for row, _ in iteration]
            self._pending.append((iteration[-1][1], rows))
            yield rows[self._dp_rank :: self.geometry.dp_size]

    @property
    def rows_ahead(self) -> list[PackedRow]:
        """Rows that are loaded and not used, and those that are being loaded, over all ranks."""
        return [row for _, rows in [*self._pending] for row in rows]

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        while not self._batches.closed:
            numbers = range(self.geometry.accumulative_counts)
            yield [MicroBatch(self._batches.next(), *self._pending.popleft()) for _ in numbers]

    def close(self) -> None:
        self._batches.close()
        self._pending.clear()


class BatchLoader:
    """``make`` of each list of rows, called here or by workers, which read ahead of ``next``. ``close`` when done."""

    def __init__(
        self,
        make: Callable[[list[PackedRow]], Batch],
        iterations: Iterable[list[PackedRow]],
        **loading: Unpack[Loading],
    ) -> None:
        num_workers = loading.get("num_workers", 0)
        pin = loading.get("pin_memory", False) and torch.accelerator.is_available()
        receive = partial(Packet.unpack, pin=True) if pin else None
        pack = partial(_pack, make)

        def begin() -> Iterator[Any]:
            if num_workers:
                ahead, timeout = loading.get("prefetch_factor") or 2, loading.get("timeout", 0.0)
                return Workers(pack, iterations, num_workers, ahead=ahead, timeout=timeout, on_arrival=receive)
            return map(make, iterations) if receive is None else map(receive, map(pack, iterations))

        self._begin = begin
        self._batches: Iterator[Batch | Packet] | None = None
        self.closed = False

    def next(self) -> Batch:
        """The next batch, on the CPU. Raises ``StopIteration`` after the last, ``TrainingError`` for a lost worker."""
        assert not self.closed, "the loader is closed"
        if self._batches is None:
            self._batches = self._begin()
        batch = next(self._batches)
        return batch.unpack() if isinstance(batch, Packet) else batch

    def close(self) -> None:
        """End the workers. Safe to call twice, and after an error."""
        if isinstance(self._batches, Workers):
            self._batches.close()
        self._batches, self.closed = None, True


def _pack(make: Callable[[list[PackedRow]], Batch], rows: list[PackedRow]) -> Packet:
    return Packet.pack(make(rows))


# --- one batch ----------------------------------------------------------------------------------------------------


def collate(
    rows: Sequence[PackedRow],
    datasets: Sequence[PlannedDataset],
    processor: Processor,
    *,
    seq_length: int,
    seed: int | None = None,
    names: Sequence[str] | None = None,
) -> Batch:
    """One micro-batch of ``rows``; each sample is truncated to ``seq_length``."""
    seed = processor.seed if seed is None else seed
    names = source_names(datasets) if names is None else names
    builder = processor.builder()
    sample_ids: list[str] = []
    skips: list[dict[str, str]] = []
    ends: list[int] = []
    for row in rows:
        before = builder.num_tokens
        for draw in row:
            sample_id, dataset = draw.sample_id(names), datasets[draw.source]
            sample_ids.append(sample_id)
            try:
                splits = load(draw, dataset, processor, seq_length=seq_length, seed=seed, name=sample_id)
            except UnreadableImage as error:
                skips.append({"sample": sample_id, "path": error.path, "why": error.problem})
                builder.add_padding(unit_tokens(planned_tokens(dataset, draw.index), draw.piece, seq_length))
            else:
                builder.add_document(splits)
            ends.append(builder.num_tokens)
        if builder.num_tokens == before:
            builder.add_padding(1)
    batch = builder.batch(len(rows), tuple(sample_ids), tuple(skips))
    sources = tuple(draw.source for row in rows for draw in row)
    return dataclasses.replace(batch, sample_sources=sources, sample_ends=tuple(ends))


def pack_documents(documents: Sequence[Sequence[LoadedSplit]], processor: Processor) -> Any:
    """One document after the other, as given: for inference, where nothing is read from a data set."""
    builder = processor.builder()
    for document in documents:
        builder.add_document(document)
    return builder.batch(len(documents), (), ())


def load(
    draw: Draw, dataset: PlannedDataset, processor: Processor, *, seq_length: int, seed: int, name: str
) -> list[LoadedSplit]:
    """Read, truncate, drop conditions (each split draws), decode. Raises ``UnreadableImage`` for a skipped sample."""
    whole = dataset.sample(draw.index, pass_number=draw.pass_number)
    sample = whole if draw.piece >= 0 else whole.truncate(seq_length)
    for split in sample.splits:
        if split.error:
            raise UnreadableImage(split.error, path=split.source)
    num_tokens = planned_tokens(dataset, draw.index)
    if whole.num_tokens != num_tokens:
        source = next((split.source for split in whole.splits if split.source), "")
        problem = f"the sample has {whole.num_tokens} tokens, but {num_tokens} when it was indexed"
        raise UnreadableImage(problem, path=source)
    if draw.piece >= 0:
        start, stop = piece_bounds(whole.num_tokens, seq_length, draw.piece)
        sample = whole.part(int(start), int(stop))
    key, chances = (seed, draw.pass_number, name), [1.0] * len(sample.splits)
    dropout = getattr(processor, "dropout", {})  # a family of a user's own may have none
    if any(dropout.values()):
        chances = torch.rand(len(chances), generator=generator(*key, "dropout"), dtype=torch.float32).tolist()
    splits = (
        split.dropped() if chance < dropout.get(split.condition, 0.0) else split.load(processor, (*key, number))
        for number, (split, chance) in enumerate(zip(sample.splits, chances, strict=True))
    )
    return [one for one in splits if one is not None]


# --- a batch on its way from a loading process ----------------------------------------------------------------------

_ALIGN = 64


@dataclass(frozen=True)
class Packet:
    """A batch whose tensors are in one block of shared memory."""

    block: Tensor
    layout: dict[str, tuple[torch.dtype, torch.Size, int]]
    """Type, shape and first byte of each tensor, aligned: sums may depend on the alignment."""
    others: dict[str, Any]
    kind: type[Batch]

    @classmethod
    def pack(cls, batch: Batch) -> Packet:
        tensors, others = batch.parts()
        layout, size = {}, 0
        for name, tensor in tensors.items():
            layout[name] = (tensor.dtype, tensor.shape, size)
            size += -(-tensor.nbytes // _ALIGN) * _ALIGN
        packet = cls(torch.empty(size, dtype=torch.uint8).share_memory_(), layout, others, type(batch))
        for name, target in packet._tensors(packet.block).items():
            target.copy_(tensors[name])
        return packet

    def unpack(self, *, pin: bool = False) -> Batch:
        """A copy of the batch in memory of this process, page-locked with ``pin``: one allocation."""
        return self.kind.of(self._tensors(self.block.pin_memory() if pin else self.block.clone()), self.others)

    def _tensors(self, block: Tensor) -> dict[str, Tensor]:
        return {
            name: block[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for name, (dtype, shape, start) in self.layout.items()
        }
