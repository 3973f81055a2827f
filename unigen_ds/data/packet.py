"""A batch on its way from a loading process: its tensors in one block of bytes.

In: a batch of a worker. Out: the same one in memory of the main process, the bytes of its pixels as floats. 20 tensors
a batch would use up file descriptors at large accumulation, and a fresh page of memory costs several times the copy
into it, so both sides use theirs again. A worker writes into a few shared blocks in turns (``SharedBlocks``), which the
main process maps once; a batch that nobody refers to any more leaves its memory to a later one (``Memory``). A small
block is sent through the pipe itself.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unigen_ds.core.batch import Batch
from unigen_ds.data.transforms import put_normalised

_ALIGN = 64
_BY_VALUE = 256 * 1024
"""Bytes up to which a block is sent through the pipe."""


@dataclass(frozen=True)
class _Part:
    """Of a tensor in a block of bytes."""

    dtype: torch.dtype
    shape: torch.Size
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel() * self.dtype.itemsize

    def view(self, block: Tensor) -> Tensor:
        return block[self.start : self.stop].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Packet:
    """A batch whose tensors are in one block of bytes: one piece of shared memory, one page-locked allocation."""

    block: Tensor | NDArray[np.uint8] | SharedBlock
    """An array where it is pickled by value."""
    parts: dict[str, _Part]
    """Of each tensor; bytes of pixels are the last ones."""
    others: dict[str, Any]
    kind: type[Batch]

    @classmethod
    def packed(cls, batch: Batch, blocks: SharedBlocks | None = None) -> Packet:
        """``blocks``: of the worker that sends it."""
        tensors, others = batch.parts()
        tensors |= {name: tensors.pop(name) for name in batch.pixels}
        parts, size = _laid_out({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
        packet = cls(_bytes(size) if blocks is None else blocks.next(size), parts, others, type(batch))
        for name, target in packet._tensors().items():
            target.copy_(tensors[name])
        return packet

    def unpacked(self) -> Batch:
        """The batch as it was packed; its tensors are views of the block."""
        return self.kind.of(self._tensors(), self.others)

    def received(self, memory: Memory) -> Batch:
        """The batch in ``memory``, the bytes of its pixels as floats. Its worker may then use the block again."""
        pixels = [name for name in self.kind.pixels if self.parts[name].dtype == torch.uint8]
        dtypes = {name: torch.float32 if name in pixels else part.dtype for name, part in self.parts.items()}
        parts, size = _laid_out({name: (dtypes[name], part.shape) for name, part in self.parts.items()})
        same = min((parts[name].start for name in pixels), default=size)
        block, given = memory.take(size), self._content()
        block[:same] = given[:same]
        tensors: dict[str, Any] = {name: part.view(block) for name, part in parts.items()}
        for name in pixels:
            put_normalised(tensors[name], self.parts[name].view(given))
        self._check()
        return self.kind.of(tensors, self.others)

    def pin_memory(self) -> Packet:
        """Called by the loader's pinning thread."""
        block = self._content().pin_memory()
        self._check()
        return dataclasses.replace(self, block=block)

    def _content(self) -> Tensor:
        if isinstance(self.block, SharedBlock):
            return self.block.content
        return self.block if isinstance(self.block, Tensor) else torch.from_numpy(self.block)

    def _tensors(self) -> dict[str, Any]:
        block = self._content()
        return {name: part.view(block) for name, part in self.parts.items()}

    def _check(self) -> None:
        if isinstance(self.block, SharedBlock):
            self.block.check()


