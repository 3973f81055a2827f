"""Tables of Arrow, from a file of its own or from parquet: groups of rows, of which one at a time is in memory.

A value that is binary, or a struct ``{bytes, path}`` as Hugging Face's ``datasets`` has it, is an image: what a record
has of it is a ``StoredImage``, or the path where there are no bytes. Nothing is decoded here.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unigen_ds.config.registry import SOURCES
from unigen_ds.core.errors import DataError
from unigen_ds.data.images.stored_image import StoredImage
from unigen_ds.data.records.data_file import MalformedRecord
from unigen_ds.data.sources.base import Arrays, FoundRecord, RecordSource, Row
from unigen_ds.data.sources.unpacked import AGAIN, needed


class TableSource(RecordSource):
    """Rows of a file in groups. A subclass opens the file (``_open``), and reads one group of it (``_group``).

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
        self.__dict__.update(state)
        self._arrow = needed("pyarrow", f"the table {self.label}")
        self._local = threading.local()

    def _open(self) -> Any:
        """The file."""
        raise NotImplementedError(f"{type(self).__name__}._open")

    def _rows_of_groups(self, opened: Any) -> Sequence[int]:
        """How many rows each group has."""
        raise NotImplementedError(f"{type(self).__name__}._rows_of_groups")

    def _group(self, opened: Any, number: int) -> Any:
        """The rows of a group: a table or a record batch."""
        raise NotImplementedError(f"{type(self).__name__}._group")

    def scan(self) -> Arrays:
        rows = self._reading(lambda: self._checked_rows(self._opened()))
        if not sum(rows):
            raise DataError(f"data file {self.path} holds no record")
        return {"rows_of_groups": np.asarray(rows, np.int64)}

    def _checked_rows(self, opened: Any) -> Sequence[int]:
        """``_rows_of_groups``, once for each content of the file. Raises ``DataError`` where a name occurs twice."""
        names = list(self._schema(opened).names)
        if double := sorted({name for name in names if names.count(name) > 1}):
            raise DataError(f"{self.label} names a column twice: {', '.join(double)}")
        return self._rows_of_groups(opened)

    def _schema(self, opened: Any) -> Any:
        """Names and types of the columns."""
        raise NotImplementedError(f"{type(self).__name__}._schema")

    def use(self, arrays: Arrays) -> None:
        self._stops = np.cumsum(arrays["rows_of_groups"])

    def __len__(self) -> int:
        return int(self._stops[-1]) if len(self._stops) else 0

    def read(self, start: int, stop: int) -> Sequence[FoundRecord]:
        found: list[FoundRecord] = []
        while start < stop:
            number = int(np.searchsorted(self._stops, start, side="right"))
            first = int(self._stops[number - 1]) if number else 0
            end = min(stop, int(self._stops[number]))
            found += self._reading(lambda n=number, a=start, f=first, e=end: self._entries(n, a, f, e))  # type: ignore[misc]
            start = end
        return found

    def _entries(self, number: int, start: int, first: int, stop: int) -> list[FoundRecord]:
        """Rows ``start .. stop`` of the file, which are in the group that begins with row ``first``."""
        if getattr(self._local, "group", (None, None))[0] != (os.getpid(), number):
            self._local.group = None, None
            self._local.group = (os.getpid(), number), self._group(self._opened(), number)
        part = self._local.group[1].slice(start - first, stop - start)
        if part.num_rows != stop - start:
            raise DataError(
                f"data file {self.path} has fewer rows than it claims: row {start + part.num_rows + 1} is missing"
            )
        types = {field.name: field.type for field in part.schema}
        kept = {name for name, kind in types.items() if self._has_bytes(kind)}
        entries: list[FoundRecord] = []
        for row, record in enumerate(self._rows(part, start), start=start + 1):
            where = f"{self.label} row {row}"
            for name in kept:
                record[name] = self._value(record[name], types[name], f"{where}: {name}")
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

    def _opened(self) -> Any:
        if getattr(self._local, "pid", None) != os.getpid():
            self._local.opened, self._local.pid = self._open(), os.getpid()
        return self._local.opened

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
        return bool(_is_binary(t, kind))

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


# Arrow files: IPC and Feather files, and streams as Hugging Face's ``datasets`` writes them. They are mapped into
# memory, so one record is read without the others.


_FILE_MAGIC = b"ARROW1"


@SOURCES.register_module(name="arrow")
class ArrowSource(TableSource):
    """One file."""

    fingerprint = "arrow"
    suffixes = (".arrow", ".feather")

    def _open(self) -> Any:
        """A reader of a file, or the batches of a stream; none is copied from the mapped memory."""
        arrow = self._arrow
        with self.path.open("rb") as stream:
            is_file = stream.read(6) == _FILE_MAGIC
        mapped = arrow.memory_map(str(self.path), "r")
        return arrow.ipc.open_file(mapped) if is_file else list(arrow.ipc.open_stream(mapped))

    def _rows_of_groups(self, opened: Any) -> Sequence[int]:
        return [self._group(opened, i).num_rows for i in range(self._number(opened))]

    def _checked_rows(self, opened: Any) -> Sequence[int]:
        """Arrow's reader trusts the offsets in a file: one that is damaged would read, or end, the process's memory."""
        for number in range(self._number(opened)):
            self._group(opened, number).validate(full=True)
        return super()._checked_rows(opened)

    def _schema(self, opened: Any) -> Any:
        return opened.schema if hasattr(opened, "schema") else opened[0].schema if opened else self._arrow.schema([])

    def _number(self, opened: Any) -> int:
        return len(opened) if isinstance(opened, list) else int(opened.num_record_batches)

    def _group(self, opened: Any, number: int) -> Any:
        return opened[number] if isinstance(opened, list) else opened.get_batch(number)
