"""What an inferencer returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from PIL import Image


@dataclass(frozen=True)
class Generated:
    """The results: the text (the thoughts, before a picture; '' if none) and the pictures."""

    text: str
    images: list[Image.Image]
    parts: list[str | Image.Image] = field(default_factory=list)
    """Texts and pictures in the order in which they were made, where several were requested (``max_parts``)."""
