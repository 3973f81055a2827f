"""The ledger: one line for each update, with the sequences that it consumed and a digest of their sample ids.

``tools/inspect_data.py`` re-derives the same digests from the config, so anyone can check that no sequence was
repeated or skipped over a resume. About 120 bytes per update; no collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unigen_ds.core.metrics import LEDGER_FILE as LEDGER_FILE
from unigen_ds.core.registry import HOOKS
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.hooks.journal import Journal


@HOOKS.register_module()
class LedgerHook(Hook):
    """Writes ``ledger.jsonl``. It runs before the checkpoint hook: a saved update has its line."""

    name = "ledger"

    def __init__(self) -> None:
        self._journal = Journal(LEDGER_FILE)

    def after_load_checkpoint(self, run: Run, manifest: Mapping[str, Any]) -> None:
        self._journal.resume(run, manifest)

    def before_train(self, run: Run) -> None:
        self._journal.start(run)

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

    def sync(self) -> None:
        self._journal.sync()

    def after_run(self, run: Run) -> None:
        self._journal.close()

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._journal.close()
