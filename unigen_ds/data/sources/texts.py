"""Plain text and Markdown: a file is one document, or each of its lines or paragraphs is one."""

from __future__ import annotations

import mmap
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from unigen_ds.config.registry import SOURCES, checked
from unigen_ds.core.errors import DataError
from unigen_ds.data.records.data_file import check_data_file, no_utf8
from unigen_ds.data.sources.base import Arrays, FoundRecord, RecordSource, Row
from unigen_ds.data.sources.json_lines import Place, line_spans, read_bytes

_PARAGRAPH = re.compile(rb"[^\s](?:.*?)(?=\n[ \t\r]*\n|\s*\Z)", re.DOTALL)
_BOM = b"\xef\xbb\xbf"


@SOURCES.register_module(name="text")
class TextSource(RecordSource):
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
        self.offsets = self.lengths = np.empty(0, np.int64)
        check_data_file(self.path)

    @property
    def fingerprint(self) -> str:
        return f"text by {self.divide}"

    def scan(self) -> Arrays:
        size = self.path.stat().st_size
        if self.divide == "line":
            offsets, lengths = line_spans(self.path)
        elif self.divide == "paragraph" and size:
            with self.path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                start = len(_BOM) if data[:3] == _BOM else 0
                found = np.asarray([m.span() for m in _PARAGRAPH.finditer(data, start)], np.int64).reshape(-1, 2)
            offsets, lengths = found[:, 0].copy(), found[:, 1] - found[:, 0]
        else:
            offsets, lengths = np.zeros(1, np.int64), np.asarray([size], np.int64)
        if not offsets.size:
            raise DataError(f"data file {self.path} holds no {self.divide}")
        return {"offsets": offsets, "lengths": lengths}

    def use(self, arrays: Arrays) -> None:
        self.offsets, self.lengths = arrays["offsets"], arrays["lengths"]

    def __len__(self) -> int:
        return len(self.offsets)

    def read(self, start: int, stop: int) -> Sequence[FoundRecord]:
        found = []
        for offset, length in zip(self.offsets[start:stop].tolist(), self.lengths[start:stop].tolist(), strict=True):
            where = self.label if self.divide == "file" else Place(self.path, offset, self.label)
            raw = read_bytes(self.path, offset, length)
            try:
                text = raw.decode("utf-8-sig" if offset == 0 else "utf-8")
            except UnicodeDecodeError as error:
                raise no_utf8(self.path, where, offset + error.start) from error
            found.append(Row({"text": text.strip() if self.divide != "file" else text}, where))
        return found
