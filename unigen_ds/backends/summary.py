"""Bytes and sharding units in an engine's log line: consecutive equal ranks and numbered names become one entry."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def bytes_of_ranks(held: Sequence[float], *, whole: float) -> str:
    """The bytes of every rank; consecutive ranks with the same number are named once: ``ranks 0-3: 1,024 (25.0 %)``."""
    found: list[str] = []
    for first in (i for i, value in enumerate(held) if i == 0 or held[i - 1] != value):
        last = next((i - 1 for i in range(first, len(held)) if held[i] != held[first]), len(held) - 1)
        ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
        found.append(f"{ranks}: {held[first]:,.0f} ({100 * held[first] / max(whole, 1):.1f} %)")
    return ", ".join(found)


def runs_of_names(names: Iterable[str]) -> list[str]:
    """Names that differ only in one number, as one: ``layers.0``, ``layers.1``, ``layers.2`` -> ``layers.0-2``."""
    found: list[tuple[str, int | None, int | None, str]] = []
    for name in names:
        before, number, after = _LAST_NUMBER.fullmatch(name).groups()  # type: ignore[union-attr]
        at = int(number) if number else None
        if found and at is not None and found[-1][0] == before and found[-1][2] == at - 1 and found[-1][3] == after:
            found[-1] = (before, found[-1][1], at, after)
        else:
            found.append((before, at, at, after))
    return [
        before + ("" if first is None else str(first) if first == last else f"{first}-{last}") + after
        for before, first, last, after in found
    ]


_LAST_NUMBER = re.compile(r"(.*?)(?:(?<=\.)(\d+)(?=\.|$))?((?:\.\D[^.]*)*)")
