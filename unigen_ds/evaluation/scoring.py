"""Metrics on validation data: the model's answers to its records, scored against the records' own.

In: an engine (or a whole model on each process), ``Validation``, built metrics. Out: a ``Result`` for each, with its
provenance. Collective; the values do not depend on the number of processes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from unigen_ds.core.errors import ConfigError
from unigen_ds.core.log import logger
from unigen_ds.evaluation.generation import Answers, Weights, answers
from unigen_ds.evaluation.metrics import Metric, evaluated
from unigen_ds.evaluation.provenance import Result
from unigen_ds.evaluation.validation import Validation, evaluating

_TEXT = "text"
"""The loss term of texts, of which perplexity is computed."""


def scores(
    backend: Any,
    validation: Validation,
    metrics: Sequence[Metric],
    *,
    checkpoint: str,
    max_samples: int | None = None,
    weights: Weights = nullcontext,
    resamples: int | None = None,
    made_by: Mapping[str, str] | None = None,
) -> list[Result]:
    """The metrics of the model on validation data. Collective; the same on all ranks.

    Args:
        backend: what computes: ``Backend``, or an object with its ``model``, ``device``, ``dp_rank`` and ``dp_size``.
        checkpoint: what made the predictions, for the provenance.
        max_samples: records at most that the model answers; None: all.
        weights: the context with the weights to evaluate.
        resamples, made_by: as of ``evaluated``.

    Raises ``ConfigError`` where the model cannot give what a metric scores.
    """
    data = validation.data
    given: dict[str, Answers] = {}
    for wanted in sorted({metric.predicts for metric in metrics} & {"text", "image"}):
        given[wanted] = answers(
            backend, data.processor, data.datasets, data.names, wanted=wanted, seed=data.seed,  # type: ignore[arg-type]
            max_samples=max_samples, batch_size=data.batch_size, weights=weights,
        )  # fmt: skip
        for why, number in given[wanted].left_out.items():
            logger().warning("Metrics: %d validation records are left out: %s.", number, why)
    results = []
    for metric in metrics:
        metric.reset()
        if metric.predicts == "loss":
            metric.update(*_losses(backend, validation, weights))
        elif metric.predicts in given:
            found = given[metric.predicts]
            asks_prompt = metric.compares == "prompt" or (metric.predicts == "image" and metric.compares == "text")
            metric.update(found.predictions, found.prompts if asks_prompt else found.references, found.keys)
        else:
            raise ConfigError(f"{metric.name} scores {metric.predicts}, which validation data does not ask for",
                              allowed="metrics of texts, of images, and of losses")  # fmt: skip
        results.append(evaluated(metric, checkpoint=checkpoint, resamples=resamples, made_by=made_by))
    return results


def _losses(backend: Any, validation: Validation, weights: Weights) -> tuple[list[float], list[float], list[str]]:
    """Sum of the losses of the texts, number of their targets, and id, of each sample of this rank. Collective."""
    data = copy.copy(validation.data)
    data.batch_size = 1
    found: list[tuple[float, float, str]] = []
    size, rank = backend.dp_size, backend.dp_rank
    mine = [part[rank : rank + 1] for draws in data.draws() for part in _parts(draws, size)]  # empty: a filled-up row
    with evaluating(backend), weights():
        for one, draws in zip(data.batches(dp_rank=rank, dp_size=size), mine, strict=True):
            terms = backend.model(one.batch.to(backend.device))
            if draws:
                number = float(one.batch.target_counts().get(_TEXT, 0.0))
                found.append((float(terms.sums[_TEXT]) if number else 0.0, number, draws[0].sample_id(data.names)))
    return [row[0] for row in found], [row[1] for row in found], [row[2] for row in found]


def _parts(draws: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [draws[first : first + size] for first in range(0, len(draws), size)]
