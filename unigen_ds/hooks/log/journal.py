"""A JSON-lines file of a run, kept by rank 0 over kills and resumes: what ``metrics.jsonl`` and ``ledger.jsonl`` share.

A start writes a resume event wherever older lines exist, so ``system.journals.read_lines`` can determine which of them
are valid: after a resume, lines beyond its position are void; a fresh start in a used folder voids all. Files are
opened at the first line, so a dry run writes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from unigen_ds.checkpoint.manifest import current_versions
from unigen_ds.config.registry import HOOKS
from unigen_ds.core.json_values import json_values
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.system import clock, dist, machine
from unigen_ds.system.journals import LEDGER_FILE as LEDGER_FILE
from unigen_ds.system.journals import TIMELINE_FILE, JsonLines
from unigen_ds.system.log import logger


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


class JournalHook(Hook):
    """A hook that keeps a journal: lines of a resumed run, and what must be on disk at a save and at the end."""

    def __init__(self, file_name: str) -> None:
        self._journal = Journal(file_name)

    def after_load_checkpoint(self, run: Run, manifest: Mapping[str, Any]) -> None:
        self._journal.resume(run, manifest)

    def before_train(self, run: Run) -> None:
        self._journal.start(run)

    def sync(self) -> None:
        self._journal.sync()

    def close(self) -> None:
        """Called at the end of a run and after an error."""
        self._journal.close()

    def after_run(self, run: Run) -> None:
        self.close()

    def on_exception(self, run: Run, error: BaseException) -> None:
        self.close()


@HOOKS.register_module()
class LedgerHook(JournalHook):
    """Writes ``ledger.jsonl``: a line for each update, with the sequences that it consumed and a digest of their sample
    ids. It runs before the checkpoint hook: a saved update has its line.
    """

    name = "ledger"

    def __init__(self) -> None:
        super().__init__(LEDGER_FILE)

    def after_update(self, run: Run, result: UpdateResult) -> None:
        self._journal.append(
            run,
            {
                "update": run.progress.updates,
                "sequences": list(result.sequences),
                "digest": result.sample_digest,
                "samples": run.progress.samples - run.previous.samples,
                "skipped": result.num_skipped,
                "applied": result.applied,
            },
        )


# ``timeline.jsonl``: when a run started, with what, where its time was spent, and how each start ended.


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
        waited = clock.seconds()
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
