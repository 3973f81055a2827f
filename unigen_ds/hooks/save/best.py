"""Hooks that follow one metric: its best checkpoint is saved and kept (``EvaluateHook(save_best=...)``), and a run
whose metric has stopped to improve ends, complete, with a save (``EarlyStoppingHook``).

A better value asks the checkpoint hook for a save at this update; only the checkpoint that is then complete becomes the
best one, and only after that the former one may be deleted. So a save that fails (a full disk) leaves the former.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge

from unigen_ds.checkpoint import best_record, store
from unigen_ds.checkpoint.best_record import Best
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.config.registry import HOOKS
from unigen_ds.core.errors import ConfigError
from unigen_ds.evaluation.provenance import Result, unlike
from unigen_ds.hooks.base import Hook, Run
from unigen_ds.hooks.evaluate.evaluate import EvaluateHook, check_result
from unigen_ds.hooks.save.checkpoint import CheckpointHook
from unigen_ds.system import dist
from unigen_ds.system.files import write_text_atomic
from unigen_ds.system.log import logger

Direction = Literal["less", "greater"]
_RULES: tuple[tuple[str, Direction], ...] = (
    ("fid|perplexity", "less"),
    ("bleu|rouge|meteor|bertscore|exact_match|clip|consistency", "greater"),
    (".*(acc|top|ar@|auc|precision|map|mdice|miou)", "greater"),
)
"""What a part of a metric's name matches, of this project's metrics and of mmengine's -> what is better."""


def rule_of(metric: str) -> Direction:
    """``'less'`` or ``'greater'``, as mmengine infers it: by the first part of the name after ``val/``, or the second
    after a set's name: ``val/loss/text/accounts.jsonl`` is a loss. Raises ``ConfigError`` where neither fits."""
    name = metric.removeprefix("val/").lower()
    parts = name.split("/")[:2]
    by_part = (next((rule for pattern, rule in _RULES if re.match(pattern, part)), None) for part in parts)
    rules = {rule for rule in by_part if rule is not None}
    if "loss" in parts or (not rules and "loss" in name):
        return "less"
    if len(rules) != 1:
        raise ConfigError(
            f"whether {metric!r} is better when it is less or greater cannot be inferred from its name",
            remedy="add rule='less' or rule='greater'",
        )
    return rules.pop()


class MetricHook(Hook):
    """Base of hooks that follow one metric of the evaluations, such as ``val/loss``. ``rule`` None: by the name
    (``rule_of``). ``where``: the argument that names the metric, for messages."""

    def __init__(self, metric: str, *, rule: Direction | None, where: str) -> None:
        self.metric, self.rule, self._where = metric, rule or rule_of(metric), where
        self._provenance: dict[str, str] = {}

    def evaluation(self, run: Run) -> EvaluateHook | None:
        """The hook that evaluates. Raises ``ConfigError`` where it can have no value of the metric."""
        return check_result(run, self.metric, where=self._where)

    def before_run(self, run: Run) -> None:
        if (evaluate := self.evaluation(run)) is not None:
            self._provenance = dict(evaluate.provenance(run, self.metric))

    def value_of(self, run: Run, metrics: Mapping[str, Any]) -> float | None:
        """The metric's value, NaN where it has none; None where this evaluation leaves it out. Where no evaluation has
        it, the run ends after its update with a checkpoint and a ``ConfigError``."""
        if self.metric in metrics:
            value = metrics[self.metric]
            return math.nan if value is None else float(value)
        complete = all(getattr(hook, "complete", True) for hook in run.hooks)
        if complete or "loss" in self.metric.split("/")[1:3]:
            problem = f"{self._where} is {self.metric!r}, which the evaluation does not have"
            choices = ", ".join(sorted(metrics)) or "nothing: it has no results"
            run.request_stop(problem, error=ConfigError(problem, allowed=choices))
        return None

    def difference(self, metric: str, rule: str, provenance: Mapping[str, str]) -> str | None:
        """Why a stored value of ``metric`` cannot be compared with those of this run; None: it can."""
        if (metric, rule) != (self.metric, self.rule):
            return f"it was chosen by {metric} ({rule}), and the metric is now {self.metric} ({self.rule})"
        if reasons := unlike(Result({}, provenance), Result({}, self._provenance)):
            return f"its value cannot be compared with those of this run: {'; '.join(reasons)}"
        return None


