"""Files of a checkpoint while they are written: plain streams that hash what is written to them.

An engine returns what a rank has to write as ``StateFiles`` (no disk access, collectives allowed); the saver then
writes it (disk access, no collectives). So an error of the disk can leave no rank in a collective. ``HashedFile``
computes the hash while it writes (xxh3_128, about 6 GB/s), so that no byte is read back; the umask decides who may read
the files. Tensors are written from ``Entry``s in pieces of at most 16 MiB.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from unigen_ds.core.errors import CheckpointError
from unigen_ds.system.files import ALGORITHM, fsync_path

_BUFFER, _DIRECT = 1 << 20, 8 << 20
_PIECE = 16 << 20

_DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""dtype -> its name in a safetensors file."""


@dataclass(frozen=True)
class Output:
    """One file that this rank writes."""

    path: str
    """Relative to the checkpoint's directory."""
    nbytes: int
    """Size; where the format's overhead is not known, the tensors' bytes."""
    write: Callable[[HashedFile], Any]
    """Not collective; may run in a thread. Returns plain JSON values, for ``StateFiles.index``. A function of a module
    with its arguments (``functools.partial``): an asynchronous save passes it, with its tensors, to another process.
    """


@dataclass(frozen=True)
class StateFiles:
    """The files of an engine's state that a rank writes."""

    layout: str
    """Which reader opens it (``checkpoint/layouts``)."""
    files: Sequence[Output]
    index: Callable[[Sequence[Sequence[Any]]], Sequence[Output]] | None = None
    """On rank 0 once all have written: the results of each rank's ``write`` -> further files."""


class DirectFile:
    """A new file that is written past the page cache (``O_DIRECT``), as far as the file system can: with a tenth of the
    processor time, for a process that writes beside a training. Only whole blocks at block addresses may be written so:
    all goes through a buffer, and what is left at the end is written as in any file.
    """

    def __init__(self, path: Path) -> None:
        file = path.open("wb", buffering=0)
        self.fileno, self.close = file.fileno, file.close
        self._buffer, self._num_bytes = mmap.mmap(-1, _DIRECT), 0
        self._direct = False
        with suppress(OSError):  # a file system without it
            self._set_direct(hasattr(os, "O_DIRECT"))

    def _set_direct(self, direct: bool) -> None:
        flags = fcntl.fcntl(self.fileno(), fcntl.F_GETFL) & ~getattr(os, "O_DIRECT", 0)
        fcntl.fcntl(self.fileno(), fcntl.F_SETFL, flags | (os.O_DIRECT if direct else 0))
        self._direct = direct

    def write(self, data: memoryview) -> None:
        while data.nbytes:
            number = min(data.nbytes, _DIRECT - self._num_bytes)
            self._buffer[self._num_bytes : self._num_bytes + number] = data[:number]
            self._num_bytes, data = self._num_bytes + number, data[number:]
            if self._num_bytes == _DIRECT:
                self.flush()

    def flush(self) -> None:
        """Write the buffer; from one that is not full on, the rest of the file is written through the page cache."""
        with memoryview(self._buffer) as whole:
            rest = whole[: self._num_bytes]
            while rest.nbytes:
                if self._direct and rest.nbytes != _DIRECT:
                    self._set_direct(False)
                try:
                    rest = rest[os.write(self.fileno(), rest) :]
                except OSError as error:
                    if error.errno != errno.EINVAL or not self._direct:
                        raise
                    self._set_direct(False)  # blocks are larger here, or addresses are checked more strictly
            rest.release()
        self._num_bytes = 0


class HashedFile:
    """A new file with its ``digest``. It has no ``fileno``: ``torch.save`` would write to that without the hash.
    ``direct``: as a ``DirectFile``."""

    def __init__(self, path: Path, *, direct: bool = False) -> None:
        self._file: Any = DirectFile(path) if direct else path.open("wb", buffering=_BUFFER)
        self._hash = xxhash.xxh3_128()
        self._size = 0

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if view.nbytes:
            view = view.cast("B")
            self._hash.update(view)
            self._file.write(view)
            self._size += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        """Nothing: ``torch.save`` asks after each archive, and what is written past the page cache are whole blocks."""

    def tell(self) -> int:
        return self._size

    @property
    def digest(self) -> str:
        """``algorithm:hex`` of what was written."""
        return f"{ALGORITHM}:{self._hash.hexdigest()}"

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Without an error, the content is on disk afterwards."""
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()  # a network disk may report here that it has not what was written
        finally:
            with suppress(OSError):  # of what could not be flushed: it was raised before
                self._file.close()


@dataclass(frozen=True)
class Entry:
    """A tensor of a file, which is written a piece at a time: the memory needed does not grow with the tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """The dtype in the file; elements are cast to it."""
    parts: Callable[[int, int], Iterable[Tensor]]
    """(start, stop) -> those elements as they are stored, 1-D, in one tensor or several."""
    source: str = ""
    """Equal for tied names."""

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Entry:
        """A tensor on any device: each piece is copied to the host when it is written."""
        flat = tensor if tensor.ndim == 1 and not tensor.requires_grad else tensor.detach().reshape(-1)
        return cls(name, tuple(tensor.shape), tensor.dtype, partial(_slice, flat), name)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def pieces(self) -> Iterator[Tensor]:
        """All elements in order, on the host, in the file's dtype, a bounded number of them at a time."""
        step = _PIECE // max(self.dtype.itemsize, 4)
        for start in range(0, self.numel, step):
            for part in self.parts(start, min(start + step, self.numel)):
                yield part.to("cpu", self.dtype).contiguous()

    def write(self, stream: Any) -> None:
        """Write the elements as bytes, without a copy where they are on the host in the file's dtype."""
        for piece in self.pieces():
            stream.write(piece.view(torch.uint8).numpy().data)


