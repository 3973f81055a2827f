"""A JSON-lines file of a run, kept by rank 0 over kills and resumes: what ``metrics.jsonl`` and ``ledger.jsonl`` share.

A start writes a resume event wherever older lines exist, so ``core.metrics.read_lines`` can determine which of them are
valid: after a resume, lines beyond its position are void; a fresh start in a used folder voids all. Files are opened at
the first line, so a dry run writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unigen_ds.core import dist
from unigen_ds.core.log import logger
from unigen_ds.core.metrics import JsonLines
from unigen_ds.hooks.base import Run


class Journal:
    """One file in the work dir. Every method may be called on every rank; only rank 0 writes. Nothing is collective."""

    def __init__(self, file_name: str) -> None:
        self._file_name = file_name
        self._lines: JsonLines | None = None
        self._resumed = False
        self._warned = False

    def resume(self, run: Run, manifest: Mapping[str, Any]) -> None:
        """Call from ``after_load_checkpoint``: lines beyond the loaded progress no longer count."""
        self._resumed = True
        self._event(run, checkpoint=manifest.get("path"))

    def start(self, run: Run) -> None:
        """Call from ``before_train``: without a resume, what an earlier run left in this folder no longer counts."""
        path = run.work_dir / self._file_name
        if not self._resumed and dist.is_main() and path.exists() and path.stat().st_size:
            self._event(run, checkpoint=None)

    def _event(self, run: Run, *, checkpoint: object) -> None:
        progress = run.progress
        self.append(
            run,
            {
                "event": "resume",
                "updates": progress.updates,
                "iteration": progress.iteration(run.geometry),
                "sequences": progress.sequences,
                "samples": progress.samples,
                "tokens": progress.tokens,
                "checkpoint": None if checkpoint is None else str(checkpoint),
            },
        )

    def append(self, run: Run, record: Mapping[str, Any]) -> None:
        """Write one line. A full disk is one warning: training continues, and the line is written later."""
        if not dist.is_main():
            return
        if self._lines is None:
            self._lines = JsonLines(run.work_dir / self._file_name)
        try:
            self._lines.append(record)
        except OSError as error:
            if not self._warned:
                logger().warning(
                    "%s cannot be written (%s). Training continues; its lines are kept in memory and written later.",
                    self._lines.path,
                    error,
                )
            self._warned = True
        else:
            self._written()

    def sync(self) -> None:
        """Have all lines on disk: a save calls it first. Raises ``OSError`` where that cannot be."""
        if self._lines is not None:
            self._lines.sync()
            self._written()

    def _written(self) -> None:
        if self._warned:
            logger().info("%s is complete again.", self._file_name)
        self._warned = False

    def close(self) -> None:
        """Close the file; a later line opens it again."""
        if self._lines is None:
            return
        try:
            self._lines.write_pending()
        except OSError as error:
            logger().error("%d lines of %s could not be written: %s", self._lines.num_pending, self._lines.path, error)
        self._lines.close()
        self._lines = None