class BestHook(MetricHook):
    """Finds the best checkpoint by one metric, and keeps it. The builder adds it for ``EvaluateHook(save_best=...)``.
    ``metric`` may be ``'auto'``: the loss of the first validation set."""

    name = "best"

    def __init__(self, metric: str, *, rule: Direction | None = None) -> None:
        self._auto = metric == "auto"
        super().__init__("val/loss" if self._auto else metric, rule=rule, where="EvaluateHook.save_best")
        self._best: Best | None = None
        self._candidate: Best | None = None
        """The value of the present update, where it is better than the best one."""
        self._saving: Best | None = None
        """The value of the checkpoint that is being saved."""
        self._commit: int | None = None
        """Commit number of the checkpoint of this run that retention must not delete."""

    def evaluation(self, run: Run) -> EvaluateHook | None:
        if not self._checkpoints(run):
            raise ConfigError(f"save_best={self.metric!r} without a CheckpointHook", remedy="add the hook that saves")
        if self._auto:
            self.metric = run.validation.main_loss
        return super().evaluation(run)

    def before_update(self, run: Run) -> None:
        """What was not saved at its own update is not the best one."""
        old, self._candidate = self._candidate, None
        if self._saving is not None and all(hook.pending is None for hook in self._checkpoints(run)):
            old, self._saving = self._saving, None
        if old is not None and dist.is_main():
            consequence = "none is kept" if self._best is None else f"{self._best.path} stays the best checkpoint"
            logger().warning("The best %s so far, %.6g at update %d, was not saved: %s.",
                             self.metric, old.value, old.updates, consequence)  # fmt: skip

    def before_save_checkpoint(self, run: Run, metrics: dict[str, float]) -> None:
        self._candidate, self._saving = None, self._candidate

    @staticmethod
    def _checkpoints(run: Run) -> list[CheckpointHook]:
        return [hook for hook in run.hooks if isinstance(hook, CheckpointHook)]

    def after_val(self, run: Run, metrics: Mapping[str, float]) -> None:
        if not run.progress.updates or (value := self.value_of(run, metrics)) is None:
            return
        if not math.isfinite(value) and dist.is_main():
            logger().warning("%s is %g at update %d: it is not the best.", self.metric, value, run.progress.updates)
        best = self._saving or self._best
        if best_record.better(value, None if best is None else best.value, rule=self.rule):
            self._candidate = Best(self.metric, self.rule, value, run.progress.updates, provenance=self._provenance)

    def wants_save(self) -> bool:
        return self._candidate is not None

    def after_save_checkpoint(self, run: Run, path: Path) -> None:
        """If the value of the checkpoint that is now complete is the best, it is the best one now."""
        if self._saving is None:
            return
        best, self._saving = self._saving, None
        self._refer(run, best, path)
        logger().info("Best checkpoint so far: %s (%s %.6g at update %d).", path, best.metric, best.value, best.updates)

    def _refer(self, run: Run, best: Best, folder: Path) -> None:
        """``folder`` has ``best``: keep it where it is one of this run, and write the hint, if that is possible."""

        def settle() -> int | None:
            try:
                write_text_atomic(run.checkpoint_dir / best_record.BEST_FILE, f"{folder}\n")
            except OSError as error:
                logger().warning("The best checkpoint is %s, complete and kept, but: %s", folder, error)
            own = store.is_checkpoint_name(folder.name) and store.is_inside(run.checkpoint_dir, folder)
            return Manifest.read(folder).commit if own else None

        home, target = run.checkpoint_dir.resolve(), folder.resolve()
        name = target.relative_to(home) if target.is_relative_to(home) else folder.absolute()
        self._best, self._commit = replace(best, path=str(name)), dist.on_main(settle)

    def keeps(self, manifest: Manifest) -> bool:
        return manifest.commit == self._commit

    def state_dict(self) -> dict[str, Any]:
        """State for the checkpoint that is being saved, which is the best one itself if its value is."""
        best = self._saving or self._best
        return {} if best is None else asdict(best)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best = Best.from_state_dict(state)

    def after_load_checkpoint(self, run: Run, manifest: Mapping[str, Any]) -> None:
        """Find the best checkpoint again, which another engine or work dir may have written."""
        best, self._best = self._best, None
        if best is None:
            return
        folder = best.where(store.outer(Path(manifest["path"])))
        problem = self.difference(best.metric, best.rule, best.provenance)
        if problem is None and not dist.on_main(folder.is_dir):
            problem = "it is not there any more"
        if problem is None:
            self._refer(run, best, folder)
        elif dist.is_main():
            logger().warning("%s (%s %.6g at update %d) is not the best checkpoint any more: %s. The next"
                             " evaluation starts anew.",
                             folder, best.metric, best.value, best.updates, problem)  # fmt: skip


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
        rule: Direction | None = None,
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
        self._num_worse = 0

    def after_val(self, run: Run, metrics: Mapping[str, float]) -> None:
        if (value := self.value_of(run, metrics)) is None:
            return
        self._last = value
        margin = self.min_delta if self.rule == "less" else -self.min_delta
        if best_record.better(value + margin, self._best, rule=self.rule):
            self._best, self._num_worse = value, 0
        else:
            self._num_worse += 1
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
        elif threshold is not None and best_record.better(last, threshold, rule=self.rule):
            return f"{self.metric} is {last:.6g}, {self.rule} than stopping_threshold {threshold:g}"
        if self._num_worse < self.patience:
            return None
        by = f" by more than min_delta {self.min_delta:g}" if self.min_delta else ""
        return (
            f"{self.metric} has not improved{by} for {self._num_worse} evaluations (patience {self.patience});"
            f" the best value is {self._best}, the last one {last:.6g}"
        )

    def state_dict(self) -> dict[str, Any]:
        last = None if self._last is None else str(self._last)  # JSON has no NaN
        return {"monitor": self.metric, "rule": self.rule, "best": self._best, "last": last,
                "waited": self._num_worse, "provenance": self._provenance}  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if problem := self.difference(state["monitor"], state["rule"], state["provenance"]):
            if dist.is_main():
                logger().warning("EarlyStoppingHook starts anew: of the best value before, %s.", problem)
            return
        self._best, self._num_worse = state["best"], int(state["waited"])
        self._last = None if state["last"] is None else float(state["last"])
