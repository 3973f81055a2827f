"""Updates whose gradients are not finite: each is named, too many in a row stop the run.

The backend has already left every weight unchanged for such an update; its data counts as consumed. One bad batch is a
warning; ``max_consecutive`` in a row mean that the model or the data is broken. Dynamic fp16 loss scaling may skip a
few updates at its start until the scale fits, which the default of 5 allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Ge

from unigen_ds.core.errors import ConfigError, TrainingError
from unigen_ds.core.log import logger
from unigen_ds.core.registry import HOOKS, checked
from unigen_ds.hooks.base import Hook, Run, UpdateResult

VERSION = 1
SHOWN_IDS = 8
"""Sample ids that the error names; tools/inspect_data.py shows all."""


@HOOKS.register_module()
class NanGuardHook(Hook):
    """Raises ``TrainingError`` after ``max_consecutive`` updates in a row were not applied, on all ranks alike.

    Args:
        max_consecutive: updates in a row without a finite gradient that stop the run.
    """

    name = "nan_guard"

    @checked()
    def __init__(self, *, max_consecutive: Annotated[int, Ge(1)] = 5) -> None:
        self.max_consecutive = max_consecutive
        self._skipped: list[dict[str, Any]] = []

    def after_update(self, run: Run, result: UpdateResult) -> None:
        if result.applied:
            self._skipped.clear()
            return
        first, stop = result.sequences
        self._skipped.append(
            {
                "update": run.progress.updates,
                "sequences": [first, stop],
                "sample_ids": list(result.sample_ids[:SHOWN_IDS]),
                "num_samples": len(result.sample_ids),
            }
        )
        logger().warning(
            "update %d (sequences %d:%d): the gradient is not finite; no weight changed, it is skipped (%d of %d"
            " in a row that stop the run)",
            run.progress.updates, first, stop, len(self._skipped), self.max_consecutive,
        )  # fmt: skip
        if len(self._skipped) >= self.max_consecutive:
            raise self._error()

    def _error(self) -> TrainingError:
        updates, (first, _), (_, stop) = len(self._skipped), *(self._skipped[i]["sequences"] for i in (0, -1))
        ids = [name for entry in self._skipped for name in entry["sample_ids"]][:SHOWN_IDS]
        more = sum(entry["num_samples"] for entry in self._skipped) - len(ids)
        return TrainingError(
            f"{updates} updates in a row had gradients that are not finite: updates {self._skipped[0]['update']} to"
            f" {self._skipped[-1]['update']}, sequences {first}:{stop}",
            remedy="lower the learning rate, resume from an earlier checkpoint, or look at the data: `python"
            f" tools/inspect_data.py CONFIG --sequences {first}:{stop}` shows all of these samples: {', '.join(ids)}"
            + (f" and {more} more" if more else ""),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"version": VERSION, "skipped": [dict(entry) for entry in self._skipped]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("version") != VERSION:
            raise ConfigError(f"state of NanGuardHook has version {state.get('version')!r}", allowed=str(VERSION))
        self._skipped = [dict(entry) for entry in state["skipped"]]
