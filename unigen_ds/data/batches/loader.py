"""Rows -> micro-batches of one rank, update by update, with worker processes and prefetching.

In: a ``SequenceStream`` and a cursor. Out: per update ``accumulative_counts`` micro-batches, endlessly, each with the
cursor after its iteration. Iteration i has the next ``batch_size * dp_size`` rows of the stream; rank r has rows r, r +
dp_size, ... of them. Workers receive the rows themselves (a few numbers), so they share no state, and 0, 1 or many
return the same batches. How far ahead they are has no effect: the cursor comes with the micro-batch that is used.

A worker sends a batch as one block of bytes (``Packet``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import Unpack

from unigen_ds.core.batch import Batch
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.progress import Geometry
from unigen_ds.data.batches.collate import collate
from unigen_ds.data.batches.stream import Cursor, Row, SequenceStream
from unigen_ds.data.datasets.dataset import PlannedDataset
from unigen_ds.data.samples.processor import Processor
from unigen_ds.system.workers import Workers


@dataclass(frozen=True)
class MicroBatch:
    """One iteration, seen from one rank."""

    batch: Batch
    """This rank's part, on the CPU."""
    cursor: Cursor
    """Global position after the whole iteration."""
    rows: list[Row]
    """Rows of the iteration over all ranks, in global order."""


class Loading(TypedDict, total=False):
    """How batches are loaded. It changes nothing of a batch."""

    num_workers: int
    """Worker processes; 0 loads in this one."""
    prefetch_factor: int | None
    """Micro-batches that each worker keeps ready."""
    pin_memory: bool
    """Copy batches to page-locked memory (where there is an accelerator)."""
    timeout: float
    """Seconds to wait for a worker's batch before an error; 0: for ever."""


class UpdateLoader:
    """Endless updates. Iterate once; ``close`` when done.

    Args:
        stream: the sequences.
        processor: turns records into tensors.
        geometry: batch size, accumulation and ranks; changes nothing about the order.
        dp_rank: which of the ranks.
        cursor: where to continue.
        seed: of noise and condition dropout; the processor's by default.
        loading: how batches are loaded.
    """

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
        self.geometry = geometry
        self._iterations = _Iterations(stream, geometry, dp_rank, cursor or Cursor())
        source = RowSource(stream.sources, stream.names, stream.sample_length)
        self._batches = BatchLoader(source, processor, self._iterations, seed=seed, **loading)
        self._closed = False

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        while not self._closed:
            yield [self._next() for _ in range(self.geometry.accumulative_counts)]

    def _next(self) -> MicroBatch:
        batch = self._batches.next()
        cursor, rows = self._iterations.pending.popleft()
        return MicroBatch(batch, cursor, rows)

    def close(self) -> None:
        """End the workers. Safe to call twice, and after an error."""
        self._closed = True
        self._batches.close()
        self._iterations.pending.clear()


@dataclass(frozen=True)
class RowSource:
    """What the draws of rows point into."""

    datasets: Sequence[PlannedDataset]
    names: Sequence[str]
    seq_length: int
    """Tokens of a sample at most."""


