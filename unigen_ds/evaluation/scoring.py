"""An evaluation: the losses on validation data, and metrics of the model's answers to its records.

In: an engine (or a whole model on each process), ``Validation``, built metrics. Out: the losses, and a ``Result`` for
each metric with its provenance; a metric that fails is left out on all ranks. The values do not depend on the number of
processes, and no random generator is changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge
from PIL import Image

from unigen_ds.core import dist
from unigen_ds.core.batch import Batch, LossTerms
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.core.log import logger
from unigen_ds.core.metrics import sample_digest
from unigen_ds.core.registry import check_arguments
from unigen_ds.core.seeding import kept_generators
from unigen_ds.evaluation.generation import Answers, answers, ask, check_answers, inferencer_of, trained_family
from unigen_ds.evaluation.metrics import Metric, evaluated
from unigen_ds.evaluation.provenance import Result
from unigen_ds.evaluation.sample_losses import SampleLosses
from unigen_ds.evaluation.validation import Validation, Watch
from unigen_ds.inference.generated import BOTH, Kind
from unigen_ds.inference.sampling import Sampling

KINDS: tuple[Kind, ...] = ("text", "image", BOTH)
TEXT = "text"
"""The loss term of texts, of which perplexity is computed."""
_WORDS = {"text": "texts", "image": "pictures", BOTH: "texts with pictures"}
"""What a model answers with."""
NOT_USED = "none"
"""In a provenance: there is no such thing."""
DEFINITION = 1
"""Of ``val/loss`` and its parts; another number means that values changed."""
Given = tuple[Sequence[Any], Sequence[Any], Sequence[str]]
"""Predictions, references and keys, as ``Metric.update`` has them."""


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
    def of(cls, given: Mapping[str, Any], *, where: str) -> Answering:
        """From a config. Raises ``ConfigError`` for unknown keys and wrong values."""
        check_arguments(cls, dict(given), where=where)
        made = cls(**given)
        try:
            made.sampling  # noqa: B018 - checks its values
        except ConfigError as error:
            raise error.at(where) from error
        return made

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_p)

    def drawing(self, backend: Any) -> Any:
        """The settings of drawing of the family of the engine's model. Raises ``ConfigError``."""
        return trained_family(backend)[0].drawing_settings(backend.model, self.flow or {}, where="generation.flow")


