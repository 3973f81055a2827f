"""Write named tensors to one file, a piece at a time: the memory used does not grow with the model.

Two formats: a ``torch.save`` archive (``torch.load(weights_only=True)``, ``mmap=True`` too, reads it; tied names share
one storage, as torch itself writes them) and safetensors (tied names are written twice: the format has no sharing).
Sizes are known in advance, so the disk space is reserved first: a disk that is too full fails before a byte is written,
and writing is faster. Pieces are written from the mapped source without a copy, except for a cast of dtypes.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from unigen_ds.core.errors import CheckpointError

PIECE_BYTES = 16 << 20
_ALIGNMENT = 64
_NAMES = {
    torch.float32: ("FloatStorage", "F32"), torch.float64: ("DoubleStorage", "F64"),
    torch.float16: ("HalfStorage", "F16"), torch.bfloat16: ("BFloat16Storage", "BF16"),
    torch.int64: ("LongStorage", "I64"), torch.int32: ("IntStorage", "I32"), torch.int16: ("ShortStorage", "I16"),
    torch.int8: ("CharStorage", "I8"), torch.uint8: ("ByteStorage", "U8"), torch.bool: ("BoolStorage", "BOOL"),
}  # fmt: skip
"""dtype -> its name in a ``torch.save`` archive, and in safetensors."""

Advance = Callable[[int], None]
"""Called with the bytes of each piece written."""


@dataclass(frozen=True)
class Entry:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """Of the output."""
    source: str
    """Equal for tied names."""
    parts: Callable[[int, int], Iterable[Tensor]]
    """(start, stop) -> those elements as they are stored, 1-D, in one tensor or several."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def pieces(self) -> Iterator[Tensor]:
        """All elements in order, in the output's dtype, a bounded number of them at a time."""
        step = PIECE_BYTES // max(self.dtype.itemsize, 4)
        for start in range(0, self.numel, step):
            for part in self.parts(start, min(start + step, self.numel)):
                yield part.to(self.dtype).contiguous()


Write = Callable[[Path, Sequence[Entry], Advance], None]


def write_torch(path: Path, entries: Sequence[Entry], advance: Advance) -> None:
    """One ``torch.save`` archive of a dict of tensors."""
    storages = {entry.source: entry for entry in entries}
    keys = {source: str(number) for number, source in enumerate(storages)}
    size = sum(entry.nbytes for entry in storages.values())
    with _reserved(path, size) as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        _record(archive, path.stem, "data.pkl", _pickled(entries, keys))
        _record(archive, path.stem, "byteorder", b"little")
        for source, entry in storages.items():
            with archive.open(_aligned(f"{path.stem}/data/{keys[source]}", entry.nbytes, stream), "w") as record:
                for piece in entry.pieces():
                    advance(record.write(_bytes(piece)))
        _record(archive, path.stem, "version", b"3\n")


def write_safetensors(path: Path, entries: Sequence[Entry], advance: Advance) -> None:
    """One safetensors file."""
    entries = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))  # so that each is aligned
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in entries:
        offsets = [at, at + entry.nbytes]
        table[entry.name] = {"dtype": _name(entry, 1), "shape": list(entry.shape), "data_offsets": offsets}
        at += entry.nbytes
    header = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    with _reserved(path, 8 + len(header) + at) as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        for entry in entries:
            for piece in entry.pieces():
                advance(stream.write(_bytes(piece)))


@contextmanager
def _reserved(path: Path, size: int) -> Iterator[IO[bytes]]:
    with path.open("wb") as stream:
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(stream.fileno(), 0, size)
        yield stream


def _bytes(piece: Tensor) -> memoryview:
    return piece.view(torch.uint8).numpy().data


def _name(entry: Entry, which: int) -> str:
    if entry.dtype not in _NAMES:
        raise CheckpointError(f"{entry.name} has dtype {entry.dtype}", allowed=", ".join(map(str, _NAMES)))
    return _NAMES[entry.dtype][which]


def _record(archive: zipfile.ZipFile, stem: str, name: str, content: bytes) -> None:
    archive.writestr(zipfile.ZipInfo(f"{stem}/{name}"), content)


def _aligned(name: str, size: int, stream: IO[bytes]) -> zipfile.ZipInfo:
    """A record whose content begins at a multiple of 64 bytes: ``torch.load(mmap=True)`` maps it in place."""
    info = zipfile.ZipInfo(name)
    info.CRC, info.compress_size = 0, 0
    info.file_size = size  # decides whether its header has the 64-bit form
    bare = len(info.FileHeader(size * 1.05 > zipfile.ZIP64_LIMIT)) + 4
    padding = -(stream.tell() + bare) % _ALIGNMENT
    info.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    return info


class _Storage:
    """The pickle's reference to the bytes of a tensor."""

    def __init__(self, key: str, entry: Entry) -> None:
        self.key, self.entry = key, entry


class _Pickler(pickle.Pickler):
    """Pickles entries as torch pickles tensors: a rebuild of a view of a storage in another record."""

    def __init__(self, stream: IO[bytes], keys: dict[str, str]) -> None:
        super().__init__(stream, protocol=2)
        self._keys = keys

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return "storage", getattr(torch, _name(obj.entry, 0)), obj.key, "cpu", obj.entry.numel
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Entry):
            strides = [math.prod(obj.shape[i + 1 :]) for i in range(len(obj.shape))]
            storage = _Storage(self._keys[obj.source], obj)
            no_hooks: OrderedDict[str, Any] = OrderedDict()
            return torch._utils._rebuild_tensor_v2, (storage, 0, obj.shape, tuple(strides), False, no_hooks)
        return NotImplemented


def _pickled(entries: Sequence[Entry], keys: dict[str, str]) -> bytes:
    stream = io.BytesIO()
    first: dict[str, Entry] = {}
    _Pickler(stream, keys).dump({entry.name: first.setdefault(entry.source, entry) for entry in entries})
    return stream.getvalue()