class BatchLoader:
    """One batch for each list of rows, made in this process or by workers. ``close`` when done.

    Args:
        source: what the rows point into.
        processor: turns records into tensors.
        iterations: the rows of each batch. Workers read ahead, so it is iterated faster than ``next`` is called.
        seed: as of ``UpdateLoader``.
        num_workers, prefetch_factor, pin_memory, timeout: ``Loading``.
    """

    def __init__(
        self,
        source: RowSource,
        processor: Processor,
        iterations: Iterable[list[Row]],
        *,
        seed: int | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        timeout: float = 0.0,
    ) -> None:
        if num_workers < 0 or timeout < 0 or (prefetch_factor is not None and prefetch_factor < 1):
            raise ConfigError(
                f"num_workers {num_workers}, timeout {timeout}, prefetch_factor {prefetch_factor}",
                allowed="num_workers >= 0, timeout >= 0 seconds, prefetch_factor >= 1",
            )
        pin = pin_memory and torch.accelerator.is_available()
        make = partial(_load, source, processor, seed, num_workers > 0 or pin)
        arrived = partial(Packet.unpacked, pin=True) if pin else None

        def begin() -> Iterator[Any]:
            if num_workers:
                ahead = prefetch_factor or 2
                return Workers(make, iterations, num_workers, ahead=ahead, timeout=timeout, arrived=arrived)
            return map(make, iterations) if arrived is None else map(arrived, map(make, iterations))

        self._begin = begin
        self._loaded: Iterator[Batch | Packet] | None = None
        self._closed = False

    def next(self) -> Batch:
        """The next batch, on the CPU. Raises ``StopIteration`` after the last one, ``TrainingError`` where a worker
        process has ended.
        """
        assert not self._closed, "the loader is closed"
        if self._loaded is None:
            self._loaded = self._begin()
        loaded = next(self._loaded)
        return loaded.unpacked() if isinstance(loaded, Packet) else loaded

    def close(self) -> None:
        """End the workers. Safe to call twice, and after an error."""
        if isinstance(self._loaded, Workers):
            self._loaded.close()
        self._loaded, self._closed = None, True


class _Iterations:
    """In the main process: the rows of this rank, iteration by iteration; remembers what the loader has in flight."""

    def __init__(self, stream: SequenceStream, geometry: Geometry, dp_rank: int, cursor: Cursor) -> None:
        self._stream, self._geometry, self._dp_rank, self._cursor = stream, geometry, dp_rank, cursor
        self.pending: deque[tuple[Cursor, list[Row]]] = deque()

    def __iter__(self) -> Iterator[list[Row]]:
        self._stream.fetch_ahead()  # after workers were started: a thread does not survive a fork
        stream = self._stream.rows(self._cursor)
        while True:
            iteration = list(islice(stream, self._geometry.sequences_per_iteration))
            rows = [row for row, _ in iteration]
            self.pending.append((iteration[-1][1], rows))
            yield rows[self._dp_rank :: self._geometry.dp_size]


def _load(
    source: RowSource, processor: Processor, seed: int | None, packed: bool, rows: Sequence[Row]
) -> Batch | Packet:
    """A micro-batch; ``packed``: it travels or is page-locked."""
    batch = collate(rows, source.datasets, processor, seq_length=source.seq_length, seed=seed, names=source.names)
    return Packet.packed(batch) if packed else batch


# A batch on its way from a loading process: its tensors in one block of bytes.

_ALIGN = 64
_BY_VALUE = 256 * 1024
"""Bytes up to which a block is sent through the pipe."""


@dataclass(frozen=True)
class Packet:
    """A batch whose tensors are in one block of bytes."""

    block: Tensor | NDArray[np.uint8]
    """In shared memory; or an array, which is pickled by value."""
    layout: dict[str, tuple[torch.dtype, torch.Size, int]]
    """Type, shape and first byte of each tensor, aligned: sums may depend on the alignment."""
    others: dict[str, Any]
    kind: type[Batch]

    @classmethod
    def packed(cls, batch: Batch) -> Packet:
        """A copy of a batch, to be sent to another process."""
        tensors, others = batch.parts()
        layout, size = {}, 0
        for name, tensor in tensors.items():
            layout[name] = (tensor.dtype, tensor.shape, size)
            size += -(-tensor.nbytes // _ALIGN) * _ALIGN
        block = torch.empty(size, dtype=torch.uint8)
        packet = cls(block.numpy() if size <= _BY_VALUE else block.share_memory_(), layout, others, type(batch))
        for name, target in packet._tensors(block).items():
            target.copy_(tensors[name])
        return packet

    def unpacked(self, *, pin: bool = False) -> Batch:
        """A copy of the batch in memory of this process, page-locked with ``pin``: one allocation."""
        block = torch.from_numpy(self.block) if isinstance(self.block, np.ndarray) else self.block
        return self.kind.of(self._tensors(block.pin_memory() if pin else block.clone()), self.others)

    def _tensors(self, block: Tensor) -> dict[str, Tensor]:
        """Views of ``block``."""
        return {
            name: block[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for name, (dtype, shape, start) in self.layout.items()
        }