@dataclass(frozen=True)
class Evaluation:
    """The same on all ranks."""

    losses: Mapping[str, float]
    """As of ``Validation.losses``."""
    results: Sequence[Result]
    """Of the metrics that have a value."""
    failed: Mapping[str, str]
    """Name of each other metric -> why it has none."""
    loss_replicates: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Bootstrap values of the losses, as of ``Result.replicates``."""
    loss_resampling: str = "0 draws"
    """How they were drawn, or why there are none."""

    loss_provenance: Mapping[str, str] = field(default_factory=dict)
    """Where the losses come from."""

    def loss_result(self) -> Result:
        """The losses as a result beside those of the metrics."""
        return Result(self.losses, {**self.loss_provenance, "resampling": self.loss_resampling}, self.loss_replicates)

    @property
    def values(self) -> dict[str, float]:
        """The losses, and the metrics as ``val/<name>``."""
        scored = {f"val/{name}": value for result in self.results for name, value in result.values.items()}
        return {**self.losses, **scored}


@dataclass
class TextLosses:
    """Sum of the losses and number of the targets of each text, one entry for each sample of this rank."""

    sums: list[float] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    missing: str = ""

    def __call__(self, batch: Batch, terms: LossTerms) -> None:
        """Add a batch with one sample a sequence; ``batch`` on the CPU. Without the weights of ``ce_reweight``."""
        each: Any = terms.each.get(TEXT)
        found: Any = batch
        if each is None or not hasattr(batch, "text_target_weight"):
            self.missing = f"{type(batch).__name__} and the model's LossTerms.each have no loss of each text target"
            return
        losses = each.detach().double().cpu() / found.text_target_weight.double()
        sample = found.document_ids[found.text_target_index]  # a document is a sample; empty ones are the last
        sums = losses.new_zeros(batch.num_sequences).index_add_(0, sample, losses)
        numbers = sample.bincount(minlength=batch.num_sequences)
        for key, total, number in zip(batch.sample_ids, sums.tolist(), numbers.tolist(), strict=False):
            if number:
                self.sums.append(total)
                self.numbers.append(number)
                self.keys.append(key)

    def given(self) -> Given:
        """Raises ``DataError`` where the model does not return what is needed."""
        if self.missing:
            raise DataError(
                self.missing, remedy="return them in eval mode (docs/evaluation.md), or leave out Perplexity"
            )
        return self.sums, self.numbers, self.keys


def check(
    metrics: Sequence[Metric],
    backend: Any,
    validation: Validation,
    *,
    where: str = "metrics",
    answering: Answering = Answering(),
) -> None:
    """Raise ``ConfigError`` on all ranks where the model or the data cannot give what a metric scores. Collective."""
    data = validation.data
    for metric in metrics:
        if metric.predicts not in (*KINDS, "loss"):
            raise ConfigError(f"{metric.name} scores {metric.predicts}, which no validation record is answered with",
                              allowed="metrics of texts, of images, of both in one answer, and of losses")  # fmt: skip
    for wanted in _kinds(metrics):
        if wanted != "text":
            answering.drawing(backend)
        names = ", ".join(metric.name for metric in metrics if metric.predicts == wanted)
        try:
            check_answers(inferencer_of(backend, data.processor)[1], wanted)
        except ConfigError as error:
            number = next(k for k, metric in enumerate(metrics) if metric.predicts == wanted)
            kind, of = type(metrics[number]).__name__, f"{where}[{number}]"
            problem = f"{of}: {kind} needs {_WORDS[wanted]} ({names}), and {error.problem}"
            remedy = error.remedy or f"delete {kind} from the metrics{_by_hand(wanted)}"
            raise ConfigError(problem, allowed=error.allowed, remedy=remedy) from error
        if not dist.on_main(lambda kind=wanted: _first(backend, validation, kind)):  # type: ignore[misc]
            raise ConfigError(
                f"no validation record has an answer of kind {wanted} with a prompt before it, as {names} needs",
                remedy=f"other records in val_dataloader, or leave out the metric{_by_hand(wanted)}",
            )


def _by_hand(wanted: Kind) -> str:
    """Where answers that no validation record asks for can be scored."""
    return "; score answers of your own: docs/metrics.md#answers-of-your-own" if wanted == BOTH else ""


def _first(backend: Any, validation: Validation, wanted: Kind) -> list[tuple[int, int]]:
    data, limit = validation.data, getattr(backend.model, "max_document_tokens", None)
    return ask(data.datasets, data.names, data.processor, wanted=wanted, max_samples=1, limit=limit)[0]


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
    """Losses and metrics of the model with its present weights. Collective; the same on all ranks.

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
        texts = TextLosses()
        samples = SampleLosses(validation) if resamples != 0 else None
        watching: list[Watch] = [texts] if any(metric.predicts == "loss" for metric in metrics) else []
        watching += [samples] if samples is not None else []
        watch = _all_of(watching) if watching else None
        losses = validation.losses(backend, max_batches=max_batches, watch=watch)
        drawn, resampling = ({}, "0 draws") if samples is None else samples.resampled()
        facts = _loss_provenance(
            validation, max_batches=max_batches, checkpoint=checkpoint, precision=str((made_by or {}).get("precision"))
        )
        if max_samples is None and max_batches is not None:
            max_samples = max_batches * validation.data.batch_size
        given: dict[str, Given | Answers | str] = {}
        for kind in _kinds(metrics):
            given[kind] = found = _answers(backend, validation, kind, answering, max_samples)
            if isinstance(found, Answers) and dist.is_main():
                _report_left_out(found, kind, metrics, logged=set() if logged is None else logged)
        details = {key: str(value) for key, value in vars(answering).items() if key != "batch_size"}
        made_by = {**details, **(made_by or {})}
        results, failed = [], {}
        for metric in metrics:
            scored = _scored(metric, given.get(metric.predicts), texts,
                             checkpoint=checkpoint, resamples=resamples, made_by=made_by)  # fmt: skip
            if isinstance(scored, Result):
                results.append(scored)
                continue
            failed[metric.name] = scored
            if dist.is_main():
                logger().warning("The metric %s has no value this time: %s", metric.name, scored)
    return Evaluation(losses, results, failed, drawn, resampling, facts)


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
    asked = {key: str(value) for key, value in vars(answering).items() if key != "batch_size"}
    return {**metric.provenance, **data, **asked, "max_samples": str(max_samples), **made_by}


