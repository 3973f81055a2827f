"""Tables: Arrow and parquet files, in groups of rows, of which one at a time is in memory.

A value that is binary, or a struct ``{bytes, path}`` as Hugging Face's ``datasets`` has it, is an image: what a record
has of it is a ``StoredImage``, or the path where there are no bytes. Nothing is decoded here.

Arrow files (IPC and Feather files, and streams as ``datasets`` writes them) are mapped into memory, so one record is
read without the others. To read one row of a parquet file, its whole group of rows must be unpacked: up to a million
rows, for each record of a random order. So a file with a group above 1 MiB (unpacked) is copied once as Arrow, into the
index's folder; smaller groups are read where they are.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from unigen_ds.config.registry import SOURCES, checked
from unigen_ds.core.errors import DataError
from unigen_ds.data.images.image_files import StoredImage
from unigen_ds.data.records.unusable import MalformedRecord
from unigen_ds.data.sources.base import Arrays, FoundRecord, RecordSource, Row
from unigen_ds.data.sources.unpacked import AGAIN, copy_of, needed

_FILE_MAGIC = b"ARROW1"
LARGE_GROUP = 1 << 20
"""Bytes of a group of rows of a parquet file, unpacked, above which the file is copied."""
_BATCH_ROWS = 1000


class Groups(Protocol):
    """An open file: names and types of its columns, and its groups of rows."""

    schema: Any

    def rows(self) -> Sequence[int]:
        """How many rows each group has. Called once for each content of the file: damaged values raise."""
        ...

    def read(self, number: int) -> Any:
        """The rows of a group: a table or a record batch."""
        ...


class ArrowGroups:
    """The record batches of a file or a stream of Arrow; none is copied from the mapped memory."""

    def __init__(self, path: Path) -> None:
        arrow = needed("pyarrow", f"the table {path}")
        with path.open("rb") as stream:
            is_file = stream.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        mapped = arrow.memory_map(str(path), "r")
        reader = arrow.ipc.open_file(mapped) if is_file else arrow.ipc.open_stream(mapped)
        self.schema = reader.schema
        batches = None if is_file else list(reader)
        self.read: Callable[[int], Any] = reader.get_batch if batches is None else batches.__getitem__
        self._number = reader.num_record_batches if batches is None else len(batches)

    def rows(self) -> Sequence[int]:
        """Arrow's reader trusts the offsets in a file: one that is damaged would read, or end, the process's memory."""
        groups = [self.read(i) for i in range(self._number)]
        for group in groups:
            group.validate(full=True)
        return [group.num_rows for group in groups]


class ParquetGroups:
    """The groups of rows of a parquet file."""

    def __init__(self, path: Path) -> None:
        self.file = needed("pyarrow.parquet", f"the table {path}").ParquetFile(str(path))
        self.schema = self.file.schema_arrow
        self.groups = [self.file.metadata.row_group(i) for i in range(self.file.metadata.num_row_groups)]

    def rows(self) -> Sequence[int]:
        return [group.num_rows for group in self.groups]

    def read(self, number: int) -> Any:
        return self.file.read_row_group(number, use_threads=False)

    def write_arrow(self, target: Path) -> None:
        """Write all rows as a stream of Arrow."""
        arrow = needed("pyarrow", f"the table {target}")
        with arrow.OSFile(str(target), "wb") as sink, arrow.ipc.new_stream(sink, self.schema) as writer:
            for batch in self.file.iter_batches(batch_size=_BATCH_ROWS, use_threads=False):
                writer.write_batch(batch)


class TableSource(RecordSource):
    """Rows of a file in groups. A subclass opens the file (``_open``).

    An open file belongs to the thread and the process that opened it: both are used to plan and to load.
    """

    batch = 64  # rows may have images

    def __init__(self, path: Path, *, label: str | None = None, folder: Path | None = None) -> None:
        super().__init__(path, label=label, folder=folder)
        self._arrow = needed("pyarrow", f"the table {self.label}")
        if not self.path.is_file():  # a pipe would be waited for
            raise DataError(f"data file {self.path} does not exist, or is not a file")
        self._stops = np.empty(0, np.int64)
        self._local = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_local", "_arrow")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _arrow=needed("pyarrow", "a table"), _local=threading.local())

    def _open(self) -> Groups:
        raise NotImplementedError(f"{type(self).__name__}._open")

    def scan(self) -> Arrays:
        rows = self._reading(self._rows_of_groups)
        if not sum(rows):
            raise DataError(f"data file {self.path} holds no record")
        return {"rows_of_groups": np.asarray(rows, np.int64)}

    def _rows_of_groups(self) -> Sequence[int]:
        names = list(self._opened().schema.names)
        if double := sorted({name for name in names if names.count(name) > 1}):
            raise DataError(f"{self.label} names a column twice: {', '.join(double)}")
        return self._opened().rows()

    def use(self, arrays: Arrays) -> None:
        self._stops = np.cumsum(arrays["rows_of_groups"])

    def __len__(self) -> int:
        return int(self._stops[-1]) if len(self._stops) else 0

    def read(self, start: int, stop: int) -> Sequence[FoundRecord]:
        rows: list[FoundRecord] = []
        while start < stop:
            number = int(np.searchsorted(self._stops, start, side="right"))
            end = min(stop, int(self._stops[number]))
            rows += self._reading(lambda n=number, a=start, e=end: self._entries(n, a, e))  # type: ignore[misc]
            start = end
        return rows

    def _entries(self, number: int, start: int, stop: int) -> list[FoundRecord]:
        """Rows ``start .. stop`` of the file, all of which are in group ``number``."""
        if getattr(self._local, "group", (None, None))[0] != (os.getpid(), number):
            self._local.group = None, None
            self._local.group = (os.getpid(), number), self._opened().read(number)
        first = int(self._stops[number - 1]) if number else 0
        part = self._local.group[1].slice(start - first, stop - start)
        if part.num_rows != stop - start:
            raise DataError(
                f"data file {self.path} has fewer rows than it claims: row {start + part.num_rows + 1} is missing"
            )
        kinds = {field.name: field.type for field in part.schema if self._has_bytes(field.type)}
        entries: list[FoundRecord] = []
        for row, record in enumerate(self._rows(part, start), start=start + 1):
            where = f"{self.label} row {row}"
            for name, kind in kinds.items():
                record[name] = self._value(record[name], kind, f"{where}: {name}")
            entries.append(Row(record, where))
        return entries

    def _rows(self, part: Any, start: int) -> list[dict[str, Any]]:
        """The rows of ``part`` as Python's values; the first is row ``start`` of the file, counted from 0."""
        try:
            rows: list[dict[str, Any]] = part.to_pylist()
            return rows
        except MemoryError:
            raise
        except Exception as error:  # a time that Python does not have, bytes that are no UTF-8: it raises anything
            if part.num_rows > 1:
                return [row for i in range(part.num_rows) for row in self._rows(part.slice(i, 1), start + i)]
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            raise MalformedRecord(f"{self.label} row {start + 1}: a value cannot be read: {text}") from error

    def _opened(self) -> Groups:
        if getattr(self._local, "pid", None) != os.getpid():
            self._local.opened, self._local.pid = self._open(), os.getpid()
        opened: Groups = self._local.opened
        return opened

    def _reading(self, read: Callable[[], Any]) -> Any:
        """``read()``. Raises ``DataError`` where the file is damaged or gone."""
        try:
            return read()
        except DataError:
            raise
        except Exception as error:  # of a damaged file, whose names need not be UTF-8 either
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                raise  # of a copy that is being written
            if isinstance(error, MemoryError) and not isinstance(error, self._arrow.ArrowMemoryError):
                raise  # Arrow's own is that of a size in the file
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(f"data file {self.path} cannot be read: {text}", remedy=AGAIN) from error

    def _has_bytes(self, kind: Any) -> bool:
        t = self._arrow.types
        if t.is_struct(kind):
            return any(self._has_bytes(field.type) for field in kind)
        if _is_list(t, kind):
            return self._has_bytes(kind.value_type)
        return _is_binary(t, kind)

    def _value(self, value: Any, kind: Any, name: str) -> Any:
        """``value`` with images in place of bytes. ``name``: how messages call it."""
        t = self._arrow.types
        if value is None:
            return None
        if _is_binary(t, kind):
            return StoredImage(name, value)
        if _is_list(t, kind):
            return [self._value(one, kind.value_type, f"{name}[{i}]") for i, one in enumerate(value)]
        if not t.is_struct(kind):
            return value
        if set(value) == {"bytes", "path"}:
            return StoredImage(name, value["bytes"]) if value["bytes"] is not None else value["path"]
        return {field.name: self._value(value[field.name], field.type, f"{name}.{field.name}") for field in kind}