def _slice(flat: Tensor, start: int, stop: int) -> list[Tensor]:
    return [flat[start:stop]]


def safetensors_output(path: str, entries: Iterable[Entry], metadata: Mapping[str, str]) -> Output:
    """A safetensors file. The format has no sharing: tied names are written twice."""
    # as the safetensors package orders them: each tensor is aligned
    by_size = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    size = 0
    for entry in by_size:
        if entry.dtype not in _DTYPE_NAMES:
            raise CheckpointError(f"{entry.name} has dtype {entry.dtype}", allowed=", ".join(map(str, _DTYPE_NAMES)))
        offsets = [size, size + entry.nbytes]
        table[entry.name] = {"dtype": _DTYPE_NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        size += entry.nbytes
    header = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    return Output(path, 8 + len(header) + size, partial(_write_safetensors, header, by_size))


def _write_safetensors(header: bytes, entries: Sequence[Entry], stream: HashedFile) -> None:
    stream.write(struct.pack("<Q", len(header)) + header)
    for entry in entries:
        entry.write(stream)


def save_torch(path: Path, entries: Sequence[Entry]) -> None:
    """A ``torch.save`` archive of tensors, read from a mapped file beside it; tied names share one storage."""
    storages = {entry.source: entry for entry in entries}
    map_path = path.with_name(f"{path.name}.mapped")
    tensors: dict[str, Tensor] = {}
    try:
        with map_path.open("wb") as stream:
            for entry in storages.values():
                entry.write(stream)
        offset = 0
        for source, entry in storages.items():
            if not entry.nbytes:  # which cannot be mapped
                tensors[source] = torch.empty(entry.shape, dtype=entry.dtype)
                continue
            content = np.memmap(map_path, np.uint8, "r+", offset, (entry.nbytes,))
            tensors[source] = torch.from_numpy(content).view(entry.dtype).view(entry.shape)
            offset += entry.nbytes
        torch.save({entry.name: tensors[entry.source] for entry in entries}, path)
        fsync_path(path)
    except RuntimeError as error:  # of torch's writer
        raise OSError(errno.EIO, f"torch cannot write it: {error}", str(path)) from error
    finally:
        map_path.unlink(missing_ok=True)


def bytes_output(path: str, content: bytes) -> Output:
    return Output(path, len(content), partial(_write_bytes, content))


def _write_bytes(content: bytes, stream: HashedFile) -> None:
    stream.write(content)


def all_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite. A sum that is finite shows it in one pass; it may also overflow."""
    if not tensor.is_floating_point():
        return True
    total = tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))
    return bool(total.isfinite()) or bool(tensor.isfinite().all())


def write_output(directory: Path, output: Output, *, direct: bool = False) -> tuple[int, str, Any]:
    """Write one file durably, ``direct`` as a ``DirectFile``. Returns its size, digest, and what ``write`` returned."""
    path = directory / output.path
    if path.parent != directory and not path.parent.is_dir():  # ``directory`` itself may be gone, with its disk
        path.parent.mkdir(exist_ok=True)
    try:
        with HashedFile(path, direct=direct) as stream:
            result = output.write(stream)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    return stream.tell(), stream.digest, result


def save_entries(path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]) -> None:
    """``safetensors.torch.save_file``, but durable, and readable by whom the umask allows."""
    write_output(path.parent, safetensors_output(path.name, entries, metadata))


def save_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    save_entries(path, [Entry.of(name, tensor) for name, tensor in tensors.items()], metadata)


def nested_bytes(state: Any) -> int:
    """Bytes of all tensors in nested dicts and sequences, each storage once: about what ``torch.save`` writes."""
    sizes, values = dict[int, int](), [state]
    while values:
        if isinstance(value := values.pop(), Tensor):
            storage = value.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, Mapping):
            values += value.values()
        elif isinstance(value, list | tuple | set):
            values += value
    return sum(sizes.values())
