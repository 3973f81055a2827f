"""Plain text and Markdown: a file is one document, or each of its lines or paragraphs is one."""

from __future__ import annotations

import mmap
import re
from pathlib import Path
from typing import Literal

from unigen_ds.config.registry import SOURCES, checked
from unigen_ds.core.errors import DataError
from unigen_ds.data.records.unusable import no_utf8
from unigen_ds.data.sources.base import Arrays, Position, RangeSource, Row, ranges
from unigen_ds.data.sources.json_lines import line_ranges

_PARAGRAPH = re.compile(rb"[^\s](?:.*?)(?=\n[ \t\r]*\n|\s*\Z)", re.DOTALL)
_BOM = b"\xef\xbb\xbf"


@SOURCES.register_module(name="text")
class TextSource(RangeSource):
    """One file of text; nothing of it is interpreted, Markdown neither.

    Args:
        divide: what a document is: ``file``, ``line`` or ``paragraph`` (between blank lines), without the white space
            around it.
    """

    suffixes = (".txt", ".md", ".markdown")

    @checked("format")
    def __init__(
        self,
        path: Path,
        *,
        label: str | None = None,
        folder: Path | None = None,
        divide: Literal["file", "line", "paragraph"] = "file",
    ) -> None:
        super().__init__(path, label=label, folder=folder)
        self.divide = divide

    @property
    def fingerprint(self) -> str:
        return f"text by {self.divide}"

    def scan(self) -> Arrays:
        size = self.path.stat().st_size
        if self.divide == "line":
            arrays = line_ranges(self.path)
        elif self.divide == "paragraph" and size:
            with self.path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                start = len(_BOM) if data[:3] == _BOM else 0
                arrays = ranges((one.start(), one.end() - one.start()) for one in _PARAGRAPH.finditer(data, start))
        else:
            arrays = ranges([(0, size)])
        if not arrays["offsets"].size:
            raise DataError(f"data file {self.path} holds no {self.divide}")
        return arrays

    def entry(self, raw: bytes, position: Position) -> Row:
        whole = self.divide == "file"
        where = self.label if whole else position
        try:
            text = raw.decode("utf-8" if position.offset else "utf-8-sig")
        except UnicodeDecodeError as error:
            raise no_utf8(self.path, where, position.offset + error.start) from error
        return Row({"text": text if whole else text.strip()}, where)
