"""Append-only JSON lines that survive kills: ``metrics.jsonl``, ``ledger.jsonl``, ``skipped_samples.jsonl``.

A file is never rewritten. A resume appends ``{"event": "resume", "updates": n, ...}``; that line voids every earlier
line of an update beyond ``n``, because those updates run again. ``read_lines`` is the one place that applies the rule.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"


class JsonLines:
    """Appends a JSON object per line. Each is written in one call, so a kill leaves at most one partial last line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = path.exists() and path.stat().st_size > 0 and not _ends_with_newline(path)
        self._stream = path.open("a", encoding="utf-8")
        if torn:  # a kill cut the last line: end it, so that the next line stands alone
            self._stream.write("\n")

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record; non-finite floats become null, which JSON has no word for."""
        self._stream.write(json.dumps(_plain(record), allow_nan=False) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as stream:
        stream.seek(-1, 2)
        return stream.read(1) == b"\n"


def read_lines(path: Path, *, key: str = "update") -> list[dict[str, Any]]:
    """The lines that count: every resume event voids earlier lines beyond its position; torn lines are passed over.

    ``key`` names the field that holds a line's update number (``update`` in ``metrics.jsonl`` and ``ledger.jsonl``).
    Resume events themselves are left out.
    """
    kept: list[dict[str, Any]] = []
    if not path.exists():
        return kept
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if not isinstance(line, dict):
            continue
        if line.get("event") == "resume":
            kept = [k for k in kept if key not in k or k[key] <= line["updates"]]
        else:
            kept.append(line)
    return kept
