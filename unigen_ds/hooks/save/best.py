"""The best checkpoint by a metric: found, saved, kept (``EvaluateHook(save_best=...)``).

A better value asks the checkpoint hook for a save at this update; only the checkpoint that is then complete becomes the
best one, and only after that the former one may be deleted. So a save that fails (a full disk) leaves the former.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from unigen_ds.checkpoint import best_record as stored
from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.best_record import Best
from unigen_ds.checkpoint.convert import merge
from unigen_ds.checkpoint.home import same
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.checkpoint.saver import CONFIG_FILE, TOKENIZER
from unigen_ds.core.errors import ConfigError, UnigenError
from unigen_ds.evaluation.provenance import Result, unlike
from unigen_ds.hooks.base import Hook, Run
from unigen_ds.hooks.evaluate.evaluate import EvaluateHook, check_result
from unigen_ds.hooks.save.checkpoint import CheckpointHook
from unigen_ds.system import dist
from unigen_ds.system.files import delete_inside, fsync_path, make_directory
from unigen_ds.system.log import logger

_RULES = {
    "less": ("fid", "kid", "frechet", "perplexity"),
    "greater": ("bleu", "rouge", "meteor", "bertscore", "exact_match", "vqa", "clip", "consistency", "text_rendering"),
}
"""Beginnings of the names of this project's metrics."""
_GREATER = ("acc", "top", "ar@", "auc", "precision", "map", "mdice", "miou", "macc", "aacc")
"""mmengine's, in lower case: a metric whose name contains one is better when it is greater (``loss``: when less)."""


def rule_of(metric: str, rule: str | None = None) -> str:
    """``rule``; or, where it is None, ``'less'`` or ``'greater'`` by the metric's name, as mmengine infers it.

    The first part of the name after ``val/`` decides, or the second after the name of a set, so that
    ``val/loss/text/accounts.jsonl`` is a loss. Raises ``ConfigError`` for another rule, and where none can be inferred.
    """
    if rule is not None:
        if rule not in _RULES:
            raise ConfigError(f"rule is {rule!r}", allowed="'less' or 'greater'")
        return rule
    name = metric.removeprefix("val/").lower()
    parts = name.split("/")[:2]
    if "loss" in parts:
        return "less"
    rules: set[str] = set()
    for part in parts:
        own = [rule for rule, beginnings in _RULES.items() if part.startswith(beginnings)]
        rules |= {*own[:1]} or ({"greater"} if any(key in part for key in _GREATER) else set())
    if not rules and "loss" in name:
        return "less"
    if len(rules) != 1:
        raise ConfigError(
            f"whether {metric!r} is better when it is less or greater cannot be inferred from its name",
            remedy="add rule='less' or rule='greater'",
        )
    return rules.pop()


