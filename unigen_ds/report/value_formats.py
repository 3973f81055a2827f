"""Values as text for people; the templates use these functions as filters."""

from __future__ import annotations

import json
from datetime import datetime, timezone

_LONG = 24
"""Characters of a word that may be broken in a table."""


def printable(value: object) -> str:
    """Text that a UTF-8 file can hold: lone surrogates and control characters are replaced."""
    text = str(value).encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(c if c in "\n\t" or (c >= " " and c != "\x7f") else "\ufffd" for c in text)


def has_long_word(value: object) -> bool:
    return any(len(word) > _LONG for word in str(value).split())


def value_text(value: object) -> str:
    """A value of JSON: numbers short, text as it is."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, float):
        return number_text(value)
    if isinstance(value, int):
        return grouped(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def number_text(value: float | None) -> str:
    """Four significant digits; whole numbers from 10,000 on with separators."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    if abs(value) >= 1e15 or abs(value) < 1e-4:
        return f"{value:.3g}"
    return grouped(value) if abs(value) >= 1e4 else f"{value:.4g}"


def grouped(value: float | None) -> str:
    """A whole number with separators."""
    return "–" if value is None else f"{round(value):,}"


def seconds_text(seconds: float | None) -> str:
    """``0.42 s``, ``12.3 s``, ``4 min 05 s``, ``3 h 12 min``, ``2 d 04 h``."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24:02d} h"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def plural(count: int, one: str, many: str | None = None) -> str:
    """``1 line``, ``1,204 lines``."""
    return f"{grouped(count)} {one if count == 1 else many or one + 's'}"


def time_of(value: object) -> datetime | None:
    """An ISO time in UTC; None for anything else."""
    try:
        return datetime.fromisoformat(str(value)).astimezone(timezone.utc)
    except (ValueError, OverflowError):
        return None


FILTERS = {
    "count": grouped,
    "number": number_text,
    "percent": percent,
    "plural": plural,
    "seconds": seconds_text,
    "time_of": time_of,
    "value": value_text,
}
"""Name in the templates -> function."""
