"""Pictures inside a page, as data URIs."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from PIL import Image

from unigen_ds.report.reading import WorkDir
from unigen_ds.report.value_formats import grouped, plural

WIDEST = 900
"""Pixels; wider pictures are reduced, and their caption states it."""
T = TypeVar("T")
_OWN = {"curves.png"}


def data_uri(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def previews_of(run: WorkDir, *, budget: int) -> tuple[list[tuple[str, str, str]], list[str]]:
    """(title, note, data URI) of the previews over time and other pictures of the work dir, at most ``budget`` bytes;
    and notes of what is missing. Where they do not fit, those that remain are spread evenly, with the first and the
    last.
    """
    others = [(None, file) for file in sorted(run.path.glob("*.png")) if file.name not in _OWN]
    pictures: list[tuple[int | None, Path]] = [*run.previews, *others]
    total = sum(_size(file) for _, file in pictures)
    candidates = spread(pictures, int(len(pictures) * budget / total)) if total > budget else pictures
    figures, notes, used = [], [], 0
    for update, file in candidates:
        try:
            content, reduction = _png(file)
        except Exception as error:  # a picture that PIL cannot read: many kinds of errors
            notes.append(f"{file.name} cannot be shown: {type(error).__name__}: {error}"[:300])
            continue
        if used + len(content) <= budget:
            used += len(content)
            title = file.name if update is None else f"update {grouped(update)}"
            figures.append((title, reduction, data_uri(content)))
    if missing := len(pictures) - len(figures) - len(notes):
        notes.append(
            f"{plural(missing, 'picture')} of {grouped(len(pictures))} left out: together they are larger than"
            f" {budget / 2**20:.3g} MiB (--max-pictures-mib)."
        )
    return figures, notes


def spread(items: Sequence[T], count: int) -> list[T]:
    """``count`` items, evenly, with the last one, and with the first where there are two."""
    if count >= len(items):
        return [*items]
    if count < 2:
        return [*items[-1:]] if count == 1 else []
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _png(file: Path) -> tuple[bytes, str]:
    """The content as PNG, and a note where it was reduced."""
    with Image.open(file, formats=["PNG"]) as picture:
        width, height = picture.size
        picture.load()
        if width <= WIDEST:
            return file.read_bytes(), ""
        small = picture.resize((WIDEST, max(1, round(height * WIDEST / width))), Image.Resampling.LANCZOS)
    target = io.BytesIO()
    small.save(target, format="PNG", optimize=True)
    return target.getvalue(), f" (reduced from {width} × {height} pixels)"
