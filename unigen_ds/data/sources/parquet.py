"""Parquet files. A record is read with its group of rows; where groups are large, the file is copied once as Arrow.

To read one row of a parquet file, the whole group of rows must be unpacked: up to a million rows, for each record
of a random order. So a file with a group above 1 MiB (unpacked) becomes an Arrow file in the index's folder; smaller
groups are read where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unigen_ds.config.registry import SOURCES, checked
from unigen_ds.data.sources.tables import ArrowSource, TableSource
from unigen_ds.data.sources.unpacked import copy_of, needed

LARGE_GROUP = 1 << 20
"""Bytes of a group of rows, unpacked, above which the file is copied."""
_BATCH_ROWS = 1000


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
        self._copy: ArrowSource | None = None
        meta = self._reading(lambda: self._open().metadata)
        sizes = [meta.row_group(i).total_byte_size for i in range(meta.num_row_groups)]
        if unpack and max(sizes, default=0) > LARGE_GROUP:
            copy = copy_of(self.path, folder, suffix=".arrow", size=sum(sizes), write=self._write_arrow)
            self._copy = ArrowSource(copy, label=self.label)

    @property
    def cache_facts(self) -> tuple[object, ...]:
        """The groups of the copy are others than those of the file; its records are not."""
        return (self.fingerprint, self._copy is not None)

    def _open(self) -> Any:
        if self._copy is not None:
            return self._copy._open()
        return needed("pyarrow.parquet", f"the table {self.label}").ParquetFile(str(self.path))

    def _rows_of_groups(self, opened: Any) -> Sequence[int]:
        if self._copy is not None:
            return self._copy._rows_of_groups(opened)
        return [opened.metadata.row_group(i).num_rows for i in range(opened.metadata.num_row_groups)]

    def _schema(self, opened: Any) -> Any:
        return self._copy._schema(opened) if self._copy is not None else opened.schema_arrow

    def _group(self, opened: Any, number: int) -> Any:
        if self._copy is not None:
            return self._copy._group(opened, number)
        return opened.read_row_group(number, use_threads=False)

    def _write_arrow(self, target: Path) -> None:
        def write() -> None:
            opened = self._open()
            new_stream = self._arrow.ipc.new_stream
            with self._arrow.OSFile(str(target), "wb") as sink, new_stream(sink, opened.schema_arrow) as writer:
                for batch in opened.iter_batches(batch_size=_BATCH_ROWS, use_threads=False):
                    writer.write_batch(batch)

        self._reading(write)
