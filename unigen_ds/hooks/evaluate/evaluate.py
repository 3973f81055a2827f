"""Evaluate on the validation data at an interval, at the end of a run, and before it if wanted."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt

from unigen_ds.config.registry import HOOKS
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.progress import Progress
from unigen_ds.evaluation.generation import Answering, trained_family
from unigen_ds.evaluation.metrics import build_metrics
from unigen_ds.evaluation.provenance import write_results
from unigen_ds.evaluation.scoring import PREFIX, Evaluation
from unigen_ds.hooks.base import Hook, Run, UpdateResult, is_due
from unigen_ds.hooks.evaluate.ema import average_of, ema_of
from unigen_ds.system import dist
from unigen_ds.system.clock import EVALUATION
from unigen_ds.system.files import make_directory
from unigen_ds.system.log import logger
from unigen_ds.system.seeding import kept_generators

_FOLDER = "evaluations"
"""Folder in the work dir whose ``<update>.json`` has the metrics of an update with their provenance."""


@HOOKS.register_module()
class EvaluateHook(Hook):
    """Computes ``val/loss`` and its parts (``docs/evaluation``) and calls ``after_val`` of every hook with
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
        metrics: further metrics ([metrics](evaluation/metrics.md)): names, ``['BLEU']``, or components,
            ``[dict(type='BLEU')]``.
        metric_interval: between computations of the metrics, in ``unit``; None: at every evaluation. At the end of the
            training, and with ``at_start``, they are computed, too.
        max_samples: records at most that the model answers for metrics; None: as many as ``max_batches`` has.
        generation: how it answers them: ``max_new_tokens`` (64), ``temperature`` (0), ``top_p``, ``batch_size``
            (``val_dataloader``'s), ``seed`` (``val_dataloader``'s) and ``flow``, as of ``PreviewHook``.
        save_best: a name of the results, such as ``val/loss``, which ``'auto'`` means (of several sets the first's):
            the checkpoint with the best value is saved when it is found and never deleted as an old one
            ([the best checkpoint](evaluation/best_checkpoint.md)).
        rule: ``'less'`` or ``'greater'`` is better; None: inferred from the name, as mmengine does.
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
        rule: Literal["less", "greater"] | None = None,
        empty_cache: bool = False,
    ) -> None:
        if interval <= 0 and interval != -1:
            raise ConfigError(f"EvaluateHook.interval is {interval}", allowed="a positive number, or -1")
        of_metrics = {"metric_interval": metric_interval, "max_samples": max_samples, "generation": generation}
        for name, value in of_metrics.items():
            if value and not metrics:
                raise ConfigError(f"EvaluateHook.{name} has no effect without metrics")
        if rule is not None and save_best is None:
            raise ConfigError("EvaluateHook.rule has no effect without save_best")
        self.interval, self.unit = interval, unit or ("epoch" if by_epoch else "iteration")
        self.at_start, self.max_batches, self.use_ema = at_start, max_batches, use_ema
        self.empty_cache, self.max_samples = empty_cache, max_samples
        self._answering = Answering.of(generation or {}, where="EvaluateHook.generation")
        specs = [metrics] if isinstance(metrics, str) else metrics
        components = [{"type": spec} if isinstance(spec, str) else spec for spec in specs]
        with kept_generators():
            torch.manual_seed(0)  # a part that no file has is the same on every rank and at every start
            self._metrics = build_metrics(components, where="EvaluateHook.metrics")
        self.metric_interval = metric_interval
        self.save_best, self.rule = save_best, rule
        self._last_metrics = Progress()
        """When the metrics were computed last."""
        self._last_values: tuple[int, Mapping[str, float]] | None = None
        self.complete = True
        """Whether the last evaluation has all metrics, so that a name that it lacks does not exist."""

    def before_run(self, run: Run) -> None:
        """Raises ``ConfigError`` where the model or the data cannot give what a metric scores. Collective."""
        if self.use_ema and ema_of(run) is None:
            raise ConfigError("EvaluateHook.use_ema is True and there is no EMAHook", remedy="add one to custom_hooks")
        run.validation.check(self._metrics, run.backend, answering=self._answering, where="EvaluateHook.metrics")

    def provenance(self, run: Run, name: str) -> Mapping[str, str]:
        """Where the values ``name`` come from, known before the first. Collective; the same on all ranks."""
        precision = str(run.backend.topology().get("precision"))
        options: dict[str, Any] = {
            "answering": self._answering, "max_batches": self.max_batches, "max_samples": self.max_samples,
        }  # fmt: skip
        facts = dist.on_main(lambda: run.validation.provenance(name, self._metrics, precision=precision, **options))
        return {**facts, "precision": precision, "weights": "EMA" if self.use_ema else "trained"}

    def after_load_checkpoint(self, run: Run, manifest: Mapping[str, Any]) -> None:
        """Results of updates that the run has gone back from are not among the others."""
        set_aside(run.work_dir / _FOLDER, after=run.progress.updates)

    def before_update(self, run: Run) -> None:
        if self.at_start and run.progress.updates == 0:
            self.evaluate(run)

    def after_update(self, run: Run, result: UpdateResult) -> None:
        if run.finished or (self.interval > 0 and is_due(run, self.interval, self.unit)):
            self.evaluate(run)

    def evaluate(self, run: Run) -> Mapping[str, float]:
        """Now, at the present weights. Collective. Returns what ``after_val`` of every hook is called with."""
        for hook in run.hooks:
            hook.before_val(run)
        start, empties = time.perf_counter(), self.empty_cache and torch.cuda.is_available()
        with run.clock(EVALUATION):
            if empties:
                torch.cuda.empty_cache()
            evaluation = self._values(run)
            if empties:
                torch.cuda.empty_cache()
        values = evaluation.values
        self._last_values = (run.progress.updates, values)
        logger().info("Evaluation: %d samples in %.1f s.", evaluation.num_samples, time.perf_counter() - start)
        for hook in run.hooks:
            hook.after_val(run, values)
        return values

    def _values(self, run: Run) -> Evaluation:
        """Losses and, where they are due, the metrics. Collective; the same on all ranks."""
        progress, interval = run.progress, self.metric_interval
        due = interval is None or run.finished or progress.updates == 0
        due = due or is_due(run, interval, self.unit, since=self._last_metrics)
        with average_of(run, use=self.use_ema):
            evaluation = run.validation.evaluate(
                run.backend, self._metrics if due else [],
                checkpoint=f"{run.work_dir} (update {progress.updates}){' EMA' if self.use_ema else ''}",
                max_batches=self.max_batches, max_samples=self.max_samples, answering=self._answering,
                made_by={"precision": str(run.backend.topology().get("precision"))},
            )  # fmt: skip
        self._last_metrics = progress if due else self._last_metrics
        self.complete = (due or not self._metrics) and not evaluation.failures
        has_metrics = any(not result.provenance["metric"].startswith(PREFIX) for result in evaluation.results)
        if has_metrics and dist.is_main():
            path = run.work_dir / _FOLDER / f"{progress.updates}.json"
            try:
                make_directory(path.parent)
                write_results(path, evaluation.results)
            except OSError as error:
                logger().warning("The metrics of update %d are not stored with their provenance: %s",
                                 progress.updates, error)  # fmt: skip
        return evaluation

    def before_save_checkpoint(self, run: Run, metrics: dict[str, float]) -> None:
        """A checkpoint has the values of its own update."""
        if self._last_values is not None and self._last_values[0] == run.progress.updates:
            metrics.update(self._last_values[1])

    def state_dict(self) -> dict[str, Any]:
        return {"computed": asdict(self._last_metrics)} if self.metric_interval is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "computed" in state:
            self._last_metrics = Progress(**state["computed"])


def check_result(run: Run, name: str, *, where: str, prefix: str = PREFIX) -> EvaluateHook | None:
    """The run's ``EvaluateHook``. Raises ``ConfigError`` where it can have no value of that name."""
    hook = next((hook for hook in run.hooks if isinstance(hook, EvaluateHook)), None)
    if hook is not None:
        terms = trained_family(run.backend)[0].terms
        run.validation.check_name(name, hook._metrics, terms, where=where, prefix=prefix)
    return hook


def set_aside(folder: Path, *, after: int) -> None:
    """Move the files ``<update>.*`` of updates that the run has gone back from to ``abandoned``, on rank 0."""
    if not dist.is_main():
        return
    later = [path for path in folder.glob("*.*") if path.stem.isdigit() and int(path.stem) > after]
    if not later:
        return
    try:
        (folder / "abandoned").mkdir(exist_ok=True)
        for path in later:
            path.replace(folder / "abandoned" / path.name)
    except OSError as error:
        logger().warning("Files after update %d could not be moved to %s: %s", after, folder / "abandoned", error)
    else:
        logger().info("%s: %d file(s) after update %d are moved to abandoned.", folder.name, len(later), after)
