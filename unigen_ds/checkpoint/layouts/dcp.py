"""PyTorch's distributed checkpoint (``.metadata``, ``__<rank>_0.distcp``), read without executing its pickle.

``.metadata`` is a pickle of a handful of data classes. The unpickler here knows those by name, as inert records, and
refuses everything else. Each item of a ``.distcp`` file is a ``torch.save`` archive at a byte range.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unigen_ds.checkpoint.layouts.torch_file import WRAPPERS, Inert
from unigen_ds.core.errors import CheckpointError
from unigen_ds.core.json_values import STAMP
from unigen_ds.core.shards import MASTER, Fetch, Pieces, ShardReader
from unigen_ds.system.machine import without_collector

_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
}  # fmt: skip
_LEFT_OUT = ""
"""Kind of what is not read."""
_SMALL = 1 << 16
"""Bytes; an item up to this is simply read, and the end of a larger one that has its list of records."""
_SAFE = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): dict,
    **{("builtins", name): lambda *arguments: arguments for name in ("dict", "zip", "map")},  # nothing is called
    ("pathlib", "PosixPath"): lambda *parts: "/".join(parts),
    ("pathlib", "Path"): lambda *parts: "/".join(parts),
}


class _Record(Inert):
    """A data class of the pickle: its fields as attributes."""

    offset: Any = None

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self.__dict__ |= state if isinstance(state, dict) else {}


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


def _columns(positions: Any) -> list[Sequence[Any]]:
    """Key, offset, file, first byte and length of every item. Ours are stored so, as arguments (``fsdp.py``)."""
    if isinstance(positions, dict):
        rows = [(k.fqn, tuple(k.offset or ()), v.relative_path, v.offset, v.length) for k, v in positions.items()]
        return list(zip(*rows, strict=True)) or [()] * 5
    (((_, *keys), (_, *values)),) = positions
    if len({len(column) for column in (*keys, *values)}) > 1 or (len(keys), len(values)) != (2, 3):
        raise ValueError("its columns are not of the same length")
    return [*keys, *values]


@without_collector()
def read_metadata(directory: Path) -> Any:
    """``.metadata`` as inert records, ``storage_data`` as columns. Raises ``CheckpointError`` if it cannot be read."""
    path = directory / ".metadata"
    try:
        with path.open("rb") as stream:
            metadata = _Unpickler(stream).load()
        metadata.storage_data = _columns(metadata.storage_data)
        return metadata
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


class DCPReader(ShardReader):
    """A ``ShardReader`` over a directory whose keys are ``kind|name`` (``fsdp.py``), or another trainer's."""

    def __init__(
        self, directory: Path, *, parameters: Iterable[str] | None = None, files: Iterable[str] | None = None
    ) -> None:
        super().__init__()
        metadata = read_metadata(directory)
        fqns, offsets, paths, begins, lengths = metadata.storage_data
        file_names = None if files is None else set(files)
        for file in sorted(set(paths)):
            if not (directory / file).is_file():
                raise CheckpointError(f"{directory / file} is missing")
            if file_names is not None and file not in file_names:
                raise CheckpointError(f"{directory} names {file}, which the save did not write")

        def fetch_row(dtype: torch.dtype, rows: Sequence[int], spans: Sequence[tuple[int, int]], number: int) -> Fetch:
            row, (start, stop) = rows[number], spans[number]
            return _fetch(directory / paths[row], begins[row], lengths[row], stop - start, dtype)

        names = _names(metadata)
        rows: dict[str, list[int]] = defaultdict(list)
        for row, fqn in enumerate(fqns):
            rows[fqn].append(row)
        spans: dict[Any, dict[Any, tuple[int, int]]] = {}
        for fqn, of_tensor in rows.items():
            tensor = metadata.state_dict_metadata[fqn]
            kind, name = names[fqn]
            if kind == _LEFT_OUT or not hasattr(tensor, "size"):
                continue
            split = id(tensor.chunks), tensor.size
            if split not in spans:  # tensors of equal shape share them
                spans[split] = _spans(f"{directory}: {fqn}", tensor)
            of_rows = {row: spans[split].get(offsets[row], (-1, -1)) for row in of_tensor}
            of_tensor.sort(key=of_rows.__getitem__)
            ranges = [of_rows[row] for row in of_tensor]
            if ranges[0] == (-1, -1):
                raise CheckpointError(f"the checkpoint's .metadata has no chunk of {fqn} at {offsets[of_tensor[0]]}")
            dtype = tensor.properties.state[0]  # the fields: dtype, layout, requires_grad, memory format, pinned
            pieces = Pieces(ranges, partial(fetch_row, dtype, of_tensor, ranges))
            if kind == STAMP:
                self.stamps[paths[of_tensor[0]]] = partial(_text, pieces)
            else:
                self.shapes[kind, name] = tuple(tensor.size)
                if any(start < stop for start, stop in ranges):
                    self._pieces[kind, name] = pieces


