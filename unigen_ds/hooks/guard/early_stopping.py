"""End a run whose validation metric has stopped to improve: complete, with a save."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Ge

from unigen_ds.checkpoint.best_record import better
from unigen_ds.config.registry import HOOKS
from unigen_ds.core.errors import ConfigError
from unigen_ds.evaluation.provenance import Result, unlike
from unigen_ds.hooks.base import Hook, Run
from unigen_ds.hooks.evaluate.evaluate import check_result
from unigen_ds.hooks.save.best import rule_of, value_of
from unigen_ds.system import dist
from unigen_ds.system.log import logger

VERSION = 1


@HOOKS.register_module()
class EarlyStoppingHook(Hook):
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
        self.monitor, self.rule = monitor, rule_of(monitor, rule)
        self.min_delta, self.patience = min_delta, patience
        self.check_finite, self.stopping_threshold = check_finite, stopping_threshold
        self._best: float | None = None
        self._last: float | None = None
        self._waited = 0
        self._missing: ConfigError | None = None
        self._provenance: dict[str, str] = {}

    def before_run(self, run: Run) -> None:
        evaluate = check_result(run, self.monitor, where="EarlyStoppingHook.monitor")
        if evaluate is not None:
            self._provenance = dict(evaluate.provenance(run, self.monitor))

    def before_update(self, run: Run) -> None:
        self.after_train(run)

    def after_train(self, run: Run) -> None:
        """Raise ``ConfigError`` where the last evaluation had no such metric: the checkpoint is saved by now."""
        if self._missing is not None:
            raise self._missing

    def wants_save(self) -> bool:
        return self._missing is not None

    def after_val(self, run: Run, metrics: Mapping[str, float]) -> None:
        complete = all(getattr(hook, "complete", True) for hook in run.hooks)
        try:
            value = value_of(self.monitor, metrics, where="EarlyStoppingHook.monitor", complete=complete)
        except ConfigError as error:
            self._missing, value = error, None
        if value is None:
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
        reason = self._reason()
        if reason is None:
            return
        if dist.is_main():
            logger().warning("%s, at update %d: %s. Remedy: to train further, change EarlyStoppingHook (a larger"
                             " patience, say) or remove it, and resume.",
                             beginning, run.progress.updates, reason)  # fmt: skip
        run.request_stop(f"early stopping: {reason}")

    def _reason(self) -> str | None:
        """Why the run ends, by the present arguments; None: it does not."""
        if self._last is None:
            return None
        if not math.isfinite(self._last):
            if self.check_finite:
                return f"{self.monitor} is {self._last:g}"
        elif self.stopping_threshold is not None and better(self._last, self.stopping_threshold, rule=self.rule):
            return (
                f"{self.monitor} is {self._last:.6g}, {self.rule} than stopping_threshold {self.stopping_threshold:g}"
            )
        if self._waited >= self.patience:
            best = "" if self._best is None else f"; the best value is {self._best:.6g}"
            by = f" by more than min_delta {self.min_delta:g}" if self.min_delta else ""
            if self._best is not None and better(self._last, self._best, rule=self.rule):
                best += f", and the last one, {self._last:.6g}, is not better by so much"
            evaluations = "1 evaluation" if self._waited == 1 else f"{self._waited} evaluations"
            return f"{self.monitor} has not improved{by} for {evaluations} (patience {self.patience}){best}"
        return None

    def state_dict(self) -> dict[str, Any]:
        last = None if self._last is None else str(self._last)  # JSON has no NaN
        return {"version": VERSION, "monitor": self.monitor, "rule": self.rule, "best": self._best, "last": last,
                "waited": self._waited, "provenance": self._provenance}  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("version") != VERSION:
            raise ConfigError(f"state of EarlyStoppingHook has version {state.get('version')!r}", allowed=str(VERSION))
        if (state["monitor"], state["rule"]) != (self.monitor, self.rule):
            logger().warning("EarlyStoppingHook watched %s (%s) before and starts anew with %s (%s).",
                             state["monitor"], state["rule"], self.monitor, self.rule)  # fmt: skip
            return
        if reasons := unlike(Result({}, state.get("provenance") or {}), Result({}, self._provenance)):
            if dist.is_main():
                logger().warning("EarlyStoppingHook starts anew: the %s of before cannot be compared with those of this"
                                 " run: %s.", self.monitor, "; ".join(reasons))  # fmt: skip
            return
        self._best, self._waited = state["best"], int(state["waited"])
        self._last = None if state["last"] is None else float(state["last"])
