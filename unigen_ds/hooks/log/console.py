"""Progress for the user: one live progress line on a terminal, plain log lines everywhere else. Rank 0 only.

The live line is redrawn at log time only; warnings of the logger scroll above it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

from rich.console import Console as RichOutput
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as RichBar

from unigen_ds.system.log import logger


class Console(Protocol):
    """Shows records of the logger."""

    def show(self, record: Mapping[str, Any], *, summary: Mapping[str, float], total_sequences: float) -> None:
        """``record`` is a line of ``metrics.jsonl``, ``summary`` the timer's."""
        ...

    def close(self) -> None: ...


def make_console() -> Console:
    """A live line when standard error is a terminal, else log lines."""
    return LiveConsole() if sys.stderr.isatty() else PlainConsole()


def loss_names(record: Mapping[str, Any]) -> list[str]:
    """``loss``, and ``loss/<term>`` of each term, whatever the family calls them."""
    return [name for name in record if name == "loss" or (name.startswith("loss/") and name.count("/") == 1)]


def progress_line(record: Mapping[str, Any], *, summary: Mapping[str, float]) -> str:
    """Losses, learning rate, gradient norm, rates, time shares, time to go and MFU, in one line."""
    parts = [f"update {record['update']}", f"iteration {record['iteration']}", f"epoch {record['epoch']:.3f}"]
    parts += [
        f"{name} {record[name]:.4g}"
        for name in (*loss_names(record), "lr", "grad_norm")
        if record.get(name) is not None
    ]
    if not record["applied"]:
        parts.append("NOT APPLIED")
    if summary:
        parts.append(f"{summary['tokens_per_second']:.0f} tokens/s")
        shares = (("data", "data"), ("fwd+bwd", "forward_backward"), ("comm", "communication"), ("step", "step"),
                  ("other", "other"))  # fmt: skip
        parts.append("time " + " ".join(f"{label} {summary[f'share/{key}']:.0%}" for label, key in shares))
        if summary["eta"] < float("inf"):
            parts.append(f"ETA {timedelta(seconds=round(summary['eta']))}")
    if "mfu" in record:
        parts.append(f"MFU {record['mfu']:.1%}")
    parts.append(f"memory {record['memory']:.0f} MiB")
    return "  ".join(parts)


class PlainConsole:
    """Log lines: files, pipes, batch systems."""

    def show(self, record: Mapping[str, Any], *, summary: Mapping[str, float], total_sequences: float) -> None:
        logger().info("%s", progress_line(record, summary=summary))

    def close(self) -> None:
        """Nothing is open."""


class LiveConsole:
    """A bar over the sequences of the run and the description beside it."""

    def __init__(self) -> None:
        self._progress = RichBar(
            TextColumn("{task.percentage:>5.1f} %"),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            console=RichOutput(stderr=True),
            auto_refresh=False,
        )
        self._task: TaskID | None = None
        self._redirected: list[tuple[logging.StreamHandler[Any], Any]] = []

    def show(self, record: Mapping[str, Any], *, summary: Mapping[str, float], total_sequences: float) -> None:
        if self._task is None:
            self._start()
        assert self._task is not None
        self._progress.update(
            self._task,
            total=total_sequences if total_sequences < float("inf") else None,
            completed=record["sequences"],
            description=progress_line(record, summary=summary),
            refresh=True,
        )

    def _start(self) -> None:
        terminal = sys.stderr
        self._progress.start()
        self._task = self._progress.add_task("", total=None)
        # rich replaces sys.stderr by a proxy that prints above the bar; the logger's handlers still hold the old one.
        for handler in logger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is terminal:
                handler.setStream(sys.stderr)
                self._redirected.append((handler, terminal))

    def close(self) -> None:
        for handler, stream in self._redirected:
            handler.setStream(stream)
        self._redirected.clear()
        if self._task is not None:
            self._progress.stop()
            self._task = None
