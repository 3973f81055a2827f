"""Tables: Arrow files, Parquet files, and data sets of the package ``datasets``.

A value that is binary, or a struct ``{bytes, path}`` as Hugging Face's ``datasets`` has it, is an image: what a record
has of it is a ``StoredImage``, or the path where there are no bytes. Nothing is decoded here.

Arrow files (IPC and Feather files, and streams as ``datasets`` writes them) are mapped into memory. Of a Parquet file a
whole group of rows must be unpacked for each record, so it is copied once as Arrow, into the index's folder. Data sets
of Hugging Face are Arrow files in the end; no code of a data set is executed.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from unigen_ds.config.paths import download_remedy, is_hub_name
from unigen_ds.config.registry import SOURCES
from unigen_ds.core.errors import DataError
from unigen_ds.data.images.image_files import StoredImage
from unigen_ds.data.records.unusable import MalformedRecord
from unigen_ds.data.sources.base import Arrays, RecordSource, Row, Sources
from unigen_ds.data.sources.unpacked import AGAIN, copy_of, require

_FILE_MAGIC = b"ARROW1"


@SOURCES.register_module(name="arrow")
class ArrowSource(RecordSource):
    """One file."""

    fingerprint = "arrow"
    suffixes = (".arrow", ".feather")
    batch = 64  # rows may have images

    def __init__(self, path: Path, *, label: str | None = None, folder: Path | None = None) -> None:
        super().__init__(path, label=label, folder=folder)
        self._arrow = require("pyarrow", f"the table {self.label}")
        self._table = self.path
        self._stops = np.empty(0, np.int64)
        self._local = threading.local()
        """What is open: it belongs to the thread and the process that opened it, both of which plan and load."""

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_local", "_arrow")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _arrow=require("pyarrow", "a table"), _local=threading.local())

    def scan(self) -> Arrays:
        """Arrow's reader trusts the offsets in a file: one that is damaged would read, or end, the process's memory."""
        with self._reading():
            schema, number, read = self._open_groups()
            if double := sorted({name for name in schema.names if schema.names.count(name) > 1}):
                raise DataError(f"{self.label} names a column twice: {', '.join(double)}")
            groups = [read(i) for i in range(number)]
            for group in groups:
                group.validate(full=True)
            rows = [group.num_rows for group in groups]
        if not sum(rows):
            raise DataError(f"data file {self.path} holds no record")
        return {"rows_of_groups": np.asarray(rows, np.int64)}

    def use(self, arrays: Arrays) -> None:
        self._stops = np.cumsum(arrays["rows_of_groups"])

    def __len__(self) -> int:
        return int(self._stops[-1]) if len(self._stops) else 0

    def read(self, start: int, stop: int) -> Sequence[Row]:
        entries: list[Row] = []
        with self._reading():
            while start < stop:
                number = int(np.searchsorted(self._stops, start, side="right"))
                first, end = int(self._stops[number - 1]) if number else 0, min(stop, int(self._stops[number]))
                part = self._open_groups()[2](number).slice(start - first, end - start)
                if part.num_rows != end - start:
                    raise DataError(f"data file {self.path} has fewer rows than it claims: row {end} is missing")
                kinds = {field.name: field.type for field in part.schema if self._has_bytes(field.type)}
                for row, record in enumerate(self._rows(part, start), start=start + 1):
                    where = f"{self.label} row {row}"
                    for name, kind in kinds.items():
                        record[name] = self._value(record[name], kind, f"{where}: {name}")
                    entries.append(Row(record, where))
                start = end
        return entries

    def _rows(self, part: Any, start: int) -> list[dict[str, Any]]:
        """The rows of ``part`` as Python's values; the first is row ``start`` of the file, counted from 0."""
        try:
            return part.to_pylist()
        except MemoryError:
            raise
        except Exception as error:  # a time that Python does not have, bytes that are no UTF-8: it raises anything
            if part.num_rows > 1:
                return [row for i in range(part.num_rows) for row in self._rows(part.slice(i, 1), start + i)]
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            raise MalformedRecord(f"{self.label} row {start + 1}: a value cannot be read: {text}") from error

    def _open_groups(self) -> tuple[Any, int, Callable[[int], Any]]:
        """Schema, number of record batches, and what reads one; none is copied from the mapped memory."""
        if getattr(self._local, "pid", None) != os.getpid():
            with self._table.open("rb") as stream:
                is_file = stream.read(len(_FILE_MAGIC)) == _FILE_MAGIC
            memory, ipc = self._arrow.memory_map(str(self._table), "r"), self._arrow.ipc
            reader = ipc.open_file(memory) if is_file else ipc.open_stream(memory)
            batches = None if is_file else list(reader)
            number = reader.num_record_batches if batches is None else len(batches)
            read = reader.get_batch if batches is None else batches.__getitem__
            self._local.groups, self._local.pid = (reader.schema, number, read), os.getpid()
        return self._local.groups

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """A context that raises ``DataError`` where the file is damaged or gone."""
        try:
            yield
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
        types = self._arrow.types
        if types.is_struct(kind):
            return any(self._has_bytes(field.type) for field in kind)
        if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
            return self._has_bytes(kind.value_type)
        return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind))

    def _value(self, value: Any, kind: Any, name: str) -> Any:
        """``value`` with images in place of bytes. ``name``: how messages call it."""
        if value is None:
            return None
        if isinstance(value, bytes):
            return StoredImage(name, value)
        if isinstance(value, list):
            return [self._value(one, kind.value_type, f"{name}[{i}]") for i, one in enumerate(value)]
        if not self._arrow.types.is_struct(kind):
            return value
        if set(value) == {"bytes", "path"}:
            return StoredImage(name, value["bytes"]) if value["bytes"] is not None else value["path"]
        return {field.name: self._value(value[field.name], field.type, f"{name}.{field.name}") for field in kind}


