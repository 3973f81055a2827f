"""Exponential moving average of the weights, in fp32, on the engine's own shards and without communication: ``average =
(1 - momentum) * average + momentum * weights`` (mmengine's and torch's convention: a small momentum)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import torch
from annotated_types import Gt, Lt
from torch import Tensor

from unigen_ds.config.values import Choices
from unigen_ds.core.shards import EMA, Shard, ShardReader, misfit, refuse_misfit

Momentum = Annotated[float, Gt(0), Lt(1), Choices("a number above 0 and below 1; the decay is 1 - momentum")]
"""Argument of a component: weight of a new value in an average."""


class ShardEMA:
    """The average of ``shards``, split exactly as they are. ``num_updates`` counts how often it moved."""

    def __init__(self, shards: Sequence[Shard], *, momentum: float) -> None:
        self.momentum = momentum
        self.num_updates = 0
        self.shards = [replace(shard, data=shard.data.detach().clone()) for shard in shards]
        self._data = [shard.data for shard in self.shards]

    @torch.no_grad()
    def copy_from(self, weights: Sequence[Tensor]) -> None:
        """Make the average equal to ``weights`` (``Backend.master_data``): what it is until averaging begins."""
        torch._foreach_copy_(self._data, list(weights))

    @torch.no_grad()
    def update(self, weights: Sequence[Tensor]) -> None:
        """Move towards ``weights``, to the bits of ``lerp_``. The first update copies, as mmengine's does."""
        if self.num_updates == 0:
            self.copy_from(weights)
        else:
            torch._foreach_lerp_(self._data, list(weights), self.momentum)
        self.num_updates += 1

    def load(self, reader: ShardReader) -> None:
        """Read the average by name from any layout. Raises ``CheckpointError`` naming what is missing or misfits."""
        sizes = {shard.name: (shard.numel,) for shard in self.shards}  # of this rank: the others have more
        shapes = {name: (reader.numel(EMA, name),) for name in set(reader.names(EMA)) & set(sizes)}
        refuse_misfit("the checkpoint's EMA", misfit(shapes, sizes))
        for shard in self.shards:
            shard.data.copy_(reader.read(EMA, shard.name, shard.flat_start, shard.flat_stop))
