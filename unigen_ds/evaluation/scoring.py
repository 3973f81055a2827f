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
from typing import Annotated, Any

from annotated_types import Ge
from PIL import Image

from unigen_ds.config.registry import check_arguments
from unigen_ds.core.errors import ConfigError
from unigen_ds.evaluation.generation import Answers, answers, ask, check_answers, inferencer_of, trained_family
from unigen_ds.evaluation.metrics import Metric, evaluated
from unigen_ds.evaluation.provenance import Result
from unigen_ds.evaluation.sample_losses import SampleLosses, TextLosses
from unigen_ds.evaluation.validation import Validation, Watch
from unigen_ds.inference.generated import BOTH, Kind
from unigen_ds.inference.sampling import Sampling
from unigen_ds.system import dist
from unigen_ds.system.journals import sample_digest
from unigen_ds.system.log import logger
from unigen_ds.system.seeding import kept_generators

KINDS: tuple[Kind, ...] = ("text", "image", BOTH)
_WORDS = {"text": "texts", "image": "pictures", BOTH: "texts with pictures"}
"""What a model answers with."""
NOT_USED = "none"
"""In a provenance: there is no such thing."""
DEFINITION = 1
"""Of ``val/loss`` and its parts; another number means that values changed."""


@dataclass(frozen=True)
class Answering:
    """How the model answers validation records for metrics. Raises ``ConfigError``."""

    max_new_tokens: Annotated[int, Ge(1)] = 64
    """Of a text."""
    temperature: float = 0.0
    """Of texts; 0 chooses the likeliest token."""
    top_p: float = 1.0
    """Of texts: only the likeliest tokens are drawn, which have this probability together."""
    batch_size: Annotated[int, Ge(1)] | None = None
    """Records that are answered together; None: ``val_dataloader.batch_size``."""
    seed: int | None = None
    """Of every random number; None: that of ``val_dataloader``."""
    flow: Mapping[str, Any] | None = None
    """Of pictures: settings of drawing as of ``PreviewHook.flow``."""

    @classmethod
    def of(cls, arguments: Mapping[str, Any], *, where: str) -> Answering:
        """From a config. Raises ``ConfigError`` for unknown keys and wrong values."""
        check_arguments(cls, dict(arguments), where=where)
        answering = cls(**arguments)
        try:
            answering.sampling  # noqa: B018 - checks its values
        except ConfigError as error:
            raise error.at(where) from error
        return answering

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_p)

    def drawing(self, backend: Any) -> Any:
        """The settings of drawing of the family of the engine's model. Raises ``ConfigError``."""
        return trained_family(backend)[0].drawing_settings(backend.model, self.flow or {}, where="generation.flow")

    def recorded(self) -> dict[str, str]:
        """For a provenance: all that may change an answer."""
        return {key: str(value) for key, value in vars(self).items() if key != "batch_size"}


@dataclass(frozen=True)
class Evaluation:
    """Of one set of validation data; the same on all ranks."""

    losses: Result
    """Its values are those of ``Validation.losses``."""
    metrics: Sequence[Result]
    """Of those that have a value."""
    failed: Mapping[str, str]
    """Name of each other metric -> why it has none."""

    @property
    def results(self) -> list[Result]:
        """The losses, then the metrics."""
        return [self.losses, *self.metrics]

    @property
    def values(self) -> dict[str, float]:
        """The losses, and the metrics as ``val/<name>``."""
        scored = {f"val/{name}": value for result in self.metrics for name, value in result.values.items()}
        return {**self.losses.values, **scored}


