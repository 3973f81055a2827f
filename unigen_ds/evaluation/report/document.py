"""A complete HTML document: style and script are inside of it, nothing is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from unigen_ds.core.errors import ConfigError
from unigen_ds.core.files import temporary_beside, write_text_atomic
from unigen_ds.evaluation.report.markup import Html, join, tag


def document(title: str, header: Html, main: Sequence[object], source: str, *, styles: Sequence[str] = ()) -> str:
    """The page as text. ``source``: what it was made of, for its last line; ``styles``: further files of this folder.

    A part of ``main`` may be anything that ``markup.join`` accepts.
    """
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M")
    page = tag(
        "html",
        tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("title", title),
            tag("style", Html("".join(map(_asset, ("style.css", *styles))))),
        ),
        tag(
            "body",
            header,
            tag("main", join(main)),
            tag("footer", f"Written by unigen_ds on {now} UTC from {source}"),
            tag("script", Html(_asset("script.js"))),
        ),
        lang="en",
    )
    return f"<!doctype html>\n{page}\n"


def write_document(out: Path, text: str) -> Path:
    """Raises ``ConfigError`` where ``out`` cannot be written."""
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


def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
