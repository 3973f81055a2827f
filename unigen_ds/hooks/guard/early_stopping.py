"""End a run whose validation metric has stopped to improve: complete, with a save."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Ge

from unigen_ds.checkpoint.best_record import better
from unigen_ds.config.registry import HOOKS
from unigen_ds.hooks.base import Run
from unigen_ds.hooks.save.best import MetricHook
from unigen_ds.system import dist
from unigen_ds.system.log import logger


@HOOKS.register_module()
class EarlyStoppingHook(MetricHook):
    """mmengine's arguments. ``min_delta`` is 0 by default (mmengine: 0.1), and an unknown ``monitor`` is an error.

    Args:
        monitor: a name of the evaluation's results, such as ``val/loss``.
        rule: ``'less'`` or ``'greater'``; None: inferred from the name, as mmengine does.
        min_delta: a value counts as better only if it is better than the best one by more than this.
        patience: evaluations without a better value after which the run ends.
        check_finite: end the run also when the value is NaN or infinite.
        stopping_threshold: end the run as soon as the value is better than this.

    The run ends after the update of the evaluation, with a checkpoint and exit status 0. A later ``--resume`` ends at
    once with the reason, until an argument here allows more training, or the hook is removed.
    """

    name = "early_stopping"

    def __init__(
        self,
        *,
        monitor: str,
        rule: str | None = None,
        min_delta: Annotated[float, Ge(0)] = 0.0,
        patience: Annotated[int, Ge(1)] = 5,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
    ) -> None:
        super().__init__(monitor, rule=rule, where="EarlyStoppingHook.monitor")
        self.min_delta, self.patience = min_delta, patience
        self.check_finite, self.stopping_threshold = check_finite, stopping_threshold
        self._best: float | None = None
        self._last: float | None = None
        self._waited = 0

    def after_val(self, run: Run, metrics: Mapping[str, float]) -> None:
        if (value := self.value_of(run, metrics)) is None:
            return
        self._last = value
        margin = self.min_delta if self.rule == "less" else -self.min_delta
        if math.isfinite(value) and (self._best is None or better(value + margin, self._best, rule=self.rule)):
            self._best, self._waited = value, 0
        else:
            self._waited += 1
        self._stop(run, "Early stopping")

    def before_train(self, run: Run) -> None:
        self._stop(run, "This run was stopped early and is not trained further")

    @property
    def stopped(self) -> bool:
        """Whether this hook has ended the run, which is complete then."""
        return self._reason() is not None

    def _stop(self, run: Run, beginning: str) -> None:
        if (reason := self._reason()) is None:
            return
        if dist.is_main():
            logger().warning("%s, at update %d: %s. Remedy: to train further, change EarlyStoppingHook (a larger"
                             " patience, say) or remove it, and resume.",
                             beginning, run.progress.updates, reason)  # fmt: skip
        run.request_stop(f"early stopping: {reason}")

    def _reason(self) -> str | None:
        """Why the run ends, by the present arguments; None: it does not."""
        last, threshold = self._last, self.stopping_threshold
        if last is None:
            return None
        if not math.isfinite(last):
            if self.check_finite:
                return f"{self.metric} is {last:g}"
        elif threshold is not None and better(last, threshold, rule=self.rule):
            return f"{self.metric} is {last:.6g}, {self.rule} than stopping_threshold {threshold:g}"
        if self._waited < self.patience:
            return None
        by = f" by more than min_delta {self.min_delta:g}" if self.min_delta else ""
        return (
            f"{self.metric} has not improved{by} for {self._waited} evaluations (patience {self.patience});"
            f" the best value is {self._best}, the last one {last:.6g}"
        )

    def state_dict(self) -> dict[str, Any]:
        last = None if self._last is None else str(self._last)  # JSON has no NaN
        return {"monitor": self.metric, "rule": self.rule, "best": self._best, "last": last,
                "waited": self._waited, "provenance": self._provenance}  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if problem := self.difference(state["monitor"], state["rule"], state["provenance"]):
            if dist.is_main():
                logger().warning("EarlyStoppingHook starts anew: of the best value before, %s.", problem)
            return
        self._best, self._waited = state["best"], int(state["waited"])
        self._last = None if state["last"] is None else float(state["last"])
