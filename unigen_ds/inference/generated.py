"""What an inferencer is asked, and what it returns."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge
from PIL import Image
from torch import Tensor

from unigen_ds.config.values import Choices, format_value
from unigen_ds.core.errors import ConfigError
from unigen_ds.data.samples.sample import LoadedSplit

Kind = Literal["text", "image", "text and image"]
BOTH: Kind = "text and image"
"""One answer with a text and a picture."""


@dataclass(frozen=True)
class Generated:
    """The results: the text (the thoughts, before a picture; '' if none) and the pictures."""

    text: str
    images: list[Image.Image]


@dataclass(frozen=True)
class Request:
    """The part of a record before an answer, as in training, which a model is to give (``complete``)."""

    prompt: Sequence[LoadedSplit]
    wanted: Kind
    seed: int
    """Seed of every random number of the answer."""
    begin: Sequence[int] = ()
    """Ids that a text begins with, one at least. They are not part of the answer."""
    size: tuple[int, int] | None = None
    """(height, width) of a picture in pixels."""
    picture_first: bool = False
    """Whether the picture of a text and a picture is made first; the second is made from the first."""


def to_picture(image: Tensor) -> Image.Image:
    """``[C, H, W]`` in [-1, 1] -> 8 bits, truncated as in the public code of BAGEL."""
    pixels = (image.float() * 0.5 + 0.5).clamp(0, 1).mul(255).to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)


# What a user passes to ``unified_generate``: pictures of several kinds, and texts and pictures in their order.

Picture = Image.Image | str | Path | np.ndarray
"""A PIL picture, a path, or a uint8 array ``[height, width, 3]`` or ``[height, width]``."""
Size = Annotated[tuple[int, int] | None, Choices("(height, width) in pixels, or None")]
MaxLength = Annotated[int, Ge(1)]

_PICTURE = "a path, a PIL picture, or a uint8 array [height, width, 3] or [height, width]"


def one_or_many_pictures(images: Any) -> list[Image.Image | Path]:
    """One picture alone, or several. Raises ``ConfigError`` for anything else."""
    several = images if isinstance(images, (list, tuple)) else [images]
    return [_picture(one, "images", choices=f"{_PICTURE}; one alone or a list of them") for one in several]


def in_order(parts: Sequence[Any]) -> list[str | Image.Image | Path]:
    """Texts (``str``) and pictures (a path: ``Path``) as they follow each other. Raises ``ConfigError`` for anything
    else, and for a text that is the name of a file."""
    for one in parts:
        if isinstance(one, str) and os.path.isfile(one):
            problem = f"unified_generate.parts has the text {one!r}, which is a file"
            raise ConfigError(problem, remedy=f"pathlib.Path({one!r})")
    choices = f"a list of texts and pictures; a picture is {_PICTURE.replace('a path', 'a pathlib.Path')}"
    return [one if isinstance(one, str) else _picture(one, "parts", choices=choices) for one in parts]


def _picture(one: Any, argument: str, *, choices: str) -> Image.Image | Path:
    if isinstance(one, (Image.Image, Path)):
        return one
    if isinstance(one, str):
        return Path(one)
    if isinstance(one, np.ndarray) and one.dtype == np.uint8 and one.size and one.shape[2:] in ((), (3,)):
        return Image.fromarray(one)
    raise ConfigError(f"unified_generate.{argument} is {format_value(one)}", allowed=choices)


def as_file(picture: Image.Image | Path, path: Path) -> Path:
    """Where a picture can be read: its own path, or ``path``."""
    if isinstance(picture, Path):
        return picture
    image = picture if picture.mode in ("1", "L", "LA", "P", "RGB", "RGBA") else picture.convert("RGB")
    image.save(path)
    return path
