"""Updates whose gradients are not finite: each is named, too many in a row stop the run.

The backend has already left every weight unchanged for such an update; its data counts as consumed. One bad batch is a
warning; ``max_consecutive`` in a row mean that the model or the data is broken. In fp16 an overflow that makes the loss
scale smaller is not one of them, unless the loss itself is not finite. A resume counts anew.
"""

from __future__ import annotations

import math
from typing import Annotated

from annotated_types import Ge

from unigen_ds.config.registry import HOOKS, checked
from unigen_ds.core.errors import TrainingError
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.hooks.save.checkpoint import CheckpointHook
from unigen_ds.system import dist
from unigen_ds.system.log import logger

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
        self._skipped: list[tuple[int, UpdateResult]] = []
        """The present row of updates that were not applied."""

    def after_update(self, run: Run, result: UpdateResult) -> None:
        if result.applied:
            self._skipped.clear()
            return
        bad = [value for value in result.local_sums.values() if not math.isfinite(float(value))]
        loss_is_finite = not dist.sum_floats([float(len(bad))])[0]  # of all ranks, which skip alike
        if result.scale_fell and loss_is_finite:
            logger().info("update %d: the gradient overflowed at the loss scale %g, which is now smaller; no weight"
                          " changed", run.progress.updates, result.loss_scale)  # fmt: skip
            return
        first, stop = result.sequences
        self._skipped.append((run.progress.updates, result))
        logger().warning(
            "update %d (sequences %d:%d): the %s is not finite; no weight changed, it is skipped (%d of %d"
            " in a row that stop the run)",
            run.progress.updates, first, stop, "gradient" if loss_is_finite else "loss",
            len(self._skipped), self.max_consecutive,
        )  # fmt: skip
        if len(self._skipped) >= self.max_consecutive:
            (first_update, first_result), (last_update, last_result) = self._skipped[0], self._skipped[-1]
            first, stop = first_result.sequences[0], last_result.sequences[1]
            ids = [name for _, result in self._skipped for name in result.sample_ids]
            more = f" and {len(ids) - SHOWN_IDS} more" if len(ids) > SHOWN_IDS else ""
            raise TrainingError(
                f"{len(self._skipped)} updates in a row had a loss or gradients that are not finite: updates"
                f" {first_update} to {last_update}, sequences {first}:{stop}",
                remedy="lower the learning rate, resume from an earlier checkpoint, or look at the data: `python"
                f" tools/inspect_data.py CONFIG --sequences {first}:{stop}` shows all of these samples:"
                f" {', '.join(ids[:SHOWN_IDS])}{more}",
            )

    def after_train(self, run: Run) -> None:
        """The last save checks this; a run without one must not end as complete either."""
        if not any(isinstance(hook, CheckpointHook) for hook in run.hooks):
            names = run.backend.not_finite()
            if dist.sum_floats([float(len(names))])[0]:
                raise TrainingError(
                    "training ends with weights that are not finite" + (f": {names[0]}" if names else ""),
                    remedy="lower the learning rate, or look at the data (tools/inspect_data.py)",
                )
