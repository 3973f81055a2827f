"""One file per layout on disk. ``open_reader`` picks it by the manifest; a new layout adds a file and a row here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from unigen_ds.checkpoint.layouts.base import PieceReader
from unigen_ds.checkpoint.layouts.dcp import DCPReader
from unigen_ds.checkpoint.layouts.deepspeed import DeepSpeedReader
from unigen_ds.checkpoint.layouts.safetensors import SafetensorsReader
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.core.errors import CheckpointError

LAYOUTS: dict[str, Callable[..., PieceReader]] = {
    "safetensors": SafetensorsReader,
    "deepspeed": DeepSpeedReader,
    "dcp": DCPReader,
}


def open_reader(directory: Path, manifest: Manifest) -> PieceReader:
    """A reader of the checkpoint's model and optimizer tensors."""
    if manifest.layout not in LAYOUTS:
        raise CheckpointError(f"{directory} has layout {manifest.layout!r}", allowed=", ".join(sorted(LAYOUTS)))
    trainable_or_frozen = {parameter["name"] for parameter in manifest.parameters}
    return LAYOUTS[manifest.layout](directory, parameters=trainable_or_frozen, files=own_files(manifest, ""))


def own_files(manifest: Manifest, folder: str) -> list[str]:
    """Names of the files that the save wrote into ``folder`` ('' is the checkpoint itself).

    Others may lie beside them (an export, say); their content was never verified, so no reader may open them.
    """
    paths = (entry.path.rpartition("/") for entry in manifest.files)
    return [name for parent, _, name in paths if parent == folder]


def shard_folders(manifest: Manifest) -> list[str]:
    """Folders of hooks' shards (``ema``): those that hold safetensors files which the save wrote."""
    paths = (entry.path.rpartition("/") for entry in manifest.files)
    return sorted({parent for parent, _, name in paths if parent and name.endswith(".safetensors")})
