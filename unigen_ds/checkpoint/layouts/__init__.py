"""One file per layout on disk. ``open_reader`` picks it by the manifest's name for it, in the registry ``LAYOUTS``.

A new layout adds a file and a row here. A user's own layout registers itself: a class with the constructor of the
readers here, under the name that its backend passes to ``StateFiles``.
"""

from __future__ import annotations

from pathlib import Path

from unigen_ds.checkpoint.layouts.base import PieceReader
from unigen_ds.checkpoint.layouts.dcp import DCPReader
from unigen_ds.checkpoint.layouts.deepspeed import DeepSpeedReader
from unigen_ds.checkpoint.layouts.safetensors import SafetensorsReader
from unigen_ds.checkpoint.manifest import FULL, Manifest, check_stamp
from unigen_ds.config.registry import LAYOUTS
from unigen_ds.core.errors import CheckpointError
from unigen_ds.system import dist

for _name, _reader in (("safetensors", SafetensorsReader), ("deepspeed", DeepSpeedReader), ("dcp", DCPReader)):
    LAYOUTS.register_module(name=_name, module=_reader)


def open_reader(directory: Path, manifest: Manifest) -> PieceReader:
    """A reader of the checkpoint's model and optimizer tensors."""
    readers = LAYOUTS.module_dict
    if manifest.layout not in readers:
        raise CheckpointError(
            f"{directory} has layout {manifest.layout!r}",
            allowed=", ".join(sorted(readers)),
            remedy="a config whose custom_imports name the module that registers it: --config CONFIG of the tools",
        )
    trainable_or_frozen = {parameter["name"] for parameter in manifest.parameters}
    reader = readers[manifest.layout](directory, parameters=trainable_or_frozen, files=own_files(manifest, ""))
    return _of_this_save(reader, directory, manifest)


def open_shards(directory: Path, manifest: Manifest, folder: str) -> PieceReader:
    """A reader of a hook's shards."""
    reader = SafetensorsReader(directory / folder, files=own_files(manifest, folder))
    return _of_this_save(reader, directory / folder, manifest)


def _of_this_save(reader: PieceReader, directory: Path, manifest: Manifest) -> PieceReader:
    """``reader``. Raises ``CheckpointError`` naming a file that another save wrote: each rank looks at its share."""
    for name in sorted(reader.stamps)[dist.rank() :: dist.world_size()]:
        check_stamp(directory / name, reader.stamps[name](), manifest)
    return reader


def own_files(manifest: Manifest, folder: str) -> list[str]:
    """Names of the files that the save wrote into ``folder`` ('' is the checkpoint itself).

    The folder may have others (an export, for example); they were never verified, so no reader may open them.
    """
    paths = (entry.path.rpartition("/") for entry in manifest.files)
    return [name for parent, _, name in paths if parent == folder]


def shard_folders(manifest: Manifest) -> list[str]:
    """Folders of hooks' shards (``ema``): those that hold safetensors files which the save wrote."""
    paths = (entry.path.rpartition("/") for entry in manifest.files)
    folders = {parent for parent, _, name in paths if parent and name.endswith(".safetensors")}
    return sorted(parent for parent in folders if parent.partition("/")[0] != FULL)
