"""What an inferencer returns."""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image


@dataclass(frozen=True)
class Generated:
    """What came out: the text (the thoughts, before a picture; '' if none) and the pictures."""

    text: str
    images: list[Image.Image]
