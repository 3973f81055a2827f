"""CSV and TSV files: one record a row, named by the first row. Rows are found once by their bytes, as in JSONL."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unigen_ds.config.registry import SOURCES, checked
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.data.images.image_files import Span
from unigen_ds.data.records.records import RATINGS, other_delimiter
from unigen_ds.data.records.unusable import MalformedRecord, no_utf8
from unigen_ds.data.sources.base import Arrays, Position, RangeSource, Row, ranges

csv.field_size_limit(2**31 - 1)  # Python's own limit refuses a text of 131,072 characters
_NESTED = (
    "conversations", "messages", "texts", "images", "image_list", "instruction_list", "input_images", "output_images",
    *(f"{name}_ratings" for name in RATINGS),
)  # fmt: skip
"""Columns whose cells are lists, written as JSON."""
_BOM = b"\xef\xbb\xbf"
_NO_DELIMITER = '"\r\n\0'


@SOURCES.register_module(name="csv")
class CsvSource(RangeSource):
    """One file with a row of names first.

    Args:
        delimiter: one character; None: a tab in ``.tsv``, else a comma.
    """

    suffixes = (".csv", ".tsv")

    @checked("format")
    def __init__(
        self, path: Path, *, label: str | None = None, folder: Path | None = None, delimiter: str | None = None
    ) -> None:
        super().__init__(path, label=label, folder=folder)
        if delimiter is not None and (len(delimiter) != 1 or delimiter in _NO_DELIMITER):
            raise ConfigError(
                f"format.delimiter is {delimiter!r}",
                allowed="one character, that is no quotation mark and no end of a line",
                remedy="delimiter=';', or delimiter='\\t' for tabs; a file with a longer one must be written again",
            )
        self.delimiter = delimiter or ("\t" if ".tsv" in self.label.lower() else ",")
        start, length, self.names = next(self._rows(), (0, 0, []))
        self._text(Span(self.path, start, length).read(), Position(self.path, start, self.label))
        double = sorted({name for name in self.names if self.names.count(name) > 1})
        if double or not any(self.names):
            what = f"names a column twice: {', '.join(double)}" if double else "is empty"
            raise DataError(f"{self.label}: the first row {what}", allowed="a row with the names of the columns")

    @property
    def fingerprint(self) -> str:
        return f"csv {self.delimiter!r}"

    def _rows(self) -> Iterator[tuple[int, int, list[str]]]:
        """First byte, number of bytes and cells of each row that is not blank. The encoding is not checked."""
        with self.path.open("rb") as stream:
            if stream.read(3) != _BOM:
                stream.seek(0)
            start = at = stream.tell()

            def lines() -> Iterator[str]:
                nonlocal at
                for line in stream:
                    at += len(line)  # before the reader has it, which asks for no line ahead
                    yield line.decode("utf-8", "surrogateescape")

            try:
                for cells in csv.reader(lines(), delimiter=self.delimiter, strict=True):
                    if cells:
                        yield start, at - start, cells
                    start = at
            except csv.Error as error:
                raise DataError(f"{Position(self.path, start, self.label)}: no valid CSV: {error}") from error

    def _text(self, raw: bytes, position: Position) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise no_utf8(self.path, position, error.start, " of the line") from error

    def scan(self) -> Arrays:
        rows = self._rows()
        next(rows)
        arrays = ranges((offset, length) for offset, length, _ in rows)
        if not arrays["offsets"].size:
            raise DataError(f"data file {self.path} holds no record: it has the names of the columns alone")
        return arrays

    def entry(self, raw: bytes, position: Position) -> Row:
        try:
            cells = next(csv.reader([self._text(raw, position)], delimiter=self.delimiter, strict=True), [])
        except csv.Error as error:
            raise MalformedRecord(f"{position}: no valid CSV: {error}") from error
        if len(cells) != len(self.names):
            raise MalformedRecord(
                f"{position}: the row has {len(cells)} cells",
                allowed=f"{len(self.names)}, as the first row",
                remedy=other_delimiter(self.names),
            )
        return Row({name: _value(name, cell, position) for name, cell in zip(self.names, cells, strict=True)}, position)


def _value(name: str, cell: str, position: Position) -> Any:
    if name not in _NESTED:
        return cell
    try:
        return json.loads(cell)
    except (ValueError, RecursionError) as error:
        raise MalformedRecord(
            f"{position}: {name} is no valid JSON: {error}", allowed="a list, written as JSON"
        ) from error
