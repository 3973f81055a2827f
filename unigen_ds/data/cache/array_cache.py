"""Arrays that are computed once and kept in a file beside the data: written whole, locked, checked by their key.

The file is mapped into memory, not read: all processes of a machine share its pages, and an array costs a process
nothing of its own. It is filled while it is computed (``ArrayFile``), so that no process ever holds all of it either.
The file: the arrays, each at a multiple of 64 bytes, then a table of them as JSON, then the table's length. Values that
are 0 are not written, and need no space on the disk. Arrays of up to 256 MiB together are checked against their digest
whenever they are mapped, larger ones by size and table alone: a wrong record is found when it is read (``index.py``).

The key of an index is the digest of every byte of its data files (``contents_digest``): a digest of parts of a file
misses a change in place between them. It is remembered with each file's size, times of change and inode number; the
time of the last status change (``ctime``) cannot be set by a program.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import time_ns
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from unigen_ds.system.files import file_digest, hold_lock, write_atomic, write_text_atomic
from unigen_ds.system.log import logger

FOLDER = ".unigen_index"
SUFFIX = ".arrays"
_MAGIC = b"unigen-arrays-1\n"
_ALIGN = 64
_MOST_BYTES = 256 << 20
"""Bytes up to which a file is read through, for its digest, at every start: 0.1 s."""
_SETTLED_NS = 2_000_000_000
"""A file changed less than this ago may change again within the resolution of its times: its digest is not kept."""
_KINDS = "iufb"
"""Kinds of NumPy's dtypes that a file may have: numbers. Nothing of a file is ever unpickled."""
_Arrays = dict[str, NDArray[Any]]


class ArrayFile:
    """Arrays of a known size that are filled piece by piece in a new file; ``finish`` writes its table. Written with
    calls: a full disk would end a process that writes to mapped memory.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._table: dict[str, tuple[str, int, int, tuple[int, ...]]] = {}
        self._end = 0

    def add(self, name: str, size: int, dtype: str = "int64", shape: tuple[int, ...] = (-1,)) -> None:
        """Add an array of ``size`` zeros."""
        assert np.dtype(dtype).kind in _KINDS, dtype
        self._table[name] = (dtype, self._end, size, shape)
        self._end += -(-size * np.dtype(dtype).itemsize // _ALIGN) * _ALIGN
        os.ftruncate(self._stream.fileno(), self._end)

    def store(self, name: str, values: NDArray[Any]) -> None:
        self.add(name, values.size, str(values.dtype), values.shape)
        self.put(name, 0, values.reshape(-1))

    def put(self, name: str, start: int, values: NDArray[Any]) -> None:
        """Write ``values`` from ``start`` on. Raises ``OSError`` where a disk is full."""
        dtype, offset, _, _ = self._table[name]
        if values.any():
            content = np.ascontiguousarray(values, dtype=dtype).data.cast("B")
            offset += start * np.dtype(dtype).itemsize
            while content:
                size = os.pwrite(self._stream.fileno(), content, offset)
                content, offset = content[size:], offset + size

    def read(self, name: str) -> NDArray[Any]:
        return _map(self._stream, {name: self._table[name]})[name] if self._table[name][2] else np.empty(0, np.int64)

    def finish(self, key: str) -> _Arrays:
        """The arrays, mapped; ``key``: what they are asked for by."""
        digest = _digest(self._stream, self._end) if self._end <= _MOST_BYTES else None
        table = json.dumps({"key": key, "arrays": self._table, "size": self._end, "xxh3_64": digest}).encode()
        self._stream.seek(self._end)
        self._stream.write(table + xxhash.xxh3_64_digest(table) + len(table).to_bytes(8, "little") + _MAGIC)
        self._stream.flush()
        return _map(self._stream, self._table)


def _digest(stream: BinaryIO, size: int) -> str:
    if not size:
        return xxhash.xxh3_64().hexdigest()
    with mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_READ) as content:
        return xxhash.xxh3_64(content).hexdigest()


def _map(stream: BinaryIO, table: Mapping[str, Sequence[Any]]) -> _Arrays:
    """Read-only arrays of the file's memory, in one mapping: its pages are shared, and the file may be removed."""
    whole = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    return {
        name: np.frombuffer(whole, dtype, size, offset).reshape(shape)
        for name, (dtype, offset, size, shape) in table.items()
    }


