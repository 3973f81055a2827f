"""A turn (one text or one image of a conversation), and the values of a record that turns are made of."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from unigen_ds.core.errors import DataError, close
from unigen_ds.data.images.stored_image import StoredImage

Role = Literal["user", "assistant", "system"]
Captions = Literal["generate", "understand"]


class Turn(NamedTuple):
    """One text or one image of a conversation. ``role`` is user, assistant or system."""

    role: Role
    kind: Literal["text", "image"]
    value: str
    """The text, or the path of the image; one inside of another file is a ``StoredImage``."""
    learned: bool = True
    """False: of the assistant, and only read: an answer of ``weight`` 0."""

    @property
    def is_target(self) -> bool:
        """Whether it is learned."""
        return self.learned and self.role == "assistant"


def same_message(last: Turn, turn: Turn) -> bool:
    """Whether two turns that follow each other are of one message."""
    return last.role == turn.role and last.learned == turn.learned


def format_value(value: Any) -> str:
    """Return the first 57 characters of a value, for a message about its record."""
    try:
        text = repr(value)
    except RecursionError:  # JSON may be nested as deeply as Python can follow it, and this is called further down
        text = f"a {type(value).__name__}, nested too deeply to be shown"
    return text if len(text) <= 60 else text[:57] + "..."


def key_names(record: Mapping[str, Any]) -> str:
    """Return the keys of a record for a message about it."""
    text = ", ".join(map(str, record))
    return text if len(text) <= 200 else text[:197] + "..."


def rename_hint(record: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    """Return the setting that reads a key of the record as the one of ``keys`` that it is probably meant to be."""
    for name in map(str, record):
        if name not in keys and (near := close(name, keys)):
            return f"did you mean {near!r}? columns={{{name!r}: {near!r}}} reads it so"
    return None


class Values:
    """The values of one record, which are checked when a layout asks for them.

    Args:
        record: the record, with the keys of the layouts.
        where: file and line; every error begins with it.
        image_root: the folder of relative image paths; None: the paths stay as they are.
        captions: as of ``records.parse_record``.
    """

    __slots__ = ("captions", "image_root", "record", "where")

    def __init__(
        self, record: Mapping[str, Any], where: object, image_root: Path | None, captions: Captions | None
    ) -> None:
        self.record, self.where, self.image_root, self.captions = record, where, image_root, captions

    def wrong(self, field: str, value: Any, allowed: str) -> DataError:
        """Return the error for a value that is none of ``allowed``; of a key that is missing with the record's keys."""
        if value is not None:
            return DataError(f"{self.where}: {field} is {format_value(value)}", allowed=allowed)
        of_record = field.isidentifier()  # not a part of the value of a key
        keys = f" (the record has: {key_names(self.record)})" if of_record else ""
        hint = rename_hint(self.record, (field,)) if of_record and field not in self.record else None
        return DataError(f"{self.where}: {field} is missing{keys}", allowed=allowed, remedy=hint)

    def text(self, value: Any, field: str) -> str:
        """Return a text that a tokenizer accepts. Raises ``DataError`` for everything else."""
        if isinstance(value, StoredImage):  # which is a ``str``, of its name
            raise DataError(
                f"{self.where}: {field} has bytes",
                allowed="a text",
                remedy="store the column as texts (UTF-8), not as binary values",
            )
        if not isinstance(value, str):
            raise self.wrong(field, value, "a text")
        try:
            value.encode()  # JSON can spell half of a character, which no tokenizer accepts
        except UnicodeEncodeError as error:
            half = f"{field}, character {error.start}"
            raise self.wrong(half, value[error.start], "a text without unpaired surrogates") from error
        return value

    def image(self, value: Any, field: str) -> str:
        """Return the path of an image, under ``image_root`` where it is relative, or the image that the record has:
        bytes, or base64 as ``data:image/png;base64,...``. Raises ``DataError`` for everything else.
        """
        if isinstance(value, StoredImage):
            return value
        if not isinstance(value, str) or not value:
            raise self.wrong(field, value, "the path of an image")
        if value.startswith("data:image/"):
            return self._decoded(value, field)
        return value if self.image_root is None else str(self.image_root / value)

    def linked_image(self, value: Any, field: str) -> str:
        """Return the image of a url: a path, or base64. Nothing is downloaded."""
        if not isinstance(value, str) or isinstance(value, StoredImage):
            return self.image(value, field)
        if value.startswith(("http://", "https://")):
            raise self.wrong(field, value, "a path, or data:image/...;base64,...: nothing is downloaded")
        if value.startswith("data:"):
            return self._decoded(value, field)
        return self.image(value.removeprefix("file://"), field)

    def images(self, key: str) -> list[str]:
        """Return the images of a key: one, a list of them, or none where it is missing or null."""
        value = self.record.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            return [self.image(value, key)]
        return [self.image(one, f"{key}[{i}]") for i, one in enumerate(value)]

    def _decoded(self, url: str, field: str) -> StoredImage:
        head, separator, text = url.partition(",")
        if not separator or not head.endswith(";base64"):
            raise self.wrong(field, url, "data:image/...;base64,...")
        where, path = self.where, getattr(self.where, "path", None)
        if path is not None:  # its line is not counted, which would be done for every image
            where = f"{path.name}, byte {getattr(where, 'offset', None)}"
        try:
            return StoredImage(f"{where}: {field}", base64.b64decode(text, validate=True))
        except ValueError as error:
            raise self.wrong(field, url, "valid base64") from error
