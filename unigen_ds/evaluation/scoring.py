"""An evaluation: the losses on validation data, and metrics of the model's answers to its records.

In: an engine (or a whole model on each process), ``Validation``, built metrics. Out: the losses, and a ``Result`` for
each metric with its provenance; a metric that fails is left out on all ranks. The values do not depend on the number of
processes, and no random generator is changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

from unigen_ds.core.errors import ConfigError
from unigen_ds.evaluation.generation import Answering, Answers, answers, ask, check_answers, inferencer_of
from unigen_ds.evaluation.metrics import Metric, evaluated
from unigen_ds.evaluation.metrics.base import NOT_USED
from unigen_ds.evaluation.provenance import Result
from unigen_ds.evaluation.validation import Validation, check_sets
from unigen_ds.inference.generated import BOTH, Kind
from unigen_ds.system import dist
from unigen_ds.system.journals import sample_digest
from unigen_ds.system.log import logger
from unigen_ds.system.seeding import kept_generators

_KINDS: tuple[Kind, ...] = ("text", "image", BOTH)
_WORDS = {"text": "texts", "image": "pictures", BOTH: "texts with pictures"}
"""What a model answers with."""
DEFINITION = 1
"""Version of ``val/loss`` and its parts; another number means that values changed."""


@dataclass(frozen=True)
class Evaluation:
    """The values on all sets of validation data; the same on all ranks."""

    results: Sequence[Result]
    """The losses of each set, with the values of ``Validation.losses``, and the metrics that have a value."""
    failures: Mapping[str, str]
    """Name of each other metric -> why it has none."""
    num_samples: int
    """Number of samples of the losses, over all sets and ranks."""

    @property
    def values(self) -> dict[str, float]:
        """The losses, and the metrics as ``val/<name>``, or ``val/<set>/<name>``."""
        values = {name: value for result in self.results for name, value in result.values.items()}
        return {name if name.startswith("val/") else f"val/{name}": value for name, value in values.items()}


def check(
    metrics: Sequence[Metric],
    backend: Any,
    sets: Sequence[Validation],
    *,
    where: str = "metrics",
    answering: Answering,
) -> None:
    """Raise ``ConfigError`` on all ranks where the model or the data cannot give what a metric scores. Collective."""
    check_sets(metrics, sets, where=where)
    for metric in metrics:
        if metric.predicts not in (*_KINDS, "loss"):
            raise ConfigError(f"{metric.name} scores {metric.predicts}, which no validation record is answered with",
                              allowed="metrics of texts, of images, of both in one answer, and of losses")  # fmt: skip
    limit = getattr(backend.model, "max_document_tokens", None)
    by_hand = "; score answers of your own: docs/metrics.md#answers-of-your-own"
    for one, (kind, names) in ((each, item) for each in sets for item in _kinds(each.metrics(metrics)).items()):
        if kind != "text":
            answering.drawing(backend)
        try:
            check_answers(inferencer_of(backend, one.data.processor)[1], kind)
        except ConfigError as error:
            number = next(k for k, metric in enumerate(metrics) if metric.predicts == kind)
            cls = type(metrics[number]).__name__
            problem = f"{where}[{number}]: {cls} needs {_WORDS[kind]} ({names}), and {error.problem}"
            remedy = error.remedy or f"delete {cls} from the metrics{by_hand}"
            raise ConfigError(problem, allowed=error.allowed, remedy=remedy) from error
        records, _ = dist.on_main(partial(ask, one.data, kind=kind, max_samples=1, limit=limit))
        if not records:
            raise ConfigError(
                f"no {one.record} has an answer of kind {kind} with a prompt before it, as {names} needs",
                remedy="other records in val_dataloader, or leave out the metric, or sets=[...] in it: the sets that it"
                f" scores{by_hand}",
            )


def evaluate_model(
    backend: Any,
    sets: Sequence[Validation],
    metrics: Sequence[Metric] = (),
    *,
    checkpoint: str = "",
    max_batches: int | None = None,
    max_samples: int | None = None,
    answering: Answering,
    made_by: Mapping[str, str] | None = None,
) -> Evaluation:
    """Losses and metrics of the present weights on each set of validation data. Collective; the same on all ranks. A
    metric that fails is a warning that names it, and is in ``failures``. ``backend``: or an object with its ``model``,
    ``device``, ``dp_rank`` and ``dp_size``. ``metrics``: as ``check`` has found them to be possible. ``checkpoint``,
    ``made_by``: as of ``evaluated``. ``max_samples``: records at most that the model answers; None: as many as
    ``max_batches`` (as of ``Validation.losses``) has.
    """
    results: list[Result] = []
    failures: dict[str, str] = {}
    num_samples = 0
    with kept_generators():
        for validation in sets:
            own = validation.metrics(metrics)
            values = validation.losses(backend, max_batches=max_batches)
            provenance = loss_provenance(validation, max_batches=max_batches, checkpoint=checkpoint,
                                         precision=str((made_by or {}).get("precision")))  # fmt: skip
            num_samples += int(provenance["num_samples"])
            results.append(Result(values, provenance))
            limit = max_samples
            if limit is None and max_batches is not None:
                limit = max_batches * validation.data.batch_size
            replies: dict[str, Answers | str] = {}
            for kind, names in _kinds(own).items():
                try:
                    replies[kind] = response = answers(backend, validation.data, kind, answering, max_samples=limit)
                except Exception as error:  # ``answers`` fails on every rank alike
                    replies[kind] = f"no {kind} could be generated: {type(error).__name__}: {error}"
                    continue
                for why, number in response.left_out.items() if dist.is_main() else ():
                    logger().info("Metrics of %s (%s): %d validation records are left out, %s; %d are answered.",
                                  _WORDS[kind], names, number, why, response.num_asked)  # fmt: skip
            for metric in own:
                result: Result | str
                if metric.predicts == "loss":
                    loss = values.get(validation.name_of("loss/text"))
                    data = {key: provenance[key] for key in ("num_samples", "samples", "checkpoint")}
                    result = "there is no loss of texts"
                    if loss is not None:
                        result = Result(metric.values(np.array([[loss]])), {**metric.provenance, **data})
                else:
                    result = _score(metric, replies[metric.predicts], checkpoint=checkpoint,
                                    made_by={**answering.facts(), **(made_by or {})})  # fmt: skip
                if isinstance(result, Result):
                    own_values = {validation.name_of(k, prefix=""): value for k, value in result.values.items()}
                    own_metric = validation.name_of(result.provenance["metric"], prefix="")
                    results.append(Result(own_values, {**result.provenance, "metric": own_metric}))
                    continue
                name = validation.name_of(metric.name, prefix="")
                failures[name] = result
                if dist.is_main():
                    logger().warning("The metric %s has no value this time: %s", name, result)
    return Evaluation(results, failures, num_samples)


def loss_provenance(
    validation: Validation, *, max_batches: int | None, checkpoint: str, precision: str
) -> dict[str, str]:
    """Where ``val/loss`` of a set and its parts come from; ``max_batches`` as of ``Validation.losses``."""
    data = validation.data
    settings = {"loss_weights": dict(validation.loss_weights), "max_batches": max_batches,
                "seq_length": data.seq_length}  # fmt: skip
    limit = None if max_batches is None else max_batches * data.batch_size
    samples = [draw.sample_id(data.names) for draws in data.draws(limit) for draw in draws]
    return {
        "metric": validation.name_of("loss"),
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


def _kinds(metrics: Sequence[Metric]) -> dict[Kind, str]:
    """Kind of answer -> names of the metrics that score it."""
    names = {kind: ", ".join(metric.name for metric in metrics if metric.predicts == kind) for kind in _KINDS}
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
