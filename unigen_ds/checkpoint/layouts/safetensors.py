"""Safetensors files as named flat shards: the ``single`` engine's layout and every engine's EMA.

Two kinds of key: ``kind|name|flat_start`` (``core/shards.py``), and plain tensor names, which are whole master weights
or, where the name is no parameter's, buffers. Only the bytes asked for are read; nothing is unpickled. A file stays
open with its reader: to parse its header anew for each of 1,500 tensors was measured at 23 s, this at 0.1 s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from safetensors import safe_open

from unigen_ds.core.errors import CheckpointError
from unigen_ds.core.shards import BUFFER, MASTER, STAMP, ShardReader, parse_shard_key, read_flat


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
