"""JSON lines in a file of the user's choice, as ``metrics.jsonl``, which the logger hook always writes, has them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unigen_ds.core.files import make_directory
from unigen_ds.core.metrics import JsonLines
from unigen_ds.core.registry import WRITERS
from unigen_ds.tracking.writer import Writer


@WRITERS.register_module()
class JsonlVisBackend(Writer):
    """One object per line in ``<save_dir>/<run name>.jsonl``; a resume voids lines that it writes again by an event.

    ``unigen_ds.core.metrics.read_lines`` returns the lines that count.

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
        name = self.run_name.name if self.run_name else work_dir.name
        path = Path(self._save_dir) / f"{name}.jsonl"
        make_directory(path.parent)
        self._lines = JsonLines(path)
        if path.exists() and path.stat().st_size:
            self._lines.append({"event": "resume", "updates": updates})
        return None

    def write(self, record: Mapping[str, Any], *, update: int) -> None:
        assert self._lines is not None
        self._lines.append({"update": update, **record})

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