def check(
    metrics: Sequence[Metric],
    backend: Any,
    validation: Validation,
    *,
    where: str = "metrics",
    answering: Answering = Answering(),
) -> None:
    """Raise ``ConfigError`` on all ranks where the model or the data cannot give what a metric scores. Collective."""
    data, limit = validation.data, getattr(backend.model, "max_document_tokens", None)
    for metric in metrics:
        if metric.predicts not in (*KINDS, "loss"):
            raise ConfigError(f"{metric.name} scores {metric.predicts}, which no validation record is answered with",
                              allowed="metrics of texts, of images, of both in one answer, and of losses")  # fmt: skip
    for kind, names in _kinds(metrics).items():
        by_hand = "; score answers of your own: docs/metrics.md#answers-of-your-own" if kind == BOTH else ""
        if kind != "text":
            answering.drawing(backend)
        try:
            check_answers(inferencer_of(backend, data.processor)[1], kind)
        except ConfigError as error:
            number = next(k for k, metric in enumerate(metrics) if metric.predicts == kind)
            cls = type(metrics[number]).__name__
            problem = f"{where}[{number}]: {cls} needs {_WORDS[kind]} ({names}), and {error.problem}"
            remedy = error.remedy or f"delete {cls} from the metrics{by_hand}"
            raise ConfigError(problem, allowed=error.allowed, remedy=remedy) from error
        asked, _ = dist.on_main(partial(ask, data, wanted=kind, max_samples=1, limit=limit))
        if not asked:
            raise ConfigError(
                f"no validation record has an answer of kind {kind} with a prompt before it, as {names} needs",
                remedy=f"other records in val_dataloader, or leave out the metric{by_hand}",
            )


def evaluate(
    backend: Any,
    validation: Validation,
    metrics: Sequence[Metric] = (),
    *,
    checkpoint: str = "",
    max_batches: int | None = None,
    max_samples: int | None = None,
    answering: Answering = Answering(),
    resamples: int | None = None,
    made_by: Mapping[str, str] | None = None,
    logged: set[str] | None = None,
) -> Evaluation:
    """Losses and metrics of the model with its present weights, on one set of validation data. Collective; the same on
    all ranks.

    Args:
        backend: what computes: ``Backend``, or an object with its ``model``, ``device``, ``dp_rank`` and ``dp_size``.
        metrics: as ``check`` has found them to be possible.
        checkpoint: what made the predictions, for the provenance.
        max_batches: as of ``Validation.losses``.
        max_samples: records at most that the model answers; None: as many as ``max_batches`` has.
        answering: how it answers them.
        resamples, made_by: as of ``evaluated``.
        logged: which records are left out is logged where the line is not in it, and then is.

    A metric that fails is a warning that names it, and is in ``failed``.
    """
    with kept_generators():
        texts, samples = TextLosses(), SampleLosses(validation)
        watching: list[Watch] = [texts] if any(metric.predicts == "loss" for metric in metrics) else []
        values = validation.losses(
            backend, max_batches=max_batches, watching=watching if resamples == 0 else [*watching, samples]
        )
        replicates, resampling = ({}, "0 draws") if resamples == 0 else samples.resampled()
        precision = str((made_by or {}).get("precision"))
        facts = _loss_provenance(validation, max_batches=max_batches, checkpoint=checkpoint, precision=precision)
        losses = Result(values, {**facts, "resampling": resampling}, replicates)
        if max_samples is None and max_batches is not None:
            max_samples = max_batches * validation.data.batch_size
        answers_of: dict[str, Answers | str] = {}
        for kind, names in _kinds(metrics).items():
            answers_of[kind] = _answers(backend, validation, kind, answering, max_samples)
            _report_left_out(answers_of[kind], f"Metrics of {_WORDS[kind]} ({names})", logged)
        made_by = {**answering.recorded(), **(made_by or {})}
        results, failed = [], {}
        for metric in metrics:
            scored = _scored(metric, answers_of.get(metric.predicts, texts),
                             checkpoint=checkpoint, resamples=resamples, made_by=made_by)  # fmt: skip
            if isinstance(scored, Result):
                results.append(scored)
                continue
            failed[metric.name] = scored
            if dist.is_main():
                logger().warning("The metric %s has no value this time: %s", metric.name, scored)
    return Evaluation(losses, results, failed)


def _loss_provenance(
    validation: Validation, *, max_batches: int | None, checkpoint: str, precision: str
) -> dict[str, str]:
    data = validation.data
    settings = {"loss_weights": dict(validation.loss_weights), "max_batches": max_batches,
                "seq_length": data.seq_length}  # fmt: skip
    limit = None if max_batches is None else max_batches * data.batch_size
    chosen = [draw.sample_id(data.names) for draws in data.draws(limit) for draw in draws]
    return {
        "metric": "val/loss",
        "version": f"unigen_ds definition {DEFINITION}",
        "settings": json.dumps(settings, sort_keys=True, default=str),
        "resize": NOT_USED,
        "precision": precision,
        "seed": str(data.seed),
        "model": NOT_USED,
        "num_samples": str(len(chosen)),
        "samples": sample_digest([*chosen, *(source.fingerprint for source in data.sources)]),
        "checkpoint": checkpoint,
    }


