"""JSON and JSONL files -> records by byte offset.

A file is scanned once for the byte range of each record; afterwards one record is one seek and one read, so a file
may be larger than memory. A malformed record is a ``DataError`` that names file and line; the line number is counted
only then.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from unigen_ds.config.registry import SOURCES
from unigen_ds.core.errors import DataError
from unigen_ds.data.records.records import Captions, format_value
from unigen_ds.data.records.unusable import LATIN1, MalformedRecord, no_record
from unigen_ds.data.sources.base import Arrays, FoundRecord, Position, RangeSource, ranges
from unigen_ds.system.files import quick_digest

_BOM = b"\xef\xbb\xbf"
_TOKENS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},]', re.DOTALL)
"""All that determines the structure of a JSON text: whole strings (to be skipped), brackets and commas."""


def scan(path: Path) -> Arrays:
    """Return byte offset and byte length of every record of a JSONL file (blank lines skipped) or a JSON array.

    The first character decides which of the two it is, not the name of the file.
    """
    arrays = ranges(_array_elements(path)) if _is_array(path) else line_ranges(path)
    if not arrays["offsets"].size:
        raise no_record(path)
    return arrays


def _is_array(path: Path) -> bool:
    with path.open("rb") as stream:
        for line in stream:
            text = line.removeprefix(_BOM).strip()
            if text:
                return text.startswith(b"[")
    return False


def line_ranges(path: Path) -> Arrays:
    """Return the ranges of the lines that are not blank, without white space around them."""
    return ranges(_lines(path))


def _lines(path: Path) -> Iterator[tuple[int, int]]:
    with path.open("rb") as stream:
        if stream.read(len(_BOM)) != _BOM:
            stream.seek(0)
        start = stream.tell()
        for line in stream:
            if text := line.strip():
                yield start + len(line) - len(line.lstrip()), len(text)
            start += len(line)


def _array_elements(path: Path) -> Iterator[tuple[int, int]]:
    """Byte ranges of the elements of a top-level array, from its brackets and commas alone."""
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        depth, start, first = 0, 0, True
        for match in _TOKENS.finditer(data):
            token = match.group()
            if token in (b"[", b"{"):
                depth += 1
                if depth == 1:
                    start = match.end()
            elif token in (b"]", b"}"):
                depth -= 1
                if depth == 0:
                    text = data[start : match.start()].strip()
                    if text or not first:
                        yield _element(path, data, start, match.start())
                    rest = data[match.end() :].strip()
                    if rest:
                        raise DataError(
                            f"{Position(path, match.end())}: text after the end of the array: {rest[:40]!r}",
                            allowed="one array alone, or one object a line",
                            remedy="remove it; if the file is no JSON but plain text: format='text'",
                        )
                    return
            elif token == b"," and depth == 1:
                yield _element(path, data, start, match.start())
                start, first = match.end(), False
    raise DataError(f"data file {path} is not a complete JSON array", remedy="its closing bracket is missing")


def _element(path: Path, data: mmap.mmap, start: int, stop: int) -> tuple[int, int]:
    raw = data[start:stop]
    text = raw.strip()
    if not text:
        raise DataError(f"{Position(path, start)}: an empty element", remedy="remove the comma too many")
    return start + raw.index(text[:1]), len(text)


def load_record(raw: bytes, position: object) -> dict[str, Any]:
    """Parse the bytes of one record. Raises ``DataError`` where it is no JSON object."""
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError) as error:  # ValueError: of the JSON, its encoding, or a number of 4,300 digits
        raise MalformedRecord(
            f"{position}: no valid JSON: {error}",
            allowed="one object a line, or one array of objects",
            remedy=_remedy(raw, error, position),
        ) from error
    if not isinstance(record, dict):
        raise MalformedRecord(f"{position}: the record is {format_value(record)}", allowed="a JSON object")
    return record


def _remedy(raw: bytes, error: Exception, position: object) -> str:
    """How a record that is no valid JSON may become one."""
    if isinstance(error, UnicodeDecodeError):
        name = Path(getattr(position, "path", "FILE")).name
        return f"convert it: {LATIN1.format(name, Path(name).suffix)}"
    if not raw.rstrip().endswith((b"}", b"]")):
        return "the record ends early: if the file was copied or is still written, copy it again; else mend that line"
    return "mend that line, or remove it"


class JsonText(NamedTuple):
    """A record that is parsed when its values are asked for."""

    content: bytes
    where: Position

    @property
    def record(self) -> dict[str, Any]:
        return load_record(self.content, self.where)

    @property
    def values(self) -> bytes:
        try:
            return json.dumps(self.record, sort_keys=True, separators=(",", ":")).encode()
        except RecursionError as error:
            raise DataError(f"{self.where}: its values are nested too deeply") from error


@SOURCES.register_module(name="json")
class JsonSource(RangeSource):
    """One JSON or JSONL file. Its index and its digests are those of versions that read nothing else."""

    captions: ClassVar[Captions | None] = None
    suffixes = (".json", ".jsonl", ".ndjson")

    def identity(self, content: str) -> tuple[object, ...]:
        """Return a quick digest: a change that it misses shows in the digests of the records."""
        return (quick_digest(self.path),)

    @property
    def cache_facts(self) -> tuple[object, ...]:
        return ()

    def scan(self) -> Arrays:
        return scan(self.path)

    def entry(self, raw: bytes, position: Position) -> FoundRecord:
        return JsonText(raw, position)