def _spans(where: str, tensor: Any) -> dict[Any, tuple[int, int]]:
    """Offset of a chunk -> its first element and that after the last; without an offset, of the first chunk."""
    spans: dict[Any, tuple[int, int]] = {}
    for chunk in reversed(tensor.chunks):
        if tuple(chunk.sizes[1:]) != tuple(tensor.size[1:]):
            raise CheckpointError(f"{where} is not split along its first dimension")
        start = chunk.offsets[0] * math.prod(tensor.size[1:]) if tensor.size else 0
        spans[()] = spans[tuple(chunk.offsets)] = start, start + math.prod(chunk.sizes)
    return spans


def _text(pieces: Pieces) -> str:
    return b"".join(bytes(p.fetch(0, p.stop).tolist()) for p in pieces.starting_at(0)).decode(errors="replace")


def _names(metadata: Any) -> dict[str, tuple[str, str]]:
    """Stored name -> (kind, name): ours are ``kind|name``.

    Other trainers save nested dictionaries (accelerate: ``{"model": {...}}``), whose paths the planner stores. Of those
    the model's tensors are taken, without the keys around them; where no path has such a key, all but an optimizer's.
    """
    names: dict[str, tuple[str, str]] = {}
    paths: dict[str, tuple[str, ...]] = {}
    planner_data = getattr(metadata, "planner_data", None)
    for fqn in metadata.state_dict_metadata:
        kind, bar, name = fqn.partition("|")
        if bar:
            names[fqn] = kind, name
            continue
        path = planner_data.get(fqn) if isinstance(planner_data, dict) else None
        paths[fqn] = tuple(map(str, path)) if isinstance(path, (tuple, list)) and path else (fqn,)
    has_wrappers = any(key in WRAPPERS for path in paths.values() for key in path[:-1])
    for fqn, path in paths.items():
        at = next((i for i, key in enumerate(path[:-1]) if key in WRAPPERS), None)
        left_out = at is None if has_wrappers else path[0].startswith("optim")
        names[fqn] = (_LEFT_OUT, fqn) if left_out else (MASTER, ".".join(path if at is None else path[at + 1 :]))
    return names


def _fetch(path: Path, offset: int, length: int, numel: int, dtype: torch.dtype) -> Fetch:
    """Elements of the archive at a byte range. Of a large one only the bytes asked for are read."""

    @cache
    def begin() -> int | None:
        """Find the tensor's bytes in the file; None where the archive is not simply one whole tensor."""
        if length <= _SMALL:
            return None
        with path.open("rb") as stream:
            stream.seek(offset + length - _SMALL)  # an archive has its list of records at its end
            records = zipfile.ZipFile(io.BytesIO(stream.read(_SMALL))).infolist()
            records = [record for record in records if "/data/" in record.filename]
            if len(records) != 1 or records[0].file_size != numel * dtype.itemsize:
                return None
            header = offset + length - _SMALL + records[0].header_offset
            stream.seek(header)
            name_length, extra_length = struct.unpack_from("<HH", stream.read(30), 26)
            return header + 30 + int(name_length) + int(extra_length)

    def fetch(first: int, last: int) -> Tensor:
        try:
            at = begin()
            with path.open("rb") as stream:
                if at is None:
                    stream.seek(offset)
                    block = io.BytesIO(stream.read(length))
                    return torch.load(block, weights_only=True, map_location="cpu").reshape(-1)[first:last]
                stream.seek(at + first * dtype.itemsize)
                part = bytearray((last - first) * dtype.itemsize)
                if stream.readinto(part) < len(part):
                    raise OSError("it ends too early")
                return torch.frombuffer(part, dtype=dtype)
        except Exception as error:
            raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error

    return fetch
