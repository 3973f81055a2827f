"""Lines of ``metrics.jsonl`` as values: which count, and of which update."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

Line = dict[str, Any]


def number(value: object) -> float | None:
    """Return a finite number as float, and None for everything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e300 < value < 1e300:
        return None
    return float(value)


def lines_of_updates(lines: Iterable[Line]) -> list[Line]:
    """The last line of each update, in the order of updates."""
    of_updates = (one for one in lines if "event" not in one and "loss" in one and is_count(one.get("update")))
    latest = {line["update"]: line for line in of_updates}
    return [latest[update] for update in sorted(latest)]


def validation_losses(keys: Iterable[str]) -> list[str]:
    """Those of the keys that are the whole loss of a set: ``val/loss``, or ``val/<set>/loss`` of each of several."""
    return [key for key in dict.fromkeys(keys) if re.fullmatch(r"val/([^/]+/)?loss", key)]


def is_count(value: object) -> bool:
    """Whether a value is a number of updates."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def well_formed(lines: Iterable[Line]) -> tuple[list[Line], int]:
    """Return the lines whose counts are counts, and the number of all others."""
    lines = list(lines)
    good = [
        one for one in lines if is_count(one.get("updates") if one.get("event") == "resume" else one.get("update", 0))
    ]
    return good, len(lines) - len(good)
