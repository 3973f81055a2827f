"""Append-only JSON lines that survive kills: ``metrics.jsonl``, ``ledger.jsonl``, ``skipped_samples.jsonl``.

A file is never rewritten. A resume appends ``{"event": "resume", "updates": n, ...}``; that line voids every earlier
line of an update beyond ``n``, because those updates run again. Only ``read_lines`` applies the rule.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from unigen_ds.core.json_values import json_values
from unigen_ds.system.files import fsync_path

METRICS_FILE, LEDGER_FILE, SKIPPED_FILE = "metrics.jsonl", "ledger.jsonl", "skipped_samples.jsonl"
TIMELINE_FILE, PROFILE_FILE = "timeline.jsonl", "profile/table.json"


class JsonLines:
    """Appends JSON lines; a kill leaves one partial at most. What a full disk refuses is kept and written first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pending: list[bytes] = []
        """Lines that could not be written yet."""
        self._descriptor: int | None = None
        self._unsynced = True

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record; NaN and infinity become null. Raises ``OSError`` where it is still pending."""
        plain = json_values(record, lambda one: None if isinstance(one, float) and not math.isfinite(one) else one)
        self.pending.append((json.dumps(plain, allow_nan=False) + "\n").encode())
        self.write_pending()

    def write_pending(self) -> None:
        """Write what could not be written before. Raises ``OSError``; what is left stays pending."""
        while self.pending:
            descriptor = self._open()
            self._unsynced = True
            line, num_written = self.pending[0], 0
            try:
                while num_written < len(line):  # a disk may take a part only
                    num_written += os.write(descriptor, line[num_written:])
            except OSError as error:
                error.filename = str(self.path)
                if num_written:  # no part of a line stays; where that fails, it is ended when the file is opened again
                    with suppress(OSError):
                        os.ftruncate(descriptor, os.fstat(descriptor).st_size - num_written)
                    self.close()
                raise
            del self.pending[0]

    def sync(self) -> None:
        """Have every line on disk, the file's name too. Raises ``OSError`` where a line is still pending."""
        self.write_pending()
        if self._descriptor is not None and self._unsynced:
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                error.filename = str(self.path)
                raise
            fsync_path(self.path.parent)
            self._unsynced = False

    def _open(self) -> int:
        if self._descriptor is None:
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":  # a kill truncated the last line: end it
                self.pending[0] = b"\n" + self.pending[0]
            self._descriptor = descriptor
        return self._descriptor

    def close(self) -> None:
        """Lines that are still pending are lost."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines that count: a resume event, itself left out, voids earlier lines beyond its position; torn ones are
    passed over. A late result is void with the updates before the progress in its ``at``.
    """
    return in_effect(parse_lines(path)[0])


def last_update(path: Path) -> int:
    """Return the progress in updates of a file's last line that has one; 0 without such a line."""
    for line in reversed(parse_lines(path)[0]):
        updates = line.get("updates" if line.get("event") == "resume" else "at", line.get("update"))
        if isinstance(updates, int):
            return updates
    return 0


def parse_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Every JSON object, void ones and resume events too, and the number of damaged lines. No file: no lines."""
    lines: list[dict[str, Any]] = []
    num_damaged = 0
    for text in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else ():
        try:
            line = json.loads(text) if text.strip() else None
        except (ValueError, RecursionError):
            line = text
        if isinstance(line, dict):
            lines.append(line)
        else:
            num_damaged += line is not None
    return lines, num_damaged


def in_effect(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines that no later resume event voids, without the events."""
    valid: list[dict[str, Any]] = []
    last = math.inf
    for line in reversed(lines):
        if line.get("event") == "resume":
            last = min(last, line["updates"])
        elif "update" not in line or line.get("at", line["update"]) <= last:
            valid.append(line)
    return valid[::-1]


def sample_digest(sample_ids: Iterable[str]) -> str:
    """Return the digest of an update's samples in the ledger: BLAKE2b-64 of their ids in order, hex."""
    return hashlib.blake2b("\n".join(sample_ids).encode(), digest_size=8).hexdigest()
