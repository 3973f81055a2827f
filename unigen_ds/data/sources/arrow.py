"""Arrow files: IPC and Feather files, and streams as Hugging Face's ``datasets`` writes them. They are mapped into
memory, so one record is read without the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unigen_ds.core.registry import SOURCES
from unigen_ds.data.sources.tables import TableSource

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
