"""Files of text: JSON and JSONL, CSV and TSV, plain text and Markdown. A record is a range of bytes.

A file is scanned once for the byte range of each record; afterwards one record is one seek and one read, so a file
may be larger than memory. A malformed record is a ``DataError`` with file and line, which is counted only then.
"""

from __future__ import annotations

import csv
import json
import mmap
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from unigen_ds.config.registry import SOURCES, checked
from unigen_ds.core.errors import ConfigError, DataError, short_value
from unigen_ds.data.images.image_files import Span
from unigen_ds.data.records.ratings import RATING_KEYS
from unigen_ds.data.records.records import Captions
from unigen_ds.data.records.unusable import MalformedRecord, check_data_file, decode_text
from unigen_ds.data.sources.base import Arrays, RecordSource, Row
from unigen_ds.system.files import quick_digest

csv.field_size_limit(2**31 - 1)  # Python's own limit refuses a text of 131,072 characters
_BOM = b"\xef\xbb\xbf"
_TOKENS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},]', re.DOTALL)
"""All that determines the structure of a JSON text: whole strings (to be skipped), brackets and commas."""
_LIST_COLUMNS = (
    "conversations", "messages", "texts", "images", "image_list", "instruction_list", "input_images", "output_images",
    *RATING_KEYS,
)  # fmt: skip
"""Columns of a CSV whose cells are lists, written as JSON."""
_LAST_POSITION = threading.local()
"""Last file, line and byte of each thread: many bad records follow each other, and their file is read once."""


class Position(NamedTuple):
    """Where a record begins. As text: ``train.jsonl:17``; the file is read for the line number only then."""

    path: Path
    offset: int
    label: str = ""
    """How the file is called; empty: by its name."""

    def __str__(self) -> str:
        with self.path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            file = self.path, status.st_ino, status.st_mtime_ns
            last_file, lines, at = getattr(_LAST_POSITION, "last", (None, 1, 0))
            if last_file != file or at > self.offset:
                lines, at = 1, 0
            stream.seek(at)
            while at < self.offset and (block := stream.read(min(self.offset - at, 1 << 20))):
                lines += block.count(b"\n")
                at += len(block)
        _LAST_POSITION.last = file, lines, at
        return f"{self.label or self.path}:{lines}"


class RangeSource(RecordSource):
    """Records of a text file, each a range of its bytes: a subclass has ``spans`` and ``entry``."""

    def __init__(self, path: Path, *, label: str | None = None, folder: Path | None = None) -> None:
        super().__init__(path, label=label, folder=folder)
        self.offsets = self.lengths = np.empty(0, np.int64)
        check_data_file(self.path)

    def spans(self) -> Iterable[tuple[int, int]]:
        """Offset and length of each record."""
        raise NotImplementedError(f"{type(self).__name__}.spans")

    def scan(self) -> Arrays:
        table = np.fromiter(chain.from_iterable(self.spans()), np.int64).reshape(-1, 2)  # a file may have millions
        if not len(table):
            remedy = "fill it, or name another data_path; a data set without records is left out of the config"
            raise DataError(f"data file {self.path} holds no record", remedy=remedy)
        return {"offsets": table[:, 0].copy(), "lengths": table[:, 1].copy()}

    def use(self, arrays: Arrays) -> None:
        self.offsets, self.lengths = arrays["offsets"], arrays["lengths"]

    def __len__(self) -> int:
        return len(self.offsets)

    def read(self, start: int, stop: int) -> Sequence[Row]:
        offsets, lengths = self.offsets[start:stop].tolist(), self.lengths[start:stop].tolist()
        if not offsets:
            return ()
        first = offsets[0]
        block = Span(self.path, first, offsets[-1] + lengths[-1] - first).read()
        return [
            self.entry(block[offset - first : offset - first + length], Position(self.path, offset, self.label))
            for offset, length in zip(offsets, lengths, strict=True)
        ]

    def entry(self, raw: bytes, position: Position) -> Row:
        """Return the record of some bytes. Raises ``MalformedRecord`` where it cannot be read."""
        raise NotImplementedError(f"{type(self).__name__}.entry")


def line_spans(path: Path) -> Iterator[tuple[int, int]]:
    """Yield offset and length of the lines that are not blank, without white space around them."""
    with path.open("rb") as stream:
        if stream.read(len(_BOM)) != _BOM:
            stream.seek(0)
        start = stream.tell()
        for line in stream:
            if text := line.strip():
                yield start + len(line) - len(line.lstrip()), len(text)
            start += len(line)


def _element_spans(path: Path) -> Iterator[tuple[int, int]]:
    """Yield offset and length of the elements of a top-level array, from its brackets and commas alone."""
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        depth = start = number = 0
        for match in _TOKENS.finditer(data):
            token = match.group()
            depth += (token in (b"[", b"{")) - (token in (b"]", b"}"))
            if depth == 1 and not start:
                start = match.end()
            elif depth == 0 or (depth == 1 and token == b","):
                raw = data[start : match.start()]
                if text := raw.strip():
                    yield start + raw.index(text[:1]), len(text)
                elif number or depth:
                    raise DataError(f"{Position(path, start)}: an empty element", remedy="remove the comma too many")
                start, number = match.end(), number + 1
            if depth == 0:
                if rest := data[match.end() :].strip():
                    raise DataError(
                        f"{Position(path, match.end())}: text after the end of the array: {rest[:40]!r}",
                        allowed="one array alone, or one object a line",
                        remedy="remove it; if the file is no JSON but plain text: format='text'",
                    )
                return
    raise DataError(f"data file {path} is not a complete JSON array", remedy="its closing bracket is missing")


