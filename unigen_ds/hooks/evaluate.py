"""Evaluate on the validation data at an interval, at the end of a run, and before it if wanted."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt

from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.core import dist
from unigen_ds.core.clock import EVALUATION
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.log import logger
from unigen_ds.core.progress import Duration
from unigen_ds.core.registry import HOOKS
from unigen_ds.evaluation.generation import trained_family
from unigen_ds.evaluation.validation import Validation
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.hooks.best import BestCheckpoint, rule_of
from unigen_ds.hooks.ema import ema_of
from unigen_ds.hooks.result_names import PREFIX, ResultNames
from unigen_ds.hooks.scores import Scores


@HOOKS.register_module()
class EvaluateHook(Hook):
    """Computes ``val/loss`` and its parts ([evaluation.md](evaluation.md)) and calls ``after_val`` of every hook with
    them. The training is not changed by a bit: generators, running statistics, dropout and the engine's state are those
    of a run without evaluation.

    Args:
        interval: between evaluations, in ``unit``; the end of the training is always evaluated. -1: only then.
        by_epoch: whether ``interval`` means epochs; False: iterations.
        unit: of ``interval``, in place of ``by_epoch``: ``'epoch'``, ``'iteration'`` or ``'update'``.
        at_start: also before the first update.
        max_batches: at most so many times ``val_dataloader.batch_size`` samples, over all processes, spread evenly over
            each source; None: all.
        use_ema: the weights are those of the ``EMAHook``.
        metrics: further metrics ([metrics.md](metrics.md)): names, ``['BLEU']``, or components,
            ``[dict(type='BLEU')]``, each of which may have an ``interval`` of its own, in ``unit``.
        metric_interval: between computations of each metric without its own ``interval``, in ``unit``; None: at every
            evaluation. At the end of the training, and with ``at_start``, all are computed.
        max_samples: records at most that the model answers for metrics; None: as many as ``max_batches`` has.
        generation: how it answers them: ``max_new_tokens`` (64), ``temperature`` (0), ``top_p``, ``batch_size``
            (``val_dataloader``'s), ``seed`` (``val_dataloader``'s) and ``flow``, as of ``PreviewHook``.
        save_best: a name of the results, such as ``val/loss``, which ``'auto'`` means: the checkpoint with the best
            value is saved when it is found and never deleted as an old one
            ([evaluation.md](evaluation.md#the-best-checkpoint)).
        rule: ``'less'`` or ``'greater'`` is better; None: inferred from the name, as mmengine does.
        best_weights_only: keep the best weights alone, in ``best_weights/``, instead of a whole checkpoint.
        empty_cache: release the unused memory of CUDA before and after.
    """

    name = "evaluate"

    def __init__(
        self,
        interval: float = 1,
        *,
        by_epoch: bool = True,
        unit: Literal["epoch", "iteration", "update"] | None = None,
        at_start: bool = False,
        max_batches: Annotated[int, Ge(1)] | None = None,
        use_ema: bool = False,
        metrics: str | Sequence[str | Mapping[str, Any]] = (),
        metric_interval: Annotated[float, Gt(0)] | None = None,
        max_samples: Annotated[int, Ge(1)] | None = None,
        generation: Mapping[str, Any] | None = None,
        save_best: str | None = None,
        rule: str | None = None,
        best_weights_only: bool = False,
        empty_cache: bool = False,
    ) -> None:
        if interval <= 0 and interval != -1:
            raise ConfigError(f"EvaluateHook.interval is {interval}", allowed="a positive number, or -1")
        if metric_interval is not None and not metrics:
            raise ConfigError("EvaluateHook.metric_interval has no effect without metrics")
        if save_best is None and (rule is not None or best_weights_only):
            raise ConfigError("EvaluateHook.rule and best_weights_only have no effect without save_best")
        if (max_samples is not None or generation) and not metrics:
            raise ConfigError("EvaluateHook.max_samples and generation have no effect without metrics")
        self.interval, self.unit = interval, unit or ("epoch" if by_epoch else "iteration")
        self.at_start, self.max_batches, self.use_ema = at_start, max_batches, use_ema
        self.empty_cache = empty_cache
        self._scores = Scores(
            metrics, interval=metric_interval, unit=self.unit, max_samples=max_samples, generation=generation
        )
        self.best = None
        if save_best is not None:
            name = "val/loss" if save_best == "auto" else save_best
            self._check_rule(name, rule)
            self.best = BestCheckpoint(name, rule=rule, weights_only=best_weights_only, ema=use_ema)
        self._every: Duration | None = None
        self._evaluated: tuple[int, Mapping[str, float]] | None = None

    def _check_rule(self, name: str, rule: str | None) -> None:
        """Raises ``ConfigError``: for an unknown name where the rule cannot be inferred from it, which is the cause."""
        try:
            rule_of(name, rule)
        except ConfigError:
            ResultNames(("<term>",), self._scores.names).check(name, where="EvaluateHook.save_best")
            raise

    def before_run(self, run: Run) -> None:
        if self.use_ema and ema_of(run) is None:
            raise ConfigError("EvaluateHook.use_ema is True and there is no EMAHook", remedy="add one to custom_hooks")
        self._every = run.ruler.duration(self.interval, self.unit) if self.interval > 0 else None
        self._scores.before_run(run)
        if self.best is not None:
            self.result_names(run).check(self.best.metric, where="EvaluateHook.save_best")
            self.best.before_run(run, provenance=self.provenance(run, self.best.metric))

    def result_names(self, run: Run) -> ResultNames:
        """What its evaluations of this run can have. Other hooks ask before their own ``before_run``."""
        return ResultNames(tuple(trained_family(run.backend)[0].terms), self._scores.names)

    def provenance(self, run: Run, name: str) -> Mapping[str, str]:
        """Where its values ``name`` come from; the same in all evaluations of this run. Collective."""
        return self._scores.provenance(run, name, max_batches=self.max_batches, use_ema=self.use_ema)

    def after_load_checkpoint(self, run: Run, manifest: Mapping[str, Any]) -> None:
        self._scores.after_load_checkpoint(run)
        if self.best is not None:
            self.best.after_load_checkpoint(run, manifest)

    def before_update(self, run: Run) -> None:
        if self.best is not None:
            self.best.before_update()
        if self.at_start and run.progress.updates == 0:
            self.evaluate(run)

    def after_update(self, run: Run, result: UpdateResult) -> None:
        due = self._every is not None and self._every.every(run.progress, run.previous)
        if due or run.finished:
            self.evaluate(run)

    def after_train(self, run: Run) -> None:
        if self.best is not None:
            self.best.after_train()

    def evaluate(self, run: Run) -> Mapping[str, float]:
        """Now, at the present weights. Collective. Returns what ``after_val`` of every hook is called with."""
        for hook in run.hooks:
            hook.before_val(run)
        begun = time.perf_counter()
        with run.clock(EVALUATION):
            self._empty_cache()
            values = self._values(run)
            self._empty_cache()
        self._evaluated = (run.progress.updates, values)
        if dist.is_main():
            logger().info("Evaluation: %d samples in %.1f s.", self._num_samples(run), time.perf_counter() - begun)
        if self.best is not None and run.progress.updates:
            self.best.offer(run, values, complete=self.complete)
        for hook in run.hooks:
            hook.after_val(run, values)
        return values

    def _values(self, run: Run) -> Mapping[str, float]:
        ema = ema_of(run) if self.use_ema else None
        with ema.swapped(run) if ema is not None else nullcontext():
            return self._scores.evaluate(run, max_batches=self.max_batches, use_ema=self.use_ema)

    @property
    def complete(self) -> bool:
        """Whether the last evaluation has all metrics, so that a name that it lacks does not exist."""
        return self._scores.complete

    def _num_samples(self, run: Run) -> int:
        data = _validation(run).data
        return len(data) if self.max_batches is None else min(len(data), self.max_batches * data.batch_size)

    def _empty_cache(self) -> None:
        if self.empty_cache and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def before_save_checkpoint(self, run: Run, metrics: dict[str, float]) -> None:
        """A checkpoint has the values of its own update."""
        if self._evaluated is not None and self._evaluated[0] == run.progress.updates:
            metrics.update(self._evaluated[1])

    def wants_save(self) -> bool:
        return self.best is not None and self.best.wants_save()

    def after_save_checkpoint(self, run: Run, path: Path) -> None:
        if self.best is not None:
            self.best.after_save_checkpoint(run, path)

    def keeps(self, manifest: Manifest) -> bool:
        return self.best is not None and self.best.keeps(manifest)

    def state_dict(self) -> dict[str, Any]:
        return {**self._scores.state_dict(), **({} if self.best is None else self.best.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._scores.load_state_dict(state)
        if self.best is not None:
            self.best.load_state_dict(state)


def check_result(run: Run, name: str, *, where: str, prefix: str = PREFIX) -> EvaluateHook | None:
    """The run's ``EvaluateHook``. Raises ``ConfigError`` where it can have no value of that name."""
    found = next((hook for hook in run.hooks if isinstance(hook, EvaluateHook)), None)
    if found is not None:
        found.result_names(run).check(name, where=where, prefix=prefix)
    return found


def _validation(run: Run) -> Validation:
    assert run.validation is not None, "checked with the config"
    return run.validation