@SOURCES.register_module(name="parquet")
class ParquetSource(ArrowSource):
    """One file, and its copy as Arrow."""

    fingerprint = "parquet"
    suffixes = (".parquet", ".pq")

    def __init__(self, path: Path, *, label: str | None = None, folder: Path | None = None) -> None:
        super().__init__(path, label=label, folder=folder)
        parquet = require("pyarrow.parquet", f"the table {self.label}")
        with self._reading():
            file = parquet.ParquetFile(str(self.path))
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]

        def write(target: Path) -> None:
            arrow = self._arrow
            with arrow.OSFile(str(target), "wb") as sink, arrow.ipc.new_stream(sink, file.schema_arrow) as writer:
                for batch in file.iter_batches(batch_size=1000, use_threads=False):
                    writer.write_batch(batch)

        with self._reading():
            size = sum(group.total_byte_size for group in groups)
            self._table = copy_of(self.path, folder, suffix=".arrow", size=size, write=write)


def is_saved(folder: Path) -> bool:
    """Whether a folder was written by ``save_to_disk``."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


@SOURCES.register_module(name="huggingface")
class HuggingFaceSource(Sources):
    """One split of a data set. Raises ``DataError`` where it cannot be loaded.

    Args:
        path: a folder of ``save_to_disk``, a name of the hub, or the first argument of ``load_dataset``.
        split: one of its splits; None: ``train``, or the only one.
        config: the configuration's name (``name`` of ``load_dataset``).
        data_files: as of ``load_dataset``.
        revision: as of ``load_dataset``.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        label: str | None = None,
        folder: Path | None = None,
        split: str | None = None,
        config: str | None = None,
        data_files: Any = None,
        revision: str | None = None,
    ) -> None:
        what = f"the Hugging Face data set {str(path)!r}"
        datasets, arrow = require("datasets", what), require("pyarrow", what)
        try:
            if is_saved(Path(path)):
                rows = datasets.load_from_disk(str(path))
            else:
                rows = datasets.load_dataset(str(path), config, split=split, data_files=data_files, revision=revision)
        except Exception as error:  # the package raises anything, also what its readers of files do
            problem = f"{what} cannot be loaded: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            remedy = download_remedy(str(path), data=True) if is_hub_name(str(path)) else None
            raise DataError(problem, remedy=remedy) from error
        if isinstance(rows, Mapping):
            rows = rows[choose_split(split, list(rows), str(path))]
        files = [Path(file["filename"]) for file in rows.cache_files]
        number = sum(arrow.ipc.open_stream(arrow.memory_map(str(file))).read_all().num_rows for file in files)
        if not files or number != len(rows):
            raise DataError(
                f"{what}, split {split!r}, is {len(rows):,} of {number:,} rows",
                allowed="a whole split: 'train', not 'train[:100]'; of a folder all rows that were saved",
                remedy="dataset.flatten_indices().save_to_disk(...) writes selected rows alone",
            )
        name = label or str(path)
        labels = [name if len(files) == 1 else f"{name}/{file.name}" for file in files]
        super().__init__([ArrowSource(file, label=one) for file, one in zip(files, labels, strict=True)], str(path))


def choose_split(split: str | None, splits: Sequence[str], what: str) -> str:
    """Return the split that is asked for, or ``train``, or the only one. Raises ``DataError`` where there is none."""
    choice = split or ("train" if "train" in splits or len(splits) != 1 else splits[0])
    if choice not in splits:
        remedy = "format=dict(type='huggingface', split=...)"
        raise DataError(f"{what} has no split {choice!r}", allowed=", ".join(splits), remedy=remedy)
    return choice