def fingerprint(*facts: object) -> str:
    """BLAKE2b-128 of the texts of ``facts``, hex."""
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def cache_folder(path: Path, cache_dir: Path | None) -> Path | None:
    """Where the arrays of a data file are cached: beside it, else in ``cache_dir``, else nowhere, with a warning."""
    beside = path.parent / FOLDER
    for folder in (beside, cache_dir):
        if folder is None:
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    if beside.is_dir():
        return beside  # read-only: it may hold what somebody else prepared
    logger().warning(
        "the index of %s cannot be cached: its folder is not writable and no cache_dir is given; "
        "every start plans all records again",
        path,
    )
    return None


def load_or_fill(cache: Path | None, key: str, fill: Callable[[ArrayFile], None]) -> _Arrays:
    """Return the arrays of ``cache`` where it has those of ``key``, else those that ``fill`` makes, then written there.
    Several processes may ask for it together: one makes it, the others wait where the file system has locks. It gets
    its name when it is complete and on disk; what a killed process leaves is removed by the next one.
    """
    arrays: _Arrays = {}

    def write(temporary: Path) -> None:
        with temporary.open("w+b") as stream:
            new = ArrayFile(stream)
            fill(new)
            arrays.update(new.finish(key))

    if cache is not None:
        if (old := load_arrays(cache, key)) is not None:
            return old
        with hold_lock(cache.with_name(f".{cache.name}.lock")):  # or without, where the folder has no locks
            if (old := load_arrays(cache, key)) is not None:
                return old  # another process was first
            try:
                write_atomic(cache, write)
                return arrays
            except OSError as error:  # a full disk costs time at the next start, not this run
                logger().warning("index cache %s cannot be written: %s", cache, error)
    memory = os.fdopen(os.memfd_create("unigen-arrays"), "w+b") if hasattr(os, "memfd_create") else None
    with memory or tempfile.TemporaryFile() as stream:
        new = ArrayFile(stream)  # type: ignore[arg-type]
        fill(new)
        return new.finish(key)


def load_arrays(cache: Path, key: str) -> _Arrays | None:
    """Return those of a file, mapped. None: there is none, it is damaged (with a warning), or that of another key."""
    if not cache.exists():
        return None
    last = len(_MAGIC) + 8
    try:
        with cache.open("rb") as stream:
            end = os.fstat(stream.fileno()).st_size - last
            stream.seek(max(end, 0))
            tail = stream.read(last)
            length = int.from_bytes(tail[:8], "little")
            if tail[8:] != _MAGIC or length + 8 > end:
                raise ValueError("it is no whole file of arrays")
            stream.seek(end - 8 - length)
            text, digest = stream.read(length), stream.read(8)
            if xxhash.xxh3_64_digest(text) != digest:
                raise ValueError("its table is damaged")
            table: dict[str, Any] = json.loads(text)
            kinds = {np.dtype(dtype).kind for dtype, *_ in table["arrays"].values()}
            if table["size"] != end - 8 - length or not kinds <= set(_KINDS):
                raise ValueError("its table is not that of its arrays")
            if table["key"] != key:
                return None
            if table["xxh3_64"] is not None and _digest(stream, table["size"]) != table["xxh3_64"]:
                raise ValueError("its content is not that of its digest")
            return _map(stream, table["arrays"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger().warning("index cache %s is damaged and is built anew: %s: %s", cache, type(error).__name__, error)
        return None


def contents_digest(files: Sequence[Path], folder: Path | None, *, name: str) -> str:
    """Digest all bytes of ``files``, of several their order and names too. ``folder``: keeps it as that of ``name``."""
    top = os.path.commonpath([file.parent for file in files]) if files else ""
    labels = [os.path.relpath(file, top) for file in files] if len(files) > 1 else [""] * len(files)
    stamps = [_stamp(file) for file in files]
    facts = xxhash.xxh3_128(json.dumps([labels, stamps]).encode()).hexdigest()
    memory = None if folder is None else folder / f"{name}.content.json"
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        record = {} if memory is None else json.loads(memory.read_text(encoding="utf-8"))
        if record["files"] == facts and isinstance(record["xxh3_128"], str):
            return str(record["xxh3_128"])
    is_settled = time_ns() - max((at for stamp in stamps for at in stamp[1:3]), default=0) > _SETTLED_NS
    digests = [file_digest(file).partition(":")[2] for file in files]
    pairs = "".join(f"{label}\0{one}\0" for label, one in zip(labels, digests, strict=True))
    digest = digests[0] if len(files) == 1 else xxhash.xxh3_128(pairs.encode()).hexdigest()
    if memory is not None and is_settled and stamps == [_stamp(file) for file in files]:
        with suppress(OSError):  # costs time at the next start, not this run
            write_text_atomic(memory, json.dumps({"files": facts, "xxh3_128": digest}) + "\n")
    return digest


def _stamp(path: Path) -> list[int]:
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