def _laid_out(tensors: Mapping[str, tuple[torch.dtype, torch.Size]]) -> tuple[dict[str, _Part], int]:
    """Where each tensor is in a block, aligned: sums may depend on the alignment. And the size of the block."""
    parts, size = {}, 0
    for name, (dtype, shape) in tensors.items():
        parts[name] = _Part(dtype, shape, size)
        size += -(-(parts[name].stop - size) // _ALIGN) * _ALIGN
    return parts, size


def _bytes(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


class Memory:
    """Memory for batches: a block that no tensor refers to any more is used again.

    There are as many blocks as batches that were in use together, and at most one more.
    """

    def __init__(self) -> None:
        self._blocks: list[tuple[NDArray[np.uint8], weakref.ref[Any]]] = []
        """Each with the array that all tensors of its batch refer to."""

    def take(self, size: int) -> Tensor:
        """``size`` bytes, aligned; not zeros."""
        unused = [k for k, (_, user) in enumerate(self._blocks) if user() is None]
        fitting = [k for k in unused if self._blocks[k][0].size >= size]
        if unused:
            block, _ = self._blocks.pop(min(fitting or unused, key=lambda k: self._blocks[k][0].size))
        if not fitting:
            block = _bytes(_with_spare(size)).numpy()
        user = block[:size]
        self._blocks.append((block, weakref.ref(user)))
        return torch.from_numpy(user)


def _with_spare(size: int) -> int:
    """A later batch may be a little larger. Pages that nobody writes are no memory."""
    return size + size // 4


_LOADERS = itertools.count()
_mapped: dict[tuple[int, int, int], Tensor] = {}
"""Shared memory of workers that this process has mapped, by loader, worker's process and number of the block."""


def unmap(loader: int) -> None:
    """Unmap the blocks of a loader's workers."""
    for key in [key for key in _mapped if key[0] == loader]:
        del _mapped[key]


class SharedBlocks:
    """Of one worker: blocks of shared memory that it writes into in turns.

    The loader asks a worker for another batch when it returns one of its batches, which is read before the next is
    asked for: with ``prefetch_factor + 1`` blocks none is written that is yet to be read. ``SharedBlock.check`` raises
    otherwise.

    Args:
        number: of blocks.
    """

    def __init__(self, number: int) -> None:
        self.loader = next(_LOADERS)
        self._number, self._turn = number, 0
        self._owned: dict[int, _Owned] = {}

    def next(self, size: int) -> SharedBlock | NDArray[np.uint8]:
        """Memory of ``size`` bytes for the next packet; if it is small, an array, which is sent through the pipe."""
        if size <= _BY_VALUE:
            return np.empty(size, dtype=np.uint8)
        self._turn += 1
        index = self._turn % self._number
        owned = self._owned.get(index)
        if owned is None or owned.memory.numel() < _ALIGN + size:
            owned = self._owned[index] = _Owned(_shared_memory(_with_spare(_ALIGN + size)))
        block = SharedBlock((self.loader, os.getpid(), index), owned.memory, size, self._turn, owned)
        block.mark.fill_(self._turn)
        return block


@dataclass
class _Owned:
    """Shared memory in the process that made it."""

    memory: Tensor
    sent: bool = False


@dataclass(frozen=True)
class SharedBlock:
    """Shared memory with one packet. Pickled it is a few numbers: the memory itself goes with its first packet."""

    key: tuple[int, int, int]
    memory: Tensor
    size: int
    turn: int
    owned: _Owned | None = None
    """None in the process that receives it."""

    @property
    def mark(self) -> Tensor:
        """[1] the turn in which it was written last."""
        return self.memory[:8].view(torch.int64)

    @property
    def content(self) -> Tensor:
        return self.memory[_ALIGN : _ALIGN + self.size]

    def check(self) -> None:
        """Raise ``RuntimeError`` where its worker has begun to write another packet."""
        if int(self.mark) != self.turn:
            raise RuntimeError(
                f"a loading process wrote batch {int(self.mark)} where its batch {self.turn} had not been read yet"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        assert self.owned is not None, "a packet is sent once"
        first, self.owned.sent = not self.owned.sent, True
        return _arrived, (self.key, self.memory if first else None, self.size, self.turn)


def _arrived(key: tuple[int, int, int], memory: Tensor | None, size: int, turn: int) -> SharedBlock:
    if memory is not None:
        _mapped[key] = memory
    return SharedBlock(key, _mapped[key], size, turn)


def _shared_memory(size: int) -> Tensor:
    # any other memory would be copied to such memory when it is sent
    storage = torch.UntypedStorage._new_shared(size)
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,), (1,))