class MetricHook(Hook):
    """Base of hooks that follow one metric of the evaluations.

    Args:
        metric: a name of the evaluation's results, such as ``val/loss``.
        rule: ``'less'`` or ``'greater'``; None: by the name (``rule_of``).
        where: the argument that names the metric, for messages.
    """

    def __init__(self, metric: str, *, rule: str | None, where: str) -> None:
        self.metric, self.rule, self._where = metric, rule_of(metric, rule), where
        self._provenance: dict[str, str] = {}

    def before_run(self, run: Run) -> None:
        if (evaluate := check_result(run, self.metric, where=self._where)) is not None:
            self._provenance = dict(evaluate.provenance(run, self.metric))

    def value_of(self, run: Run, metrics: Mapping[str, Any]) -> float | None:
        """The metric's value, NaN where it has none; None where this evaluation leaves it out. Raises ``ConfigError``
        where no evaluation has such a metric.
        """
        if self.metric in metrics:
            value = metrics[self.metric]
            return math.nan if value is None else float(value)
        complete = all(getattr(hook, "complete", True) for hook in run.hooks)
        if complete or "loss" in self.metric.split("/")[1:3]:
            problem = f"{self._where} is {self.metric!r}, which the evaluation does not have"
            raise ConfigError(problem, allowed=", ".join(sorted(metrics)) or "nothing: it has no results")
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

    Args:
        metric: a name of the evaluation's results, or ``'auto'``: the loss of the first validation set.
        rule: as of ``MetricHook``.
        weights_only: keep the best weights alone, in ``best_weights/update_<n>/``, instead of a whole checkpoint.
        ema: the value is one of the averaged weights (EMA); the weights that are kept are then these.
    """

    name = "best"

    def __init__(self, metric: str, *, rule: str | None = None, weights_only: bool = False, ema: bool = False) -> None:
        self._auto = metric == "auto"
        super().__init__("val/loss" if self._auto else metric, rule=rule, where="EvaluateHook.save_best")
        self._weights_only, self._ema = weights_only, ema
        self._best: Best | None = None
        self._folder: Path | None = None
        self._offered: Best | None = None
        self._commit: int | None = None

    @classmethod
    def of(cls, hook: EvaluateHook) -> BestHook | None:
        """The hook that keeps what ``hook`` finds, if it is to."""
        if hook.save_best is None:
            return None
        return cls(hook.save_best, rule=hook.rule, weights_only=hook.best_weights_only, ema=hook.use_ema)

    def before_run(self, run: Run) -> None:
        if not any(isinstance(hook, CheckpointHook) for hook in run.hooks):
            raise ConfigError(f"save_best={self.metric!r} without a CheckpointHook", remedy="add the hook that saves")
        if self._auto:
            self.metric = f"val/{run.validation[0].own}loss"
        super().before_run(run)

    def before_update(self, run: Run) -> None:
        """What was not saved at its own update is not the best one."""
        if self._offered is not None and dist.is_main():
            consequence = "none is kept" if self._folder is None else f"{self._folder} stays the best checkpoint"
            logger().warning("The best %s so far, %.6g at update %d, was not saved: %s.",
                             self.metric, self._offered.value, self._offered.updates, consequence)  # fmt: skip
        self._offered = None

    def after_val(self, run: Run, metrics: Mapping[str, float]) -> None:
        if not run.progress.updates or (value := self.value_of(run, metrics)) is None:
            return
        worst = math.inf if self.rule == "less" else -math.inf
        if not math.isfinite(value) and dist.is_main():
            logger().warning("%s is %g at update %d: it is not the best.", self.metric, value, run.progress.updates)
        if stored.better(value, worst if self._best is None else self._best.value, rule=self.rule):
            self._offered = Best(self.metric, self.rule, value, run.progress.updates, provenance=self._provenance)

    def wants_save(self) -> bool:
        return self._offered is not None

    def after_save_checkpoint(self, run: Run, path: Path) -> None:
        """The checkpoint of the present update is complete: if its value is the best, it is the best one now."""
        if self._offered is None:
            return
        former, best, self._offered = self._folder, self._offered, None
        self._settle(run, best, path)
        if dist.is_main():
            logger().info("Best checkpoint so far: %s (%s %.6g at update %d).",
                          self._folder, best.metric, best.value, best.updates)  # fmt: skip
            if former is not None and former != self._folder:
                _delete_weights(former, run.checkpoint_dir)

    def _settle(self, run: Run, best: Best, checkpoint: Path) -> None:
        """``checkpoint`` has ``best``: write its weights alone if asked, and the hint. A failure is a warning."""

        def settle() -> tuple[Path, int | None]:
            folder, commit = checkpoint, Manifest.read(checkpoint).commit
            try:
                if self._weights_only:
                    folder = self._write_weights(run.checkpoint_dir, best, checkpoint)
                stored.write_hint(run.checkpoint_dir, folder)
            except (OSError, UnigenError) as error:
                logger().warning("The best checkpoint is %s, complete and kept, but: %s", folder, error)
            return folder, commit if folder == checkpoint else None

        self._refer(run, best, *dist.on_main(settle))

    def _refer(self, run: Run, best: Best, folder: Path, commit: int | None) -> None:
        """``folder`` has ``best``. ``commit``: of the checkpoint of this run that retention must not delete."""
        home, own = run.checkpoint_dir.resolve(), folder.resolve()
        name = own.relative_to(home) if own.is_relative_to(home) else folder.absolute()
        self._best, self._folder, self._commit = replace(best, path=str(name)), folder, commit

    def _write_weights(self, home: Path, best: Best, checkpoint: Path) -> Path:
        """The weights of ``checkpoint`` with its config and tokenizer, on disk when this returns. Rank 0."""
        folder = stored.weights_folder(home, best.updates)
        make_directory(folder.parent)
        delete_inside(folder, home)  # of a branch of the run that a resume abandoned

        def add_files(staging: Path) -> None:
            shutil.copyfile(checkpoint / CONFIG_FILE, staging / CONFIG_FILE)
            if (checkpoint / TOKENIZER).is_dir():
                shutil.copytree(checkpoint / TOKENIZER, staging / TOKENIZER)
                for path in (staging / TOKENIZER).iterdir():
                    fsync_path(path)

        merge(checkpoint, folder, ema=self._ema, safe_serialization=True, add_files=add_files)
        return folder

    def keeps(self, manifest: Manifest) -> bool:
        return manifest.commit == self._commit

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint that is being saved: it is the best one itself if its value is."""
        best = self._offered or self._best
        return {} if best is None else best.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best = Best.from_state_dict(state)

    def after_load_checkpoint(self, run: Run, manifest: Mapping[str, Any]) -> None:
        """Find the best checkpoint again, which another engine or work dir may have written."""
        best, checkpoint = self._best, store.outer(Path(manifest["path"]))
        self._best = None
        if best is None:
            return
        folder = dist.on_main(lambda: best.where(checkpoint))
        problem = self.difference(best.metric, best.rule, best.provenance)
        if problem is None and not dist.on_main(folder.is_dir):
            problem = "it is not there any more"
        if problem is not None:
            if dist.is_main():
                logger().warning("%s (%s %.6g at update %d) is not the best checkpoint any more: %s. The next"
                                 " evaluation starts anew.",
                                 folder, best.metric, best.value, best.updates, problem)  # fmt: skip
            return
        if store.is_checkpoint_name(folder.name) and store.is_inside(run.checkpoint_dir, folder):
            self._settle(run, best, folder)
        else:
            self._refer(run, best, folder, None)
            dist.on_main(lambda: stored.write_hint(run.checkpoint_dir, folder))


def _delete_weights(former: Path, home: Path) -> None:
    """The former best, if it is weights alone of this run: a record may name any folder, also one of another run."""
    if re.fullmatch(r"update_\d+", former.name) and same(former.parent, home / stored.WEIGHTS):
        try:
            delete_inside(former, home)
        except OSError as error:
            logger().warning("The former best weights %s could not be deleted: %s", former, error)
