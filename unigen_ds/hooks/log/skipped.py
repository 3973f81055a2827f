"""Log and count samples that could not be decoded, stop when there are too many; warn of updates without targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unigen_ds.config.registry import HOOKS
from unigen_ds.core.batch import Batch
from unigen_ds.core.errors import DataError
from unigen_ds.data.records.unusable import exceeds, share_above
from unigen_ds.hooks.base import Run, UpdateResult
from unigen_ds.hooks.log.journal import JournalHook
from unigen_ds.system import dist
from unigen_ds.system.journals import SKIPPED_FILE as SKIPPED_FILE
from unigen_ds.system.log import logger

_GRACE = 100  # samples seen before the share is checked


@HOOKS.register_module()
class SkippedSamplesHook(JournalHook):
    """Appends to ``skipped_samples.jsonl``. Where these show that more than ``max_skipped_fraction`` of all cannot be
    decoded, the run saves a checkpoint and ends with a ``DataError``.

    The runner adds it; ``train_dataloader.max_skipped_fraction`` sets the limit.

    Args:
        max_skipped_fraction: set by ``train_dataloader.max_skipped_fraction``.
    """

    name = "skipped"
    kept = ("num_skipped",)

    def __init__(self, *, max_skipped_fraction: float = 0.01) -> None:
        super().__init__(SKIPPED_FILE)
        self.max_skipped_fraction = max_skipped_fraction
        self.num_skipped = 0
        self._error: DataError | None = None
        self._pending: list[dict[str, str]] = []

    def after_load_checkpoint(self, run: Run, manifest: Mapping[str, Any]) -> None:
        if (run.work_dir / SKIPPED_FILE).exists():  # what is skipped again is listed again: the older lines are void
            super().after_load_checkpoint(run, manifest)

    def after_train_iter(self, run: Run, index: int, batch: Batch) -> None:
        self._pending.extend(batch.skipped)

    def after_update(self, run: Run, result: UpdateResult) -> None:
        if not any(result.counts.values()) and dist.is_main():
            logger().warning(
                "Update %d had no target in its %d samples: nothing was learned from it.",
                run.progress.updates,
                run.progress.samples - run.previous.samples,
            )
        if not result.num_skipped:
            return
        records = [record for part in dist.gather_objects(self._pending) for record in part]
        self._pending = []
        self.num_skipped += result.num_skipped
        for record in records:
            self._journal.append(run, {"update": run.progress.updates, **record})
            if dist.is_main():
                logger().warning("Skipped sample %s: %s", record["sample"], record["why"])
        samples, limit = run.progress.samples, self.max_skipped_fraction
        if samples >= _GRACE and exceeds(self.num_skipped, samples, limit):
            share = share_above(self.num_skipped, samples, limit)
            self._error = DataError(
                f"{self.num_skipped} of {samples} samples (a share of {share}) could not be decoded",
                allowed=f"train_dataloader.max_skipped_fraction = {limit}",
                remedy=f"see {SKIPPED_FILE} in the work dir; repair the data or raise the limit, then --resume",
            )
            run.request_stop("too many samples could not be decoded")  # the checkpoint hook saves, then it is raised

    def after_train(self, run: Run) -> None:
        if self._error is not None:
            raise self._error
