"""HTML from values: ``tag('td', value)`` escapes everything that is not ``Html`` already."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class Html(str):
    """Text that is HTML: made by ``tag`` and ``join`` alone, from escaped parts."""

    __slots__ = ()


_LONG = 24
"""Characters of a word that may be broken in a table."""
_VOID = {"img", "meta", "br", "line", "path", "rect"}


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """``<name attributes>children</name>``. ``class_`` is ``class``, ``data_x`` is ``data-x``; None leaves one out."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    opening = "".join(f' {key}="{html.escape(str(value), quote=True)}"' for key, value in given.items())
    if name in _VOID:
        return Html(f"<{name}{opening}>" if name in ("img", "meta", "br") else f"<{name}{opening}/>")
    return Html(f"<{name}{opening}>{join(children)}</{name}>")


def join(children: Iterable[object]) -> Html:
    """Children one after another; None is left out, sequences are joined."""
    parts = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Html):
            parts.append(str(child))
        elif isinstance(child, (list, tuple)):
            parts.append(str(join(child)))
        else:
            parts.append(html.escape(printable(child), quote=True))
    return Html("".join(parts))


def printable(value: object) -> str:
    """Text that a UTF-8 file can hold: lone surrogates and control characters are replaced."""
    text = str(value).encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(c if c in "\n\t" or (c >= " " and c != "\x7f") else "\ufffd" for c in text)


def script_json(value: Any) -> Html:
    """A value for ``<script type="application/json">``: no text of it can end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Html(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Iterable[int] = ()) -> Html:
    """``numbers``: the columns that are aligned to the right. On a narrow screen each row is a block with its heads."""
    right = set(numbers)

    def cell(index: int, value: object) -> Html:
        long = not isinstance(value, Html) and any(len(word) > _LONG for word in str(value).split())
        css = "n" if index in right else "long" if long else None
        return tag("td", value, class_=css, data_label=heads[index])

    head = tag("tr", *(tag("th", h, scope="col", class_="n" if i in right else None) for i, h in enumerate(heads)))
    body = [tag("tr", *(cell(i, value) for i, value in enumerate(row))) for row in rows]
    dense = "dense" if len(right) >= 3 else None
    return tag("table", tag("thead", head), tag("tbody", *body), class_=dense)


def pairs(values: Mapping[str, object]) -> Html:
    """Names and values as a list of definitions."""
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in values.items()), class_="pairs")


def details(summary: object, *children: object, opened: bool = False) -> Html:
    """A part that is opened by a click."""
    return tag("details", tag("summary", summary), *children, open="" if opened else None)


def value_text(value: object) -> str:
    """A value of JSON for people: numbers short, text as it is."""
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
    if abs(value) >= 1e4:
        return grouped(round(value))
    return f"{value:.4g}"


def grouped(value: int) -> str:
    return f"{value:,}"


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
