"""``timeline.jsonl``: when a run started, with what, where its time was spent, and how each start ended.

A line at each start, at most one every ten seconds and one at each save while it trains, and one at the end. A kill
leaves the start without its last line. Unlike ``metrics.jsonl`` no line is ever void: repeated work is part of what the
file is for. Rank 0's time; about 400 bytes a line, no collective and no synchronisation.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from unigen_ds.checkpoint.manifest import current_versions
from unigen_ds.core import dist, machine, startup
from unigen_ds.core.json_values import json_values
from unigen_ds.core.metrics import TIMELINE_FILE
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.hooks.journal import Journal

EVERY_S = 10.0
_SHOWN = 500
"""Characters of an error that are kept."""


class TimelineHook(Hook):
    """The runner adds it. It runs after the checkpoint hook: the line of a saved update has the time of its save."""

    name = "timeline"

    def __init__(self) -> None:
        self._journal = Journal(TIMELINE_FILE)
        self._checkpoint: str | None = None
        self._findings: Sequence[Mapping[str, Any]] = ()
        self._began = self._written = 0.0
        self._before: dict[str, float] = {}
        self._started = self._saved = False

    def after_load_checkpoint(self, run: Run, manifest: Mapping[str, Any]) -> None:
        self._checkpoint, self._findings = manifest.get("path"), manifest.get("findings", ())

    def before_train(self, run: Run) -> None:
        waited = startup.seconds()
        self._began = self._written = time.perf_counter()
        self._before = dict(run.clock.totals)
        self._started = True
        if not dist.is_main():
            return
        record = {
            "event": "start",
            **_now(run),
            "start_up": waited,
            "checkpoint": self._checkpoint,
            "sequences": run.progress.sequences,
            "sequences_per_epoch": run.ruler.sequences_per_epoch,
            "total_sequences": run.total_sequences,
            "geometry": asdict(run.geometry),
            "topology": run.backend.topology(),
            "findings": self._findings,
            "machine": machine.description(),
            "git": machine.git_commits(),
            "versions": current_versions(),
            "config": run.config,
        }
        self._journal.append(run, json_values(record))

    def after_update(self, run: Run, result: UpdateResult) -> None:
        if self._saved or time.perf_counter() - self._written >= EVERY_S:
            self._write(run, {"event": "time"})

    def before_save_checkpoint(self, run: Run, metrics: dict[str, float]) -> None:
        self._saved = True

    def after_run(self, run: Run) -> None:
        self._end(run, "complete" if run.finished else "stopped")

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._end(run, f"{type(error).__name__}: {error}"[:_SHOWN])

    def _end(self, run: Run, reason: str) -> None:
        if self._started:  # else no update was made: there is no start line to end
            self._write(run, {"event": "end", "reason": reason})
        self._journal.close()

    def _write(self, run: Run, record: Mapping[str, Any]) -> None:
        """Seconds are those since the start line; ``sections`` are the parts of it that the clock knows."""
        self._written, self._saved = time.perf_counter(), False
        spent = {name: total - self._before.get(name, 0.0) for name, total in run.clock.totals.items()}
        sections = {name: round(seconds, 4) for name, seconds in spent.items() if seconds >= 5e-5}
        self._journal.append(
            run, {**record, **_now(run), "seconds": round(self._written - self._began, 4), "sections": sections}
        )


def _now(run: Run) -> dict[str, Any]:
    return {"time": datetime.now(timezone.utc).isoformat(timespec="seconds"), "update": run.progress.updates}
