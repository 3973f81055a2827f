"""The base of log writers, which show metrics besides ``metrics.jsonl``. Rank 0 only, never collective.

A writer may fail in any way, at any time: it is then disabled with one warning and training continues. The JSON lines
are the record; a writer is a view of it. mmengine's class names and arguments are kept, so its configs work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from PIL.Image import Image

from unigen_ds.core.log import logger


class Writer:
    """Base of all writers. ``SafeWriter`` calls it, and catches what it raises."""

    package = ""
    """What to install with ``pip install`` when its package is missing."""

    def open(self, *, work_dir: Path, config: Mapping[str, Any], run_id: str | None, updates: int) -> str | None:
        """Start. ``run_id`` is what an earlier start of this run returned; ``updates`` the progress."""
        raise NotImplementedError

    def write(self, record: Mapping[str, Any], *, update: int) -> None:
        """Log the numbers of one record."""
        raise NotImplementedError

    def image(self, name: str, picture: Image, *, update: int) -> None:
        """Show a picture. A writer that shows none does nothing."""

    def close(self) -> None:
        """Flush and end."""


class SafeWriter:
    """Runs a writer; its first failure is one warning, after which it is not called again. Training is not affected."""

    def __init__(self, writer: Writer) -> None:
        self._writer: Writer | None = writer
        self.name = type(writer).__name__
        self.run_id: str | None = None

    def open(self, *, work_dir: Path, config: Mapping[str, Any], updates: int) -> None:
        """Start the writer, with the run id that ``run_id`` holds."""

        def start(writer: Writer) -> None:
            self.run_id = writer.open(work_dir=work_dir, config=config, run_id=self.run_id, updates=updates)

        self._guarded(start)

    def write(self, record: Mapping[str, Any], *, update: int) -> None:
        self._guarded(lambda writer: writer.write(record, update=update))

    def image(self, name: str, picture: Image, *, update: int) -> None:
        self._guarded(lambda writer: writer.image(name, picture, update=update))

    def close(self) -> None:
        self._guarded(lambda writer: writer.close())

    def _guarded(self, action: Callable[[Writer], None]) -> None:
        if self._writer is None:
            return
        try:
            action(self._writer)
        except ImportError as error:
            logger().warning(
                "%s is disabled: %s. Remedy: pip install %s", self.name, error, self._writer.package or "what it needs"
            )
            self._writer = None
        except Exception as error:  # whatever a dashboard does wrong must not end a training run
            logger().warning(
                "%s is disabled, training continues: %s: %s", self.name, type(error).__name__, error or "no message"
            )
            self._writer = None


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """What a dashboard can draw: numbers and truth values; texts, nulls and lists are left out."""
    return {name: float(value) for name, value in record.items() if isinstance(value, (bool, int, float))}
