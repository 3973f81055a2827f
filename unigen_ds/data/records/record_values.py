"""Values of a record's keys: texts and images, and the errors that name file, line and field."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unigen_ds.core.errors import DataError
from unigen_ds.data.images.stored_image import StoredImage

_UNCHANGED = re.compile(r"[^/.][^/]*(?:/[^/.][^/]*)*")
"""Relative paths that pathlib leaves as they are."""


def wrong(where: object, field: str, value: Any, allowed: str) -> DataError:
    """The error for a value that is none of ``allowed``. ``where``: file and line."""
    what = "missing" if value is None else shown_value(value)
    return DataError(f"{where}: {field} is {what}", allowed=allowed)


def key_names(record: Mapping[str, Any]) -> str:
    """A record's keys, as a terminal and a log file accept them: JSON can spell half of a character."""
    text = ", ".join(map(str, record)).encode(errors="backslashreplace").decode()
    return text if len(text) <= 200 else text[:197] + "..."


def shown_value(value: Any) -> str:
    """A value as a message about its record shows it: its first 57 characters."""
    try:
        text = repr(value)
    except RecursionError:  # JSON may be nested as deeply as Python can follow it, and this is called further down
        text = f"a {type(value).__name__}, nested too deeply to be shown"
    return text if len(text) <= 60 else text[:57] + "..."


def text_value(record: Mapping[str, Any], key: str, field: str, where: object) -> str:
    """A text that a tokenizer accepts. Raises ``DataError`` for everything else."""
    value = record.get(key)
    if isinstance(value, StoredImage):  # which is a ``str``, of its name
        raise DataError(
            f"{where}: {field} has bytes",
            allowed="a text",
            remedy="store the column as texts (UTF-8), not as binary values",
        )
    if not isinstance(value, str):
        raise wrong(where, field, value, "a text")
    if value.isascii():
        return value
    try:
        value.encode()  # JSON can spell half of a character, which no tokenizer accepts
    except UnicodeEncodeError as error:
        half = f"{field}, character {error.start}"
        raise wrong(where, half, value[error.start], "a text without unpaired surrogates") from error
    return value


def image_path(value: Any, field: str, where: object, image_root: Path | None) -> str:
    """Of an image on its own, under ``image_root`` where it is relative; one inside of another file is a
    ``StoredImage``. Raises ``DataError`` for everything else.
    """
    if not isinstance(value, str) or not value:
        raise wrong(where, field, value, "the path of an image")
    if isinstance(value, StoredImage):
        return value
    if value.startswith("data:image/"):
        return linked_image(value, field, where, image_root)
    return _in_folder(image_root, value) if image_root is not None else value


def linked_image(value: Any, field: str, where: object, image_root: Path | None) -> str:
    """A path, or base64 as ``data:image/png;base64,...``."""
    if isinstance(value, StoredImage) or not isinstance(value, str):
        return image_path(value, field, where, image_root)
    if value.startswith(("http://", "https://")):
        raise wrong(where, field, value, "a path, or data:image/...;base64,...: nothing is downloaded")
    if not value.startswith("data:"):
        return image_path(value.removeprefix("file://"), field, where, image_root)
    head, separator, text = value.partition(",")
    if not separator or not head.endswith(";base64"):
        raise wrong(where, field, value, "data:image/...;base64,...")
    try:
        return StoredImage(f"{_short(where)}: {field}", base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError) as error:
        raise wrong(where, field, value, "valid base64") from error


def _short(where: object) -> object:
    """A position without counting lines: it would be done for every image."""
    path, offset = getattr(where, "path", None), getattr(where, "offset", None)
    return where if path is None else f"{path.name}, byte {offset}"


def _in_folder(folder: Path, name: str) -> str:
    """``str(folder / name)``, for which pathlib needs five times as long."""
    prefix = str(folder)
    return f"{prefix}/{name}" if _UNCHANGED.fullmatch(name) and len(prefix) > 1 else str(folder / name)
