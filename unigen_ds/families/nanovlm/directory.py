"""How nanoVLM's directory is recognised; no torch, so that tools that only list files are quick."""

from __future__ import annotations

import json
from pathlib import Path

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def is_nanovlm(folder: Path) -> bool:
    """Whether its ``config.json`` is nanoVLM's."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "mp_pixel_shuffle_factor" in config and (folder / WEIGHTS).is_file()
