"""nanoVLM's published directory as master weights under our names, so that ``load_from`` takes it.

Rows are read when they are asked for.
"""

from __future__ import annotations

import json
from pathlib import Path

from unigen_ds.checkpoint.layouts.base import PieceReader
from unigen_ds.core.shards import MASTER

_WEIGHTS, _CONFIG = "model.safetensors", "config.json"


def is_nanovlm(folder: Path) -> bool:
    """Whether its ``config.json`` is nanoVLM's."""
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "mp_pixel_shuffle_factor" in config and (folder / _WEIGHTS).is_file()


class NanoVLMReader(PieceReader):
    """A ``ShardReader`` over ``model.safetensors``; of tied embeddings the one stored serves both names."""

    def __init__(self, directory: Path) -> None:
        from unigen_ds.families.nanovlm.published import TIED, stored_nanovlm  # imported only where it is needed

        super().__init__(unique=True)
        path = directory / _WEIGHTS
        found = stored_nanovlm(path)
        embedding, head = TIED
        if embedding not in found:
            self.tied = {head: embedding}
        for name, stored in found.items():
            target = self.tied.get(name, name)
            self.add(MASTER, target, 0, stored.numel, stored.flat, source=str(path), shape=stored.shape)
