"""A published directory as master weights under the model's names, so that ``load_from`` can read it."""

from __future__ import annotations

from unigen_ds.checkpoint.layouts.base import PieceReader
from unigen_ds.core.shards import MASTER
from unigen_ds.models.weights import Pretrained


class StoredReader(PieceReader):
    """A ``ShardReader`` over what a family's format has found (``PublishedFormat.weights``).

    Rows are read when they are requested.
    """

    def __init__(self, found: Pretrained) -> None:
        super().__init__(unique=True)
        self.tied = dict(found.tied)
        for name, stored in found.tensors.items():
            self.add(MASTER, name, 0, stored.numel, stored.flat, source=found.where, shape=stored.shape)
