"""Files of JSON lines of a run, kept by rank 0 over kills and resumes: what ``metrics.jsonl`` and others share, and the
hooks that write ``ledger.jsonl``, ``skipped_samples.jsonl`` and ``timeline.jsonl``. The runner adds these three.

A start writes a resume event wherever older lines exist, so ``system.journals.read_lines`` can determine which of them
are valid: after a resume, lines beyond its position are void; a fresh start in a used folder voids all. Files are
opened at the first line, so a dry run writes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from unigen_ds.checkpoint.manifest import current_versions
from unigen_ds.config.registry import HOOKS
from unigen_ds.core.batch import Batch
from unigen_ds.core.errors import DataError
from unigen_ds.core.json_values import json_values
from unigen_ds.data.records.unusable import exceeds
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.system import dist, machine
from unigen_ds.system.journals import LEDGER_FILE, SKIPPED_FILE, TIMELINE_FILE, JsonLines
from unigen_ds.system.log import logger

FEWEST_SAMPLES = 100
"""Samples after which the share of those that are skipped is checked."""
EVERY_S = 10.0
"""Between two lines of ``timeline.jsonl``, where nothing is saved."""


class JournalHook(Hook):
    """Keeps a file of JSON lines in the work dir. Rank 0 alone writes, on any rank it may be called; not collective."""

    def __init__(self, file_name: str) -> None:
        self._file_name = file_name
        self._lines: JsonLines | None = None
        self._resumed = self._warned = False

    def after_load_checkpoint(self, run: Run, manifest: Mapping[str, Any]) -> None:
        """Lines beyond the loaded progress no longer count."""
        self._resumed = True
        self._event(run, manifest.get("path"))

    def before_train(self, run: Run) -> None:
        """Without a resume, what an earlier run left in this folder no longer counts."""
        path = run.work_dir / self._file_name
        if not self._resumed and dist.is_main() and path.exists() and path.stat().st_size:
            self._event(run, None)

    def _event(self, run: Run, checkpoint: str | None) -> None:
        progress = run.progress
        position = {"iteration": progress.iteration(run.geometry), "sequences": progress.sequences,
                    "samples": progress.samples, "tokens": progress.tokens}  # fmt: skip
        self.append(run, {"event": "resume", "updates": progress.updates, **position, "checkpoint": checkpoint})

    def append(self, run: Run, record: Mapping[str, Any]) -> None:
        """Write one line. A full disk is one warning: training continues, and the line is written later."""
        if not dist.is_main():
            return
        self._lines = self._lines or JsonLines(run.work_dir / self._file_name)
        try:
            self._lines.append(record)
        except OSError as error:
            if not self._warned:
                logger().warning("%s cannot be written (%s). Training continues; its lines are kept in memory and"
                                 " written later.", self._lines.path, error)  # fmt: skip
            self._warned = True

    def sync(self) -> None:
        """Have all lines on disk: a save calls it first. Raises ``OSError`` where that cannot be."""
        if self._lines is not None:
            self._lines.sync()
            self._warned = False

    def close(self) -> None:
        """Close the file, at the end of a run and after an error; a later line opens it again."""
        if self._lines is None:
            return
        try:
            with closing(self._lines):
                self._lines.write_pending()
        except OSError as error:
            logger().error("%d lines of %s could not be written: %s", len(self._lines.pending), self._lines.path, error)
        self._lines = None

    def after_run(self, run: Run) -> None:
        self.close()

    def on_exception(self, run: Run, error: BaseException) -> None:
        self.close()


@HOOKS.register_module()
class LedgerHook(JournalHook):
    """Writes ``ledger.jsonl``: a line for each update, with the sequences that it consumed and a digest of their sample
    ids. It runs before the checkpoint hook: a saved update has its line."""

    name = "ledger"

    def __init__(self) -> None:
        super().__init__(LEDGER_FILE)

    def after_update(self, run: Run, result: UpdateResult) -> None:
        record = {
            "update": run.progress.updates,
            "sequences": list(result.sequences),
            "digest": result.sample_digest,
            "samples": run.progress.samples - run.previous.samples,
            "skipped": result.num_skipped,
            "applied": result.applied,
        }
        first, stop = result.sequences
        left_out = [list(skip) for skip in run.skips if skip.first < stop and skip.stop > first]
        self.append(run, {**record, **({"left_out": left_out} if left_out else {})})


@HOOKS.register_module()
class SkippedSamplesHook(JournalHook):
    """Appends samples that could not be decoded to ``skipped_samples.jsonl``, and warns of updates without targets.
    Where these show that more than ``max_skipped_fraction`` of all cannot be decoded, the run saves a checkpoint and
    ends with a ``DataError``.

    Args:
        max_skipped_fraction: set by ``train_dataloader.max_skipped_fraction``.
    """

    name = "skipped"
    state_attributes = ("num_skipped",)

    def __init__(self, *, max_skipped_fraction: float = 0.01) -> None:
        super().__init__(SKIPPED_FILE)
        self.max_skipped_fraction = max_skipped_fraction
        self.num_skipped = 0
        self._pending: list[dict[str, str]] = []

    def after_load_checkpoint(self, run: Run, manifest: Mapping[str, Any]) -> None:
        if (run.work_dir / SKIPPED_FILE).exists():  # what is skipped again is listed again: the older lines are void
            super().after_load_checkpoint(run, manifest)

    def after_train_iter(self, run: Run, index: int, batch: Batch) -> None:
        self._pending.extend(batch.skipped)

    def after_update(self, run: Run, result: UpdateResult) -> None:
        if not any(result.counts.values()) and dist.is_main():
            logger().warning("Update %d had no target in its %d samples: nothing was learned from it.",
                             run.progress.updates, run.progress.samples - run.previous.samples)  # fmt: skip
        if not result.num_skipped:
            return
        records = [record for part in dist.gather_objects(self._pending) for record in part]
        self._pending = []
        self.num_skipped += result.num_skipped
        for record in records:
            self.append(run, {"update": run.progress.updates, **record})
            if dist.is_main():
                logger().warning("Skipped sample %s: %s", record["sample"], record["why"])
        samples, limit = run.progress.samples, self.max_skipped_fraction
        if samples >= FEWEST_SAMPLES and exceeds(self.num_skipped, samples, limit):
            error = DataError(
                f"{self.num_skipped} of {samples} samples could not be decoded",
                allowed=f"train_dataloader.max_skipped_fraction = {limit}",
                remedy=f"see {SKIPPED_FILE} in the work dir; repair the data or raise the limit, then --resume",
            )
            run.request_stop("too many samples could not be decoded", error=error)


class TimelineHook(JournalHook):
    """Writes ``timeline.jsonl``: when a run started, with what, where its time was spent, and how each start ended. It
    runs after the checkpoint hook: the line of a saved update has the time of its save. No line is ever void.
    """

    name = "timeline"

    def __init__(self) -> None:
        super().__init__(TIMELINE_FILE)
        self._manifest: Mapping[str, Any] = {}
        self._began = self._last = 0.0
        self._before: dict[str, float] = {}
        self._started = self._saved = False

    def after_load_checkpoint(self, run: Run, manifest: Mapping[str, Any]) -> None:
        self._manifest = manifest

    def before_train(self, run: Run) -> None:
        self._began = self._last = time.perf_counter()
        self._before, self._started = dict(run.clock.totals), True
        if not dist.is_main():
            return
        record = {
            "event": "start",
            **_now(run),
            "start_up": self._began - run.clock.began,
            "checkpoint": self._manifest.get("path"),
            "sequences": run.progress.sequences,
            "sequences_per_epoch": run.ruler.sequences_per_epoch,
            "total_sequences": run.total_sequences,
            "geometry": asdict(run.geometry),
            "topology": run.backend.topology(),
            "findings": self._manifest.get("findings", ()),
            "machine": machine.description(processes=dist.world_size()),
            "git": machine.git_commits(),
            "versions": current_versions(),
            "config": run.config,
        }
        self.append(run, json_values(record))

    def after_update(self, run: Run, result: UpdateResult) -> None:
        if self._saved or time.perf_counter() - self._last >= EVERY_S:
            self._write(run, {"event": "time"})

    def before_save_checkpoint(self, run: Run, metrics: dict[str, float]) -> None:
        self._saved = True

    def after_run(self, run: Run) -> None:
        self._end(run, "complete" if run.finished else "stopped")

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._end(run, f"{type(error).__name__}: {error}"[:500])

    def _end(self, run: Run, reason: str) -> None:
        if self._started:  # else no update was made: there is no start line to end
            self._write(run, {"event": "end", "reason": reason})
        self.close()

    def _write(self, run: Run, record: Mapping[str, Any]) -> None:
        """Seconds are those since the start line; ``sections`` are the parts of it that the clock knows."""
        self._last, self._saved = time.perf_counter(), False
        times = {name: total - self._before.get(name, 0.0) for name, total in run.clock.totals.items()}
        sections = {name: round(seconds, 4) for name, seconds in times.items() if seconds >= 5e-5}
        self.append(run, {**record, **_now(run), "seconds": round(self._last - self._began, 4), "sections": sections})


def _now(run: Run) -> dict[str, Any]:
    return {"time": datetime.now(timezone.utc).isoformat(timespec="seconds"), "update": run.progress.updates}