def _all_of(watching: Sequence[Watch]) -> Watch:
    def watch(batch: Batch, terms: LossTerms) -> None:
        for each in watching:
            each(batch, terms)

    return watch


def _kinds(metrics: Sequence[Metric]) -> list[Kind]:
    return [kind for kind in KINDS if any(metric.predicts == kind for metric in metrics)]


def _answers(
    backend: Any, validation: Validation, wanted: Kind, answering: Answering, max_samples: int | None
) -> Answers | str:
    """The model's answers, or on all ranks why there are none. Collective."""
    data = validation.data
    try:
        found = answers(
            backend, data.processor, data.datasets, data.names, wanted=wanted,
            seed=data.seed if answering.seed is None else answering.seed, max_samples=max_samples,
            batch_size=answering.batch_size or data.batch_size, max_new_tokens=answering.max_new_tokens,
            sampling=answering.sampling,
            flow=None if wanted == "text" else answering.drawing(backend),
        )  # fmt: skip
    except Exception as error:  # ``answers`` fails on every rank alike
        return f"no {wanted} could be generated: {type(error).__name__}: {error}"
    return found


def _report_left_out(found: Answers, wanted: Kind, metrics: Sequence[Metric], *, logged: set[str]) -> None:
    """Each line once. Rank 0."""
    names = ", ".join(metric.name for metric in metrics if metric.predicts == wanted)
    for why, number in found.left_out.items():
        line = (
            f"Metrics of {_WORDS[wanted]} ({names}): {number} validation records are left out, {why};"
            f" {found.asked} are answered."
        )
        if line not in logged:
            logger().info("%s", line)
        logged.add(line)


def _scored(metric: Metric, given: Any, texts: TextLosses, **options: Any) -> Result | str:
    """The metric's result, or on all ranks why it has none. Collective."""

    def update() -> None:
        metric.reset()
        metric.update(*(texts.given() if metric.predicts == "loss" else _pairs(metric, given)))

    try:
        if isinstance(given, str):
            return given
        problem = _problem(update)
        if problem is not None:
            return problem
        return evaluated(metric, **options)
    except Exception as error:  # of rank 0's computation, raised on every rank alike
        return f"{type(error).__name__}: {error}"
    finally:
        metric.reset()


def _problem(action: Callable[[], None]) -> str | None:
    """Why ``action`` failed on any rank, the same on all. Collective; ``action`` is not."""
    problem = None
    try:
        action()
    except Exception as error:
        problem = f"rank {dist.rank()}: {type(error).__name__}: {error}"
    return next((each for each in dist.gather_objects(problem) if each is not None), None)


def _pairs(metric: Metric, found: Answers) -> Given:
    """A picture is compared with a picture or with the text that it was asked for."""
    prompts = metric.compares == "prompt" or (metric.predicts == "image" and metric.compares == "text")
    references = found.prompts if prompts else found.references
    return [*map(_colored, found.predictions)], [*map(_colored, references)], found.keys


def _colored(answer: Any) -> Any:
    """A picture as metrics read it: a model may draw in shades of gray."""
    if isinstance(answer, tuple):
        return tuple(map(_colored, answer))
    return answer.convert("RGB") if isinstance(answer, Image.Image) else answer
