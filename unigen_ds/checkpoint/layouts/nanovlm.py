"""nanoVLM's published directory as master weights under our names, so that ``load_from`` can read it.

Rows are read when they are requested.
"""

from __future__ import annotations

from pathlib import Path

from unigen_ds.checkpoint.layouts.base import PieceReader
from unigen_ds.core.shards import MASTER
from unigen_ds.families.nanovlm.directory import WEIGHTS
from unigen_ds.families.nanovlm.directory import is_nanovlm as is_nanovlm


class NanoVLMReader(PieceReader):
    """A ``ShardReader`` over ``model.safetensors``; of tied embeddings the one stored serves both names."""

    def __init__(self, directory: Path) -> None:
        from unigen_ds.families.nanovlm.published import TIED, stored_nanovlm  # imported only where it is needed

        super().__init__(unique=True)
        path = directory / WEIGHTS
        found = stored_nanovlm(path)
        embedding, head = TIED
        if embedding not in found:
            self.tied = {head: embedding}
        for name, stored in found.items():
            target = self.tied.get(name, name)
            self.add(MASTER, target, 0, stored.numel, stored.flat, source=str(path), shape=stored.shape)
