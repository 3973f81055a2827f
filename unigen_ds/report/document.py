"""A page from its template: one HTML file with style and script inside of it; nothing is loaded from elsewhere."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from unigen_ds.core.errors import ConfigError
from unigen_ds.report.value_formats import FILTERS, has_long_word, printable
from unigen_ds.system.files import temporary_beside, write_text_atomic


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
    environment.filters |= {**FILTERS, "script_json": _script_json}
    environment.tests["long"] = has_long_word
    return environment


def _script_json(value: Any) -> Markup:
    """A value for ``<script type="application/json">``: no text of it can end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def write_document(out: Path, template: str, **values: Any) -> Path:
    """Write a page. Raises ``ConfigError`` where ``out`` cannot be written."""
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M")
    text = _environment().get_template(template).render(**values, now=now)
    try:
        write_text_atomic(out, text)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error}") from error
    return out


def check_writable(out: Path) -> None:
    """Raise ``ConfigError`` where a file cannot be written there: before the work of making it."""
    allowed, folder = "a file in a folder that exists", out.absolute().parent
    try:
        if out.is_dir():
            raise ConfigError(f"{out} cannot be written: it is a folder", allowed=allowed)
        if not folder.is_dir():
            raise ConfigError(f"{out} cannot be written: there is no folder {folder}", allowed=allowed)
        trial = temporary_beside(out, "tmp")
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}", allowed=allowed) from error
