"""A contact sheet: pictures in a grid, with a text under each. Pillow alone, with the font that it brings (Latin)."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageDraw, ImageFont

_GAP, _LINE, _LINES = 10, 18, 6


@dataclass(frozen=True)
class Cell:
    """Pictures side by side, none or more, and the text under them."""

    pictures: Sequence[Image.Image]
    text: str
    wrong: bool = False
    """Whether its frame is red."""


def contact_sheet(
    cells: Sequence[Cell], *, columns: int | None = None, title: str = "", side: int = 224
) -> Image.Image:
    """One picture of all cells, in RGB, about square where ``columns`` is None. A picture is shown ``side`` pixels
    large, a small one with its own pixels visible; a text of too many lines ends with an ellipsis."""
    widest = max([1, *(len(cell.pictures) for cell in cells)])
    columns = columns or max(1, math.ceil(math.sqrt(len(cells) / widest)))
    font = ImageFont.load_default(14)
    width = widest * (side + _GAP) + _GAP
    images = [_draw_cell(cell, font, width, side) for cell in cells]
    rows = [range(i, min(i + columns, len(cells))) for i in range(0, len(cells), columns)]
    heights = [max(images[n].height for n in row) for row in rows]
    top = _LINE + _GAP if title else 0
    sheet = Image.new("RGB", (columns * width, top + sum(heights)), "white")
    pen = ImageDraw.Draw(sheet)
    pen.text((_GAP, _GAP // 2), title, fill="black", font=font)
    for row, height in zip(rows, heights, strict=True):
        for column, n in enumerate(row):
            left = column * width
            sheet.paste(images[n], (left, top))
            frame = (left, top, left + width - 1, top + height - 1)
            pen.rectangle(frame, outline="red" if cells[n].wrong else "lightgray")
        top += height
    return sheet


def _draw_cell(cell: Cell, font: Any, width: int, side: int) -> Image.Image:
    """A cell without its frame. A small picture is scaled by a whole factor; long words of the text are broken."""
    pictures = []
    for picture in cell.pictures:
        scale = side / max(picture.size)
        factor, way = (math.floor(scale), Image.Resampling.NEAREST) if scale >= 1 else (scale, Image.Resampling.LANCZOS)
        size = max(1, round(picture.width * factor)), max(1, round(picture.height * factor))
        pictures.append(picture.convert("RGB").resize(size, way))
    characters = max(1, int((width - 2 * _GAP) / font.getlength("0")))
    lines = [line for paragraph in cell.text.splitlines() for line in textwrap.wrap(paragraph, characters)]
    if len(lines) > _LINES:
        lines = [*lines[: _LINES - 1], lines[_LINES - 1][: characters - 3] + "..."]
    below = _GAP + max((picture.height + _GAP // 2 for picture in pictures), default=0)
    image = Image.new("RGB", (width, below + (len(lines) * _LINE + _GAP if lines else 0)), "white")
    for i, picture in enumerate(pictures):
        image.paste(picture, (_GAP + i * (side + _GAP), _GAP))
    pen = ImageDraw.Draw(image)
    for i, text in enumerate(lines):
        pen.text((_GAP, below + i * _LINE), text, fill="black", font=font)
    return image
