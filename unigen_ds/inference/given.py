"""What a user passes to ``unified_generate``: pictures of several kinds, and texts and pictures in their order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge
from PIL import Image

from unigen_ds.core.errors import ConfigError
from unigen_ds.core.values import Allowed, shown

Picture = Image.Image | str | Path | np.ndarray
"""A PIL picture, a path, or a uint8 array ``[height, width, 3]`` or ``[height, width]``."""
Size = Annotated[tuple[int, int] | None, Allowed("(height, width) in pixels, or None")]
MaxLength = Annotated[int, Ge(1)]
MaxParts = Annotated[int, Ge(0)]

_PICTURE = "a path, a PIL picture, or a uint8 array [height, width, 3] or [height, width]"


def pictures(given: Any, *, where: str = "unified_generate.images") -> list[Image.Image | Path]:
    """One picture alone, or several. Raises ``ConfigError`` for anything else."""
    several = given if isinstance(given, (list, tuple)) else [given]
    return [_picture(one, where, allowed=f"{_PICTURE}; one alone or a list of them") for one in several]


def in_order(given: Sequence[Any], *, where: str = "unified_generate.parts") -> list[str | Image.Image | Path]:
    """Texts (``str``) and pictures as they follow each other. A path is a ``Path`` here.

    Raises ``ConfigError`` for what is neither, and for a text that is the name of a file.
    """
    for one in given:
        if isinstance(one, str) and os.path.isfile(one):
            raise ConfigError(f"{where} has the text {one!r}, which is a file", remedy=f"pathlib.Path({one!r})")
    allowed = f"a list of texts and pictures; a picture is {_PICTURE.replace('a path', 'a pathlib.Path')}"
    return [one if isinstance(one, str) else _picture(one, where, allowed=allowed) for one in given]


def _picture(one: Any, where: str, *, allowed: str) -> Image.Image | Path:
    if isinstance(one, (Image.Image, Path)):
        return one
    if isinstance(one, str):
        return Path(one)
    if isinstance(one, np.ndarray) and one.dtype == np.uint8 and one.size and one.shape[2:] in ((), (3,)):
        return Image.fromarray(one)
    raise ConfigError(f"{where} is {shown(one)}", allowed=allowed)


def as_file(picture: Image.Image | Path, path: Path) -> Path:
    """Where a picture can be read: its own path, or ``path``."""
    if isinstance(picture, Path):
        return picture
    stored = picture if picture.mode in ("1", "L", "LA", "P", "RGB", "RGBA") else picture.convert("RGB")
    stored.save(path)
    return path