def load_record(raw: bytes, position: object) -> dict[str, Any]:
    """Parse the bytes of one record. Raises ``DataError`` where it is no JSON object."""
    try:
        record = json.loads(decode_text(raw, position, of=" of the record"))
    except (ValueError, RecursionError) as error:  # ValueError: of the JSON, or of a number of 4,300 digits
        ends_early = not raw.rstrip().endswith((b"}", b"]"))
        raise MalformedRecord(
            f"{position}: no valid JSON: {error}",
            allowed="one object a line, or one array of objects",
            remedy="the record ends early: copy the file again, or mend that line" if ends_early else "mend that line",
        ) from error
    if not isinstance(record, dict):
        raise MalformedRecord(f"{position}: the record is {short_value(record)}", allowed="a JSON object")
    return record


class JsonText(Row):
    """A record that is parsed when its values are asked for. Its digest is of its text."""

    content = b""

    def __init__(self, content: bytes, where: Position) -> None:
        self.content, self.where, self.unused = content, where, ()

    @cached_property
    def record(self) -> dict[str, Any]:  # type: ignore[override]
        return load_record(self.content, self.where)


@SOURCES.register_module(name="json")
class JsonSource(RangeSource):
    """One JSON or JSONL file."""

    captions: ClassVar[Captions | None] = None
    suffixes = (".json", ".jsonl", ".ndjson")

    def identity(self, content: str) -> tuple[object, ...]:
        """Return a quick digest: a change that it misses shows in the digests of the records."""
        return (quick_digest(self.path),)

    def spans(self) -> Iterable[tuple[int, int]]:
        """Bounds of the lines of JSONL, or of the elements of an array: the first character decides which it is."""
        with self.path.open("rb") as stream:
            first = next((text for line in stream if (text := line.removeprefix(_BOM).strip())), b"")
        return _element_spans(self.path) if first.startswith(b"[") else line_spans(self.path)

    def entry(self, raw: bytes, position: Position) -> Row:
        return JsonText(raw, position)


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
        if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n\0'):
            raise ConfigError(f"format.delimiter is {delimiter!r}", allowed="one character: ',', ';', '\\t', '|'")
        self.delimiter = delimiter or ("\t" if ".tsv" in self.label.lower() else ",")
        start, length, self.names = next(self._rows(), (0, 0, []))
        first_row = Span(self.path, start, length).read()
        decode_text(first_row, Position(self.path, start, self.label), encoding="utf-8", of=" of the line")
        signs = [sign for sign in (";", "\t", "|") if len(self.names) == 1 and sign in self.names[0]]
        if signs:
            problem = f"{self.label}: the first row is one cell, {self.names[0]!r}"
            raise DataError(problem, remedy=f"format=dict(type='csv', delimiter={signs[0]!r})")
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

    def spans(self) -> Iterable[tuple[int, int]]:
        rows = self._rows()
        next(rows)  # the names
        return ((offset, length) for offset, length, _ in rows)

    def entry(self, raw: bytes, position: Position) -> Row:
        text = decode_text(raw, position, encoding="utf-8", of=" of the line")
        try:
            cells = next(csv.reader([text], delimiter=self.delimiter, strict=True), [])
        except csv.Error as error:
            raise MalformedRecord(f"{position}: no valid CSV: {error}") from error
        if len(cells) != len(self.names):
            requirement = f"{len(self.names)}, as the first row"
            raise MalformedRecord(f"{position}: the row has {len(cells)} cells", allowed=requirement)
        record: dict[str, Any] = dict(zip(self.names, cells, strict=True))
        for name in filter(record.__contains__, _LIST_COLUMNS):
            try:
                record[name] = json.loads(record[name])
            except (ValueError, RecursionError) as error:
                problem = f"{position}: {name} is no valid JSON: {error}"
                raise MalformedRecord(problem, allowed="a list, written as JSON") from error
        return Row(record, position)


@SOURCES.register_module(name="text")
class TextSource(RangeSource):
    """One file of text; nothing of it is interpreted, Markdown neither.

    Args:
        divide: what a document is: ``file``, or ``line`` without white space around it.
    """

    suffixes = (".txt", ".md", ".markdown")

    @checked("format")
    def __init__(
        self,
        path: Path,
        *,
        label: str | None = None,
        folder: Path | None = None,
        divide: Literal["file", "line"] = "file",
    ) -> None:
        super().__init__(path, label=label, folder=folder)
        self.divide = divide

    @property
    def fingerprint(self) -> str:
        return f"text by {self.divide}"

    def spans(self) -> Iterable[tuple[int, int]]:
        return line_spans(self.path) if self.divide == "line" else [(0, self.path.stat().st_size)]

    def entry(self, raw: bytes, position: Position) -> Row:
        whole = self.divide == "file"
        where = self.label if whole else position
        text = decode_text(raw, where, encoding="utf-8" if position.offset else "utf-8-sig", first=position.offset)
        return Row({"text": text if whole else text.strip()}, where)