def _is_binary(types: Any, kind: Any) -> bool:
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind))


def _is_list(types: Any, kind: Any) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


@SOURCES.register_module(name="arrow")
class ArrowSource(TableSource):
    """One file."""

    fingerprint = "arrow"
    suffixes = (".arrow", ".feather")

    def _open(self) -> Groups:
        return ArrowGroups(self.path)


@SOURCES.register_module(name="parquet")
class ParquetSource(TableSource):
    """One file.

    Args:
        unpack: whether a file with large groups of rows is copied as Arrow, which costs its size on the disk; else each
            record unpacks a group.
    """

    fingerprint = "parquet"
    suffixes = (".parquet", ".pq")

    @checked("format")
    def __init__(
        self, path: Path, *, label: str | None = None, folder: Path | None = None, unpack: bool = True
    ) -> None:
        super().__init__(path, label=label, folder=folder)
        self._copy: Path | None = None
        opened: ParquetGroups = self._reading(lambda: ParquetGroups(self.path))
        sizes = [group.total_byte_size for group in opened.groups]
        if unpack and max(sizes, default=0) > LARGE_GROUP:

            def write(target: Path) -> None:
                self._reading(lambda: opened.write_arrow(target))

            self._copy = copy_of(self.path, folder, suffix=".arrow", size=sum(sizes), write=write)

    @property
    def cache_facts(self) -> tuple[object, ...]:
        """The groups of the copy are others than those of the file; its records are not."""
        return (self.fingerprint, self._copy is not None)

    def _open(self) -> Groups:
        return ParquetGroups(self.path) if self._copy is None else ArrowGroups(self._copy)
