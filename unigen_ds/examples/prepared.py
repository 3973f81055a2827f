"""The files of an example: in the format of a user's own data, in a folder that is complete or not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from unigen_ds.core.errors import ConfigError
from unigen_ds.system.files import delete_inside, rename_into_place, temporary_beside

_MARKER = "complete"


def prepared(root: Path, write: Callable[[Path], None], *, note: str, argument: str) -> Path:
    """Call ``write`` with a folder that becomes ``root``, unless ``root`` is there; returns ``root``.

    Everything is made in a folder beside it, which is renamed: the first process succeeds, and a partial folder is
    never visible. ``note``: the content of the file that marks a complete one. Raises ``ConfigError`` that names
    ``argument`` where ``root`` holds something else, or files with another note.
    """
    if (root / _MARKER).exists():
        _check_note(root, note, argument)
        return root
    occupied = root.exists() and (not root.is_dir() or any(root.iterdir()))
    if occupied and not (root / _MARKER).exists():  # checked again: another process may have just finished
        raise ConfigError(f"{argument} {root} holds something else", remedy="name a folder that does not exist")
    if occupied:
        return root
    root.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(root, "tmp")
    temporary.mkdir()
    try:
        write(temporary)
        (temporary / _MARKER).write_text(f"{note}\n", encoding="utf-8")
        rename_into_place(temporary, root, durable=False)
    except OSError:
        if not (root / _MARKER).exists():  # else another process was first
            raise
    finally:
        with suppress(OSError):
            delete_inside(temporary, root.parent)
    return root


def _check_note(root: Path, note: str, argument: str) -> None:
    found = (root / _MARKER).read_text(encoding="utf-8").strip()
    if found != note:
        raise ConfigError(
            f"{argument} {root} holds the files of another version ({found}; this one has {note})",
            remedy="delete the folder, or name one that does not exist",
        )


def record(*turns: tuple[Literal["user", "assistant"], Literal["text", "image"], str]) -> str:
    """A line of JSONL: a conversation of (role, kind, text or path of the image)."""
    listed = [
        {"role": role, "type": kind, ("content" if kind == "text" else "image_path"): value}
        for role, kind, value in turns
    ]
    return json.dumps({"conversations": listed}) + "\n"
