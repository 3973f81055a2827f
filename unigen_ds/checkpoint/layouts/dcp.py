"""PyTorch's distributed checkpoint (``.metadata``, ``__<rank>_0.distcp``), read without executing its pickle.

``.metadata`` is a pickle of a handful of data classes. The unpickler here knows those by name, as inert records, and
refuses everything else. Each item of a ``.distcp`` file is a ``torch.save`` archive at a byte range.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unigen_ds.checkpoint.layouts.base import Fetch, PieceReader
from unigen_ds.core.errors import CheckpointError

_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
}  # fmt: skip
_SAFE = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): lambda *parts: "/".join(parts),
    ("pathlib", "Path"): lambda *parts: "/".join(parts),
}


class _Record:
    """A data class of the pickle: its fields as attributes, hashable by identity."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()):
            return type(name, (_Record,), {})
        if (module, name) in _SAFE:
            return _SAFE[module, name]
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, (torch.dtype, torch.layout)):
            return value
        raise CheckpointError(f"the checkpoint's .metadata names {module}.{name}, which is not allowed to be loaded")


def read_metadata(directory: Path) -> Any:
    """``.metadata`` as inert records. Raises ``CheckpointError`` when it is missing, damaged or unsafe."""
    path = directory / ".metadata"
    try:
        with path.open("rb") as stream:
            return _Unpickler(stream).load()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


class DCPReader(PieceReader):
    """A ``ShardReader`` over a directory whose keys are ``kind|name`` (``backends/fsdp.py``)."""

    def __init__(
        self, directory: Path, *, parameters: Iterable[str] | None = None, files: Iterable[str] | None = None
    ) -> None:
        super().__init__()
        metadata = read_metadata(directory)
        _check_files(directory, metadata.storage_data.values())
        allowed = None if files is None else set(files)
        for index, info in metadata.storage_data.items():
            tensor = metadata.state_dict_metadata[index.fqn]
            if not hasattr(tensor, "size"):
                continue
            kind, _, name = index.fqn.partition("|")
            chunk = _chunk(tensor, index)
            row = math.prod(tensor.size[1:])
            if tuple(chunk.sizes[1:]) != tuple(tensor.size[1:]):
                raise CheckpointError(f"{directory}: {index.fqn} is not cut along its first dimension")
            if allowed is not None and info.relative_path not in allowed:
                raise CheckpointError(f"{directory} names {info.relative_path}, which the save did not write")
            start = chunk.offsets[0] * row if tensor.size else 0
            fetch = _fetch(directory / info.relative_path, info.offset, info.length)
            self.add(kind, name, start, math.prod(chunk.sizes), fetch)


def _check_files(directory: Path, entries: Iterable[Any]) -> None:
    """Raises ``CheckpointError`` naming a file that is missing or shorter than what is said to be in it."""
    ends: dict[str, int] = {}
    for info in entries:
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in sorted(ends.items()):
        path = directory / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if path.stat().st_size < end:
            raise CheckpointError(f"{path} is cut off: it has {path.stat().st_size} bytes of {end}")


def _chunk(tensor: Any, index: Any) -> Any:
    offset = tuple(index.offset or ())
    for chunk in tensor.chunks:
        if tuple(chunk.offsets) == offset or not offset:
            return chunk
    raise CheckpointError(f"the checkpoint's .metadata has no chunk of {index.fqn} at {offset}")


class _Window(io.RawIOBase):
    """The bytes ``offset .. offset + length`` of a file as a file: a tensor is read straight into its memory."""

    def __init__(self, path: Path, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = path.open("rb", buffering=0), offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, to: int, whence: int = io.SEEK_SET) -> int:
        self._at = to + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._at)
        got = self._file.readinto(memoryview(buffer)[: max(self._length - self._at, 0)]) or 0
        self._at += got
        return got

    def close(self) -> None:
        self._file.close()
        super().close()


def _fetch(path: Path, offset: int, length: int) -> Fetch:
    def fetch(first: int, last: int) -> Tensor:
        try:
            with _Window(path, offset, length) as window:
                return torch.load(window, weights_only=True, map_location="cpu").reshape(-1)[first:last]  # type: ignore[arg-type]
        except Exception as error:
            raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error

    return fetch
