"""Safetensors files as named flat shards: the ``single`` engine's layout and every engine's EMA.

Two kinds of key: ``kind|name|flat_start`` (``core/shards.py``), and plain tensor names, which are whole master weights
or, where the name is no parameter's, buffers. Only the bytes asked for are read; nothing is unpickled. A file stays
open with its reader: to parse its header anew for each of 1,500 tensors was measured at 23 s, this at 0.1 s.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from unigen_ds.checkpoint.manifest import FULL, Manifest
from unigen_ds.checkpoint.store import RNG_DIRECTORY, check_stamp
from unigen_ds.config.registry import LAYOUTS
from unigen_ds.core.errors import CheckpointError
from unigen_ds.core.json_values import STAMP
from unigen_ds.core.shards import BUFFER, MASTER, ShardReader, parse_shard_key, read_flat
from unigen_ds.system import dist
from unigen_ds.system.seeding import set_rng_state


class SafetensorsReader(ShardReader):
    """A ``ShardReader`` over the ``*.safetensors`` of a directory (not of its sub-directories), or of the listed
    ``files``. A plain tensor name that is not among ``parameters`` is a buffer's.
    """

    def __init__(
        self, directory: Path, *, parameters: Iterable[str] | None = None, files: Iterable[str] | None = None
    ) -> None:
        super().__init__(unique=True)
        own = None if parameters is None else set(parameters)
        names = [path.name for path in directory.glob("*.safetensors")] if files is None else files
        paths = sorted(directory / name for name in names if name.endswith(".safetensors"))
        if not paths:
            raise CheckpointError(f"{directory} contains no .safetensors file")
        for path in paths:
            try:
                file = safe_open(path, framework="pt")
                names, metadata = set(file.keys()), file.metadata() or {}
                # safetensors.torch.save_model writes (name left out -> name of the same tensor) into the metadata
                self.tied = {**self.tied, **{k: v for k, v in metadata.items() if v in names and k not in names}}
                self.stamps[path.name] = partial(metadata.get, STAMP, "")
                for key in file.keys():  # noqa: SIM118 - a safetensors handle, not a dict
                    shape = tuple(file.get_slice(key).get_shape())
                    fetch, numel = partial(read_flat, file, key, shape), math.prod(shape)
                    if "|" in key:
                        kind, name, start = parse_shard_key(key)
                        self.add(kind, name, start, numel, fetch, source=str(path))
                    else:
                        kind = MASTER if own is None or key in own else BUFFER
                        self.add(kind, key, 0, numel, fetch, source=str(path), shape=shape)
            except CheckpointError:
                raise
            except Exception as error:
                raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


# Opening a checkpoint: its tensors, also of another layout, and its random generators. Only files that its manifest
# lists are opened: the folder may have others (an export, for example), which were never verified.


def open_reader(directory: Path, manifest: Manifest) -> ShardReader:
    """A reader of the checkpoint's model and optimizer tensors."""
    layout = LAYOUTS.module_dict.get(manifest.layout)
    if layout is None:
        raise CheckpointError(
            f"{directory} has layout {manifest.layout!r}",
            allowed=", ".join(sorted(LAYOUTS.module_dict)),
            remedy="a config whose custom_imports name the module that registers it: --config CONFIG of the tools",
        )
    names = {parameter["name"] for parameter in manifest.parameters}
    return _of_this_save(layout(directory, parameters=names, files=manifest.files_in("")), directory, manifest)


def open_shards(directory: Path, manifest: Manifest) -> dict[str, ShardReader]:
    """A reader of each folder of hooks' shards (``ema``): of those with safetensors files that the save wrote."""
    folders = {entry.path.rpartition("/")[0] for entry in manifest.files if entry.path.endswith(".safetensors")}
    readers = {}
    for folder in sorted(folders - {"", RNG_DIRECTORY}):
        if folder.partition("/")[0] != FULL:
            reader = SafetensorsReader(directory / folder, files=manifest.files_in(folder))
            readers[folder] = _of_this_save(reader, directory / folder, manifest)
    return readers


def tensor_readers(directory: Path, manifest: Manifest) -> dict[tuple[str, str], Callable[[], Tensor]]:
    """(kind, name) -> what reads the whole tensor: weights, moments, steps, buffers and averages."""
    readers = (open_reader(directory, manifest), *open_shards(directory, manifest).values())
    return {
        (kind, name): partial(reader.read, kind, name, 0, reader.numel(kind, name))
        for reader in readers
        for kind in reader.kinds()
        for name in reader.names(kind)
    }


def _of_this_save(reader: ShardReader, directory: Path, manifest: Manifest) -> ShardReader:
    """``reader``. Raises ``CheckpointError`` naming a file that another save wrote: each rank looks at its share."""
    for name in sorted(reader.stamps)[dist.rank() :: dist.world_size()]:
        check_stamp(directory / name, reader.stamps[name](), manifest)
    return reader


def restore_rng(directory: Path, manifest: Manifest) -> bool:
    """Restore this rank's generators. False, on all ranks alike, where the checkpoint has another process count's."""
    path = directory / RNG_DIRECTORY / rank_file()
    if len(list(path.parent.glob("rank*.safetensors"))) != dist.world_size():
        return False
    with safe_open(path, framework="pt") as stream:
        metadata = stream.metadata()
        state: dict[str, Any] = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    check_stamp(path, metadata.get(STAMP), manifest)
    set_rng_state(state | {"scalars": json.loads(metadata["scalars"])})
    return True


def rank_file() -> str:
    """The name of this rank's file in a folder of a checkpoint."""
    return f"rank{dist.rank():05d}.safetensors"
