"""``unigen_ds.json`` of an exported directory: what the published format of a model cannot hold.

In: a model and its processor. Out: plain values, read again where the directory is loaded: the autoencoder's arguments,
the sizes of the image transforms, the ``timestep_shift`` of the training, and another
``vit_select_layer`` than BAGEL's. Names no path.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unigen_ds.core.errors import ConfigError

EXPORTED = "unigen_ds.json"
_TRANSFORM = ("max_size", "min_size", "stride", "mode")


def write_exported(folder: Path, model: Any, processor: Any) -> None:
    """Write the file of a ``UnifiedModel`` and its processor (None: its transforms are the family's)."""
    found: dict[str, Any] = {"vae": dict(model.sizes["vae"]), "timestep_shift": model.timestep_shift}
    if "vit_select_layer" in model.arguments():
        found["vit_select_layer"] = model.vit_select_layer
    for name in ("vit_transform", "vae_transform"):
        transform = getattr(processor, name, None)
        if type(transform).__name__ == "ImageTransform":
            found[name] = {"type": "ImageTransform", **{key: getattr(transform, key) for key in _TRANSFORM}}
    (folder / EXPORTED).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def read_exported(folder: Path) -> dict[str, Any]:
    """What ``write_exported`` wrote; nothing in a directory that was not exported here. Raises ``ConfigError``."""
    path = folder / EXPORTED
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    shift = found.get("timestep_shift", 1.0) if isinstance(found, dict) else None
    if not isinstance(shift, (int, float)) or not isinstance(found.get("vae", {}), dict):
        raise ConfigError(f"{path} is damaged", allowed="an object with vae (an object) and timestep_shift (a number)")
    return found
