"""An evaluation: the losses on validation data, and metrics of the model's answers to its records.

In: ``Validation``, an engine (or a whole model on each process), built metrics. Out: the losses, and a ``Result`` for
each metric with its provenance; a metric that fails is left out on all ranks. The values do not depend on the number of
processes, and no random generator is changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

from unigen_ds.config.registry import METRICS
from unigen_ds.core.errors import ConfigError, suggestion
from unigen_ds.data.batches.statistics import source_lines
from unigen_ds.data.batches.validation_data import ValidationData
from unigen_ds.data.datasets.subset import whole_of
from unigen_ds.data.settings import ValDataloader
from unigen_ds.evaluation.generation import Answering, Answers, answers, ask, check_answers, inferencer_of
from unigen_ds.evaluation.metrics import Metric, evaluated
from unigen_ds.evaluation.metrics.base import NOT_USED
from unigen_ds.evaluation.provenance import Result
from unigen_ds.evaluation.validation import mean_losses
from unigen_ds.inference.generated import BOTH, Kind
from unigen_ds.system import dist
from unigen_ds.system.journals import sample_digest
from unigen_ds.system.log import logger
from unigen_ds.system.seeding import kept_generators

_WORDS: dict[Kind, str] = {"text": "texts", "image": "pictures", BOTH: "texts with pictures"}
"""What a model answers with."""
PREFIX = "val/"
"""What the names of all values begin with."""
DEFINITION = 1
"""Version of ``val/loss`` and its parts; another number means that values changed."""


@dataclass(frozen=True)
class Evaluation:
    """The values on the validation data; the same on all ranks."""

    results: Sequence[Result]
    """The losses, ``val/loss`` with its parts, and the metrics that have a value; of each set."""
    failures: Mapping[str, str]
    """Name of each other metric -> why it has none."""
    num_samples: int
    """Number of samples of the losses, over all ranks."""

    @property
    def values(self) -> dict[str, float]:
        """The losses, and the metrics as ``val/<name>``, or ``val/<set>/<name>``."""
        values = {name: value for result in self.results for name, value in result.values.items()}
        return {name if name.startswith(PREFIX) else f"{PREFIX}{name}": value for name, value in values.items()}


@dataclass(frozen=True)
class _ValidationSet:
    """One set of data, by its name, which is empty where it is the only one."""

    name: str
    data: ValidationData
    metrics: Sequence[str]
    """Classes or names of the metrics that score it; empty: all."""

    def scored_by(self, metrics: Sequence[Metric]) -> list[Metric]:
        return [one for one in metrics if not self.metrics or {type(one).__name__, one.name} & {*self.metrics}]

    def rename(self, name: str) -> str:
        """``val/loss`` and ``bleu`` are ``val/<set>/loss`` and ``<set>/bleu``."""
        prefix = PREFIX if name.startswith(PREFIX) else ""
        return f"{prefix}{self.name}/{name.removeprefix(prefix)}" if self.name else name


class Validation:
    """What a run is evaluated on: one set of data, or several by name, whose values have the name of their set. Nothing
    outside of this class knows how many there are. Without data it is false.
    """

    def __init__(
        self,
        section: ValDataloader | None,
        build_data: Callable[[ValDataloader], ValidationData],
        loss_weights: Mapping[str, float],
    ) -> None:
        """``build_data``: reads what one section names. ``loss_weights``: of each term."""
        loaders = section.sets if section is not None else {}
        self._sets = [_ValidationSet(name, build_data(loader), loader.metrics) for name, loader in loaders.items()]
        self._loss_weights = loss_weights
        self.names = tuple(f"{one.name}/{name}" if one.name else name for one in self._sets for name in one.data.names)
        self.fitted_sources = tuple(source for one in self._sets for source in one.data.fitted_sources)
        self.datasets = tuple(source.dataset for source in self.fitted_sources)

    def __bool__(self) -> bool:
        return bool(self._sets)

    def __len__(self) -> int:
        return sum(map(len, self.fitted_sources))

    @property
    def main_loss(self) -> str:
        """``val/loss``, of several sets that of the first."""
        return self._sets[0].rename(f"{PREFIX}loss")

    @property
    def batch_size(self) -> int:
        return self._sets[0].data.batch_size

    def num_batches(self, max_batches: int | None = None, *, dp_size: int = 1) -> int:
        """How many batches an evaluation computes on each rank."""
        return sum(one.data.num_batches(max_batches, dp_size=dp_size) for one in self._sets)

    def start_lines(self) -> Iterator[str]:
        """What a start reports of each source."""
        for name, source in zip(self.names, self.fitted_sources, strict=True):
            title, records, whole = name.replace("/", ", ", 1), len(source.dataset), len(whole_of(source.dataset))
            yield f"Validation, {title}: {records:,} of {whole:,} records."
            yield from (f"Validation, {title}: {line}." for _, line in source_lines(name, source))

    def check(self, metrics: Sequence[Metric], backend: Any, *, answering: Answering, where: str = "metrics") -> None:
        """Raise ``ConfigError`` on all ranks where model or data cannot give what a metric scores. Collective."""
        for metric in metrics:
            if metric.predicts not in (*_WORDS, "loss"):
                problem = f"{metric.name} scores {metric.predicts}, which no validation record is answered with"
                raise ConfigError(problem, allowed="metrics of texts, of images, of both in one answer, and of losses")
        names = {name for metric in metrics for name in (type(metric).__name__, metric.name)}
        for one in self._sets:
            for name in one.metrics:
                if name not in names and METRICS.get(name) is None:
                    section = f"val_dataloader.{one.name}" if one.name else "val_dataloader"
                    raise ConfigError(f"{section}.metrics has {name!r}", allowed=", ".join(sorted(names)))
            _check(metrics, one, backend, where=where, answering=answering)
        for number, metric in enumerate(metrics):
            if not any(metric in one.scored_by(metrics) for one in self._sets):
                kind = type(metric).__name__
                raise ConfigError(f"{where}[{number}] is {kind}, which no set of val_dataloader has in its metrics",
                                  remedy=f"add {kind!r} to the metrics of a set, or delete it here")  # fmt: skip

    def check_name(
        self, name: str, metrics: Sequence[Metric], terms: Iterable[str], *, where: str, prefix: str = PREFIX
    ) -> None:
        """Raise ``ConfigError`` where no evaluation can have a value of that name. ``prefix``: what all names begin
        with. Which sources and groups of a term have targets is known only after an evaluation, so names below a term
        are accepted here.
        """
        names: list[str] = []
        for one in self._sets:
            begin = f"{prefix}{one.name}/" if one.name else prefix
            of_metrics = [f"{begin}{metric.name}" for metric in one.scored_by(metrics)]
            of_terms = [f"{begin}loss/{term}" for term in terms]
            names += [f"{begin}loss", *of_terms, *of_metrics]
            if name == f"{begin}loss" or "/".join(name.split("/")[: begin.count("/") + 2]) in of_terms:
                return
            if name.startswith(tuple(of_metrics)):
                return
        raise ConfigError(
            f"{where} is {name!r}, which no evaluation of this run has",
            allowed=", ".join(names),
            remedy=suggestion(name, names),
        )

    def provenance(
        self, name: str, metrics: Sequence[Metric], *, answering: Answering, max_batches: int | None,
        max_samples: int | None, precision: str,
    ) -> dict[str, str]:  # fmt: skip
        """Where the values ``name`` come from, known before the first."""
        one = next((each for each in self._sets if name.startswith(each.rename(PREFIX))), self._sets[0])
        loss = self._loss_provenance(one.data, max_batches=max_batches, checkpoint="", precision=precision)
        value = name.removeprefix(one.rename(PREFIX))
        of_value = [metric for metric in one.scored_by(metrics) if value.startswith(metric.name)]
        if not of_value:
            return {**loss, "metric": one.rename(loss["metric"])}
        metric = max(of_value, key=lambda each: len(each.name))
        data = {key: loss[key] for key in ("num_samples", "samples")} | answering.facts()
        return {**metric.provenance, **data, "max_samples": str(max_samples)}

    def evaluate(
        self,
        backend: Any,
        metrics: Sequence[Metric],
        *,
        checkpoint: str,
        max_batches: int | None,
        max_samples: int | None,
        answering: Answering,
        made_by: Mapping[str, str],
    ) -> Evaluation:
        """Losses and metrics of the present weights on each set of data. Collective; the same on all ranks. A metric
        that fails is a warning that names it, and is in ``failures``. ``backend``: or an object with its ``model``,
        ``device``, ``dp_rank`` and ``dp_size``. ``metrics``: as ``check`` has found them to be possible.
        ``checkpoint``, ``made_by``: as of ``evaluated``. ``max_samples``: records at most that the model answers; None:
        as many as ``max_batches`` (of the losses) has.
        """
        results: list[Result] = []
        failures: dict[str, str] = {}
        num_samples, precision = 0, str(made_by.get("precision"))
        with kept_generators():
            for one in self._sets:
                values = mean_losses(backend, one.data, self._loss_weights, max_batches=max_batches)
                provenance = self._loss_provenance(one.data, max_batches=max_batches, checkpoint=checkpoint,
                                                   precision=precision)  # fmt: skip
                num_samples += int(provenance["num_samples"])
                limit = None if max_batches is None else max_batches * one.data.batch_size
                loss = Result(values, provenance)
                scores = _scores(backend, one.data, one.scored_by(metrics), loss, answering, made_by=made_by,
                                 max_samples=limit if max_samples is None else max_samples)  # fmt: skip
                for name, result in {"": loss, **scores}.items():
                    if isinstance(result, Result):
                        own_values = {one.rename(key): value for key, value in result.values.items()}
                        metric = one.rename(result.provenance["metric"])
                        results.append(Result(own_values, {**result.provenance, "metric": metric}))
                        continue
                    failures[one.rename(name)] = result
                    if dist.is_main():
                        logger().warning("The metric %s has no value this time: %s", one.rename(name), result)
        return Evaluation(results, failures, num_samples)

    def _loss_provenance(
        self, data: ValidationData, *, max_batches: int | None, checkpoint: str, precision: str
    ) -> dict[str, str]:
        """Where ``val/loss`` of a set and its parts come from."""
        settings = {"loss_weights": dict(self._loss_weights), "max_batches": max_batches,
                    "seq_length": data.seq_length}  # fmt: skip
        limit = None if max_batches is None else max_batches * data.batch_size
        samples = [draw.sample_id(data.names) for draws in data.draws(limit) for draw in draws]
        return {
            "metric": f"{PREFIX}loss",
            "version": f"unigen_ds definition {DEFINITION}",
            "settings": json.dumps(settings, sort_keys=True, default=str),
            "resize": NOT_USED,
            "precision": precision,
            "seed": str(data.seed),
            "model": NOT_USED,
            "num_samples": str(len(samples)),
            "samples": sample_digest([*samples, *(source.fingerprint for source in data.sources)]),
            "checkpoint": checkpoint,
        }


def _check(metrics: Sequence[Metric], one: _ValidationSet, backend: Any, *, where: str, answering: Answering) -> None:
    data, own = one.data, one.scored_by(metrics)
    limit = getattr(backend.model, "max_document_tokens", None)
    by_hand = "; score answers of your own: docs/evaluation/metrics.md#answers-of-your-own"
    for kind, names in _kinds(own).items():
        if kind != "text":
            answering.drawing(backend)
        try:
            check_answers(inferencer_of(backend, data.processor)[1], kind)
        except ConfigError as error:
            number = next(k for k, metric in enumerate(metrics) if metric in own and metric.predicts == kind)
            cls = type(metrics[number]).__name__
            problem = f"{where}[{number}]: {cls} needs {_WORDS[kind]} ({names}), and {error.problem}"
            remedy = error.remedy or f"delete {cls} from the metrics{by_hand}"
            raise ConfigError(problem, allowed=error.allowed, remedy=remedy) from error
        records, _ = dist.on_main(partial(ask, data, kind=kind, max_samples=1, limit=limit))
        if not records:
            raise ConfigError(
                f"no validation record has an answer of kind {kind} with a prompt before it, as {names} needs, in"
                f" {', '.join(data.names)}",
                remedy="other records in val_dataloader, or leave out the metric, or of several sets metrics=[...] in"
                f" each, those that score it{by_hand}",
            )


def _scores(
    backend: Any, data: ValidationData, metrics: Sequence[Metric], loss: Result, answering: Answering, *,
    max_samples: int | None, made_by: Mapping[str, str],
) -> dict[str, Result | str]:  # fmt: skip
    """The result of each metric by its name, or why it has none. Collective; the same on all ranks."""
    replies: dict[str, Answers | str] = {}
    for kind, names in _kinds(metrics).items():
        try:
            replies[kind] = response = answers(backend, data, kind, answering, max_samples=max_samples)
        except Exception as error:  # ``answers`` fails on every rank alike
            replies[kind] = f"no {kind} could be generated: {type(error).__name__}: {error}"
            continue
        for why, number in response.left_out.items() if dist.is_main() else ():
            logger().info("Metrics of %s (%s): %d validation records are left out, %s; %d are answered.",
                          _WORDS[kind], names, number, why, response.num_asked)  # fmt: skip
    scores: dict[str, Result | str] = {}
    for metric in metrics:
        if metric.predicts == "loss":
            mean = loss.values.get(f"{PREFIX}loss/text")
            facts = {key: loss.provenance[key] for key in ("num_samples", "samples", "checkpoint")}
            scores[metric.name] = "there is no loss of texts"
            if mean is not None:
                scores[metric.name] = Result(metric.values(np.array([[mean]])), {**metric.provenance, **facts})
        else:
            scores[metric.name] = _score(metric, replies[metric.predicts], checkpoint=loss.provenance["checkpoint"],
                                         made_by={**answering.facts(), **made_by})  # fmt: skip
    return scores


def _kinds(metrics: Sequence[Metric]) -> dict[Kind, str]:
    """Kind of answer -> names of the metrics that score it."""
    names = {kind: ", ".join(metric.name for metric in metrics if metric.predicts == kind) for kind in _WORDS}
    return {kind: names for kind, names in names.items() if names}


def _score(metric: Metric, replies: Answers | str, **options: Any) -> Result | str:
    """The metric's result, or on all ranks why it has none. Collective."""
    if isinstance(replies, str):
        return replies

    def to_rgb(answer: Any) -> Any:  # as metrics read it: a model may draw in shades of gray
        if isinstance(answer, tuple):
            return tuple(map(to_rgb, answer))
        return answer.convert("RGB") if isinstance(answer, Image.Image) else answer

    # a picture is compared with a picture, or with the text that it was asked for
    prompts = metric.compares == "prompt" or (metric.predicts == "image" and metric.compares == "text")
    problem = None
    try:
        metric.reset()
        references = [one.prompt if prompts else to_rgb(one.reference) for one in replies.mine]
        metric.update([to_rgb(one.prediction) for one in replies.mine], references, [one.key for one in replies.mine])
    except Exception as error:
        problem = f"rank {dist.rank()}: {type(error).__name__}: {error}"
    problems = [each for each in dist.gather_objects(problem) if each is not None]
    try:
        return problems[0] if problems else evaluated(metric, **options)
    except Exception as error:  # of rank 0's computation, raised on every rank alike
        return f"{type(error).__name__}: {error}"
    finally:
        metric.reset()
