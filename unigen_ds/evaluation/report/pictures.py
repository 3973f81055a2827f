"""Preview pictures inside the page, as data URIs, within a limit of bytes."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from PIL import Image

from unigen_ds.evaluation.report.markup import Html, grouped, plural, tag
from unigen_ds.evaluation.report.reading import WorkDir

WIDEST = 900
"""Pixels; wider pictures are reduced, and their caption states it."""
T = TypeVar("T")
_OWN = {"curves.png"}


def strip(run: WorkDir, *, budget: int) -> tuple[Html | None, list[str]]:
    """The previews over time and other pictures of the work dir, at most ``budget`` bytes; and notes.

    Where they do not fit, those that are shown are spread evenly, with the first and the last.
    """
    others = [(None, file) for file in sorted(run.path.glob("*.png")) if file.name not in _OWN]
    previews: list[tuple[int | None, Path]] = [*run.previews, *others]
    notes: list[str] = []
    figures: list[Html] = []
    encoded: list[tuple[int | None, Path, str, str]] = []
    damaged = 0
    candidates = previews
    sizes = [_size(file) for _, file in previews]
    if sizes and sum(sizes) > budget:
        fitting = int(len(previews) * budget / sum(sizes))
        candidates = spread(previews, fitting)
    used = 0
    for update, file in candidates:
        try:
            content, note = _png(file)
        except Exception as error:  # a picture that PIL cannot read: many kinds of errors
            damaged += 1
            notes.append(f"{file.name} cannot be shown: {type(error).__name__}: {error}"[:300])
            continue
        if used + len(content) > budget:
            continue
        used += len(content)
        encoded.append((update, file, base64.b64encode(content).decode(), note))
    for update, file, text, note in encoded:
        title = file.name if update is None else f"update {grouped(update)}"
        picture = tag("img", src=f"data:image/png;base64,{text}", alt=f"{title} of {run.name}")
        figures.append(tag("figure", picture, tag("figcaption", f"{title}{note}")))
    left = len(previews) - len(encoded) - damaged
    if left:
        notes.append(
            f"{plural(left, 'picture')} of {grouped(len(previews))} left out: together they are larger than"
            f" {budget / 2**20:.3g} MiB (--max-pictures-mib)."
        )
    return (tag("div", *figures, class_="strip") if figures else None), notes


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
