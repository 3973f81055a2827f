"""JSON lines in a file of the user's choice, as ``metrics.jsonl``, which the logger hook always writes, has them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unigen_ds.config.registry import WRITERS
from unigen_ds.system.journals import JsonLines
from unigen_ds.tracking.writer import Writer, own_file


@WRITERS.register_module()
class JsonlVisBackend(Writer):
    """One object per line in ``<save_dir>/<run name>.jsonl``; a resume voids lines that it writes again by an event.

    Lines of updates have no ``event``; others have that of ``metrics.jsonl``, such as ``evaluation``.
    ``unigen_ds.system.journals.read_lines`` returns the lines that count. Each run has a file: where another run has
    the name, a number is appended.

    Args:
        save_dir: folder of the file.
    """

    purges = True

    def __init__(self, *, save_dir: str) -> None:
        self._save_dir = save_dir
        self._lines: JsonLines | None = None

    def kept_in(self) -> Mapping[str, Any]:
        return {"save_dir": self._save_dir}

    def open(self, *, work_dir: Path, config: Mapping[str, Any], run_id: str | None, updates: int) -> str | None:
        name = run_id or own_file(Path(self._save_dir), self.branch.name, suffix=".jsonl")
        path = Path(self._save_dir) / f"{name}.jsonl"
        self._lines = JsonLines(path)
        if path.exists() and path.stat().st_size:
            self._lines.append({"event": "resume", "updates": updates})
        return name

    def write(self, record: Mapping[str, Any], *, update: int) -> None:
        assert self._lines is not None
        self._lines.append({"update": update, **record} if "update" not in record else record)

    def write_event(self, record: Mapping[str, Any], *, update: int, event: str) -> None:
        self.write({"event": event, "update": update, **record}, update=update)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
