"""An image inside of another file: a value of a table, a member of a tar, base64 in a text.

It is used where an image's path is. As text it names its position (``train.parquet row 9: image``), so messages need no
other name for it; its bytes are read when somebody opens it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import xxhash

from unigen_ds.core.errors import DataError


@dataclass(frozen=True)
class Span:
    """A range of bytes of a file."""

    path: Path
    offset: int
    length: int

    def read(self) -> bytes:
        """Its bytes. Raises ``DataError`` where the file was removed or shortened after it was indexed."""
        try:
            with self.path.open("rb") as stream:
                content = os.pread(stream.fileno(), self.length, self.offset)
        except OSError as error:
            raise lost(self.path, error.strerror) from error
        if len(content) != self.length:
            raise lost(self.path, f"it ends at byte {self.offset + len(content)}, before one of its records")
        return content


class StoredImage(str):
    """A text that names the image, which has the bytes of its file. A copy in another process is the text alone:
    what was read is not sent along with a message about it.
    """

    _data: bytes | Span

    def __new__(cls, name: str, data: bytes | Span) -> StoredImage:
        image = super().__new__(cls, name)
        image._data = data
        return image

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)

    def read(self) -> bytes:
        """The bytes of the image's file."""
        return self._data.read() if isinstance(self._data, Span) else self._data

    @cached_property
    def digest(self) -> str:
        """XXH3-128 of these bytes, hex."""
        return xxhash.xxh3_128(self.read()).hexdigest()


def lost(path: Path, why: str | None) -> DataError:
    """A data file that was there when it was indexed."""
    return DataError(
        f"data file {path} can no longer be read: {why}",
        remedy="a run reads its data files until it ends: restore the file, then continue with --resume",
    )
