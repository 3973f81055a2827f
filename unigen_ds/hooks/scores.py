"""The metrics of an evaluation hook: built and checked at the start, each computed at its interval, stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from unigen_ds.core import dist
from unigen_ds.core.errors import ConfigError, raise_any
from unigen_ds.core.files import make_directory
from unigen_ds.core.log import logger
from unigen_ds.core.progress import Duration, Progress
from unigen_ds.core.registry import METRICS, component_problems
from unigen_ds.core.seeding import kept_generators
from unigen_ds.evaluation.metrics import Metric, build_metrics
from unigen_ds.evaluation.provenance import write_results
from unigen_ds.evaluation.scoring import Answering, Evaluation, check, evaluate, provenance_of
from unigen_ds.hooks.abandoned import set_aside
from unigen_ds.hooks.base import Run

FOLDER = "evaluations"
"""Of the work dir: ``<update>.json`` has the metrics of an update with their provenance."""
_WHERE = "EvaluateHook"


class Scores:
    """Methods are called on every rank, in the run's order.

    Args:
        specs: components, names of metrics, or one name; the key ``interval`` of one is not an argument of the metric.
        interval: of those without their own; None: at every evaluation.
        unit: of all intervals.
        max_samples, generation: as of ``EvaluateHook``.

    Raises ``ConfigError`` with all that is wrong, and for what is not installed.
    """

    def __init__(
        self,
        specs: str | Sequence[str | Mapping[str, Any]],
        *,
        interval: float | None,
        unit: str,
        max_samples: int | None,
        generation: Mapping[str, Any] | None,
    ) -> None:
        several = [specs] if isinstance(specs, str) else specs
        given = [{"type": spec} if isinstance(spec, str) else spec for spec in several]
        own = [{key: value for key, value in spec.items() if key != "interval"} for spec in given]
        problems = [component_problems(METRICS, spec, where=f"metrics[{k}]") for k, spec in enumerate(own)]
        raise_any(list(chain.from_iterable(problems)))
        self._intervals = [spec.get("interval", interval) for spec in given]
        for k, own_interval in enumerate(self._intervals):
            if own_interval is not None and not _is_positive(own_interval):
                raise ConfigError(
                    f"{_WHERE}.metrics[{k}].interval is {own_interval!r}", allowed=f"a number of {unit}s above 0"
                )
        self._answering = Answering.of(generation or {}, where=f"{_WHERE}.generation")
        with kept_generators():
            torch.manual_seed(0)  # a part that is not loaded from a file is the same on every rank and at every start
            self._metrics = build_metrics(own, where=f"{_WHERE}.metrics")
        self._unit, self._max_samples = unit, max_samples
        self._every: dict[str, Duration] = {}
        self._computed: dict[str, Progress] = {}
        self._logged: set[str] = set()
        self.complete = True
        """Whether the last evaluation has all metrics, so that a name that it lacks does not exist."""

    @property
    def names(self) -> list[str]:
        """What the names of each metric's values begin with."""
        return [metric.name for metric in self._metrics]

    def before_run(self, run: Run) -> None:
        """Raises ``ConfigError`` where the model or the data cannot give what a metric scores. Collective."""
        assert run.validation is not None, "checked with the config"
        check(self._metrics, run.backend, run.validation, where=f"{_WHERE}.metrics", answering=self._answering)
        self._every = {
            metric.name: run.ruler.duration(interval, self._unit)  # type: ignore[arg-type]
            for metric, interval in zip(self._metrics, self._intervals, strict=True)
            if interval is not None
        }

    def after_load_checkpoint(self, run: Run) -> None:
        """Results of updates that the run has gone back from are not among the others."""
        if dist.is_main():
            set_aside(run.work_dir / FOLDER, after=run.progress.updates)

    def provenance(self, run: Run, name: str, *, max_batches: int | None, use_ema: bool) -> dict[str, str]:
        """Where the values ``name`` of this run come from. Collective; the same on all ranks."""
        validation = run.validation
        assert validation is not None, "checked with the config"
        precision = str(run.backend.topology().get("precision"))
        return dist.on_main(lambda: provenance_of(
            name, validation, self._metrics, max_batches=max_batches, max_samples=self._max_samples,
            answering=self._answering, made_by={"precision": precision, "weights": "EMA" if use_ema else "trained"},
        ))  # fmt: skip

    def evaluate(self, run: Run, *, max_batches: int | None, use_ema: bool) -> dict[str, float]:
        """Losses and the metrics that are due, with the present weights. Collective; the same on all ranks."""
        assert run.validation is not None, "checked with the config"
        due = [metric for metric in self._metrics if self._is_due(metric, run)]
        found = evaluate(
            run.backend, run.validation, due,
            checkpoint=f"{run.work_dir} (update {run.progress.updates}){' EMA' if use_ema else ''}",
            max_batches=max_batches, max_samples=self._max_samples, answering=self._answering, resamples=0,
            made_by={"precision": str(run.backend.topology().get("precision"))}, logged=self._logged,
        )  # fmt: skip
        for metric in due:
            if metric.name in self._every:
                self._computed[metric.name] = run.progress
        self.complete = len(due) == len(self._metrics) and not found.failed
        if found.results and dist.is_main():
            _store(run, found)
        return found.values

    def _is_due(self, metric: Metric, run: Run) -> bool:
        """At its interval, at the end of the training, and before it."""
        every = self._every.get(metric.name)
        if every is None or run.finished or run.progress.updates == 0:
            return True
        return every.every(run.progress, self._computed.get(metric.name, Progress()))

    def state_dict(self) -> dict[str, Any]:
        found = {name: progress.state_dict() for name, progress in self._computed.items()}
        return {"computed": found} if found else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        found = state.get("computed", {})
        self._computed = {name: Progress.from_state_dict(one) for name, one in found.items()}


def _is_positive(given: Any) -> bool:
    return isinstance(given, (int, float)) and not isinstance(given, bool) and given > 0


def _store(run: Run, found: Evaluation) -> None:
    path = run.work_dir / FOLDER / f"{run.progress.updates}.json"
    try:
        make_directory(path.parent)
        write_results(path, [found.loss_result(), *found.results])
    except OSError as error:
        logger().warning("The metrics of update %d are not stored with their provenance: %s",
                         run.progress.updates, error)  # fmt: skip
