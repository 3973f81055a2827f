"""What an inferencer is asked, and what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from PIL import Image
from torch import Tensor

from unigen_ds.data.samples import Loaded

Kind = Literal["text", "image", "text and image"]
BOTH: Kind = "text and image"
"""One answer with a text and a picture."""


@dataclass(frozen=True)
class Generated:
    """The results: the text (the thoughts, before a picture; '' if none) and the pictures."""

    text: str
    images: list[Image.Image]
    parts: list[str | Image.Image] = field(default_factory=list)
    """Texts and pictures in the order in which they were made, where several were requested (``max_parts``)."""


@dataclass(frozen=True)
class Request:
    """The part of a record before an answer, as in training, which a model is to give (``complete``)."""

    prompt: Sequence[Loaded]
    wanted: Kind
    seed: int
    """Of every random number of the answer."""
    begin: Sequence[int] = ()
    """Of a text: ids that it begins with, one at least. They are not part of the answer."""
    size: tuple[int, int] | None = None
    """Of a picture: (height, width) in pixels."""
    picture_first: bool = False
    """Of a text and a picture: which of them is made first, and seen by the other."""


def to_picture(image: Tensor) -> Image.Image:
    """``[C, H, W]`` in [-1, 1] -> 8 bits, truncated as in the public code of BAGEL."""
    pixels = (image.float() * 0.5 + 0.5).clamp(0, 1).mul(255).to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
