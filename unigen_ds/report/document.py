"""A page from its template, one HTML file that loads nothing; and its filters: values as text for people."""

from __future__ import annotations

import base64
import json
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from unigen_ds.core.errors import ConfigError
from unigen_ds.system.files import write_text_atomic


class TableCell(NamedTuple):
    """A value of a table that is displayed in another way than its column: the kinds are in ``macros.html.j2``."""

    text: str
    kind: str = ""
    note: str = ""


@cache
def _environment() -> jinja2.Environment:
    """Everything that a template prints is escaped, and a name that it does not have is an error."""
    folder = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder / "templates", folder]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else printable(value),
    )
    environment.filters |= {
        "count": group_digits, "number": number_text, "percent": percent, "plural": plural, "seconds": seconds_text,
        "time_of": time_of, "value": value_text, "script_json": _script_json,
    }  # fmt: skip
    environment.tests["long"] = lambda value: any(len(word) > 24 for word in str(value).split())  # may be broken
    return environment


def _script_json(value: Any) -> Markup:
    """A value for ``<script type="application/json">``: no text of it can end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def document_text(template: str, *, every_s: float | None = None, **values: Any) -> str:
    """A page. ``every_s``: how often, in seconds, it asks its server for the present one; None: it is a file."""
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M")
    return _environment().get_template(template).render(**values, now=now, every_s=every_s)


def write_document(out: Path, text: str) -> Path:
    """Write a page. Raises ``ConfigError`` where ``out`` cannot be written."""
    try:
        write_text_atomic(out, text)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error}") from error
    return out


def data_uri(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def printable(value: object) -> str:
    """Text that a UTF-8 file can hold: lone surrogates and control characters are replaced."""
    text = str(value).encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(c if c in "\n\t" or (c >= " " and c != "\x7f") else "\ufffd" for c in text)


def value_text(value: object) -> str:
    """A value of JSON: numbers short, text as it is."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, float):
        return number_text(value)
    if isinstance(value, int):
        return group_digits(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def number_text(value: float | None) -> str:
    """Four significant digits; whole numbers from 10,000 on with separators."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    if abs(value) >= 1e15 or abs(value) < 1e-4:
        return f"{value:.3g}"
    return group_digits(value) if abs(value) >= 1e4 else f"{value:.4g}"


def group_digits(value: float | None) -> str:
    """A whole number with separators."""
    return "–" if value is None else f"{round(value):,}"


def seconds_text(seconds: float | None) -> str:
    """``0.42 s``, ``12.3 s``, ``4 min 05 s``, ``51 h 12 min``."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def plural(count: int, one: str, many: str | None = None) -> str:
    """``1 line``, ``1,204 lines``."""
    return f"{group_digits(count)} {one if count == 1 else many or one + 's'}"


def time_of(value: object) -> datetime | None:
    """An ISO time in UTC; None for anything else."""
    try:
        return datetime.fromisoformat(str(value)).astimezone(timezone.utc)
    except (ValueError, OverflowError):
        return None