def provenance_of(
    name: str,
    validation: Validation,
    metrics: Sequence[Metric],
    *,
    max_batches: int | None,
    max_samples: int | None,
    answering: Answering,
    made_by: Mapping[str, str],
) -> dict[str, str]:
    """Where the values ``name`` of all evaluations of a run come from, known before the first: values of two runs are
    alike where ``comparison.unlike`` finds no difference. Rank 0.
    """
    losses = _loss_provenance(validation, max_batches=max_batches, checkpoint="", precision=made_by["precision"])
    named = [metric for metric in metrics if name.removeprefix("val/").startswith(metric.name)]
    if not named:
        return {**losses, **made_by}
    metric = max(named, key=lambda one: len(one.name))
    data = {key: losses[key] for key in ("num_samples", "samples")}
    return {**metric.provenance, **data, **answering.recorded(), "max_samples": str(max_samples), **made_by}


def _kinds(metrics: Sequence[Metric]) -> dict[Kind, str]:
    """Kind of answer -> names of the metrics that score it."""
    named = {kind: ", ".join(metric.name for metric in metrics if metric.predicts == kind) for kind in KINDS}
    return {kind: names for kind, names in named.items() if names}


def _answers(
    backend: Any, validation: Validation, wanted: Kind, answering: Answering, max_samples: int | None
) -> Answers | str:
    """The model's answers, or on all ranks why there are none. Collective."""
    data = validation.data
    try:
        return answers(
            backend, data, wanted=wanted,
            seed=data.seed if answering.seed is None else answering.seed, max_samples=max_samples,
            batch_size=answering.batch_size or data.batch_size, max_new_tokens=answering.max_new_tokens,
            sampling=answering.sampling,
            flow=None if wanted == "text" else answering.drawing(backend),
        )  # fmt: skip
    except Exception as error:  # ``answers`` fails on every rank alike
        return f"no {wanted} could be generated: {type(error).__name__}: {error}"


def _report_left_out(answered: Answers | str, what: str, logged: set[str] | None) -> None:
    """Each line once."""
    if isinstance(answered, str) or not dist.is_main():
        return
    for why, number in answered.left_out.items():
        line = f"{what}: {number} validation records are left out, {why}; {answered.asked} are answered."
        if logged is None or line not in logged:
            logger().info("%s", line)
        if logged is not None:
            logged.add(line)


def _scored(metric: Metric, answered: Answers | TextLosses | str, **options: Any) -> Result | str:
    """The metric's result, or on all ranks why it has none. Collective."""
    if isinstance(answered, str):
        return answered
    problem = None
    try:
        metric.reset()
        metric.update(*(answered.columns() if isinstance(answered, TextLosses) else _columns(metric, answered)))
    except Exception as error:
        problem = f"rank {dist.rank()}: {type(error).__name__}: {error}"
    problems = [each for each in dist.gather_objects(problem) if each is not None]
    try:
        return problems[0] if problems else evaluated(metric, **options)
    except Exception as error:  # of rank 0's computation, raised on every rank alike
        return f"{type(error).__name__}: {error}"
    finally:
        metric.reset()


def _columns(metric: Metric, answered: Answers) -> tuple[Sequence[Any], Sequence[Any], Sequence[str]]:
    """Predictions, references and keys. A picture is compared with a picture or with the text that it was asked for."""
    prompts = metric.compares == "prompt" or (metric.predicts == "image" and metric.compares == "text")
    rows = [(_colored(one.prediction), one.prompt if prompts else _colored(one.reference), one.key)
            for one in answered.mine]  # fmt: skip
    predictions, references, keys = zip(*rows, strict=True) if rows else ((), (), ())
    return predictions, references, keys


def _colored(answer: Any) -> Any:
    """A picture as metrics read it: a model may draw in shades of gray."""
    if isinstance(answer, tuple):
        return tuple(map(_colored, answer))
    return answer.convert("RGB") if isinstance(answer, Image.Image) else answer
