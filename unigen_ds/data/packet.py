"""A batch on its way from a loading process: its tensors in one block of bytes.

20 tensors a batch would need 20 file descriptors, so a loading process copies them into one block of shared memory,
which the main process copies out of. Each batch has a block of its own, so none is overwritten while it is in use, and
the system frees a block with the last process that has it. A small block is sent through the pipe itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unigen_ds.core.batch import Batch

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
