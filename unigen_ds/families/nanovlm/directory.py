"""How nanoVLM's directory is recognised; no torch, so that tools that only list files are quick."""

from __future__ import annotations

from pathlib import Path

from unigen_ds.core.errors import CheckpointError
from unigen_ds.core.json_values import stored_object

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def is_nanovlm(folder: Path) -> bool:
    """Whether its ``config.json`` is nanoVLM's."""
    try:
        config = stored_object(folder / CONFIG)
    except CheckpointError:
        return False
    return "mp_pixel_shuffle_factor" in config and (folder / WEIGHTS).is_file()
