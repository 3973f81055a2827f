"""Answers of the model that is being trained to records of validation data, and pictures of prompts, under any engine.

In: the engine and records. Out: what the model writes or draws, for metrics and previews. A record's prompt is all
before its last answer of the wanted kind, read exactly as in training, without condition dropout. The ranks share the
work; a random number is keyed by the sample, so an answer does not depend on the number of ranks, and
a group of ``batch_size`` records is always computed together, so it does not depend on it in the last bit either.
Training is not affected: its generators are restored, and the weights are those of before, bit by bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

from annotated_types import Ge
from PIL import Image

from unigen_ds.backends.base import Backend
from unigen_ds.config.registry import Component, check_arguments
from unigen_ds.core.errors import ConfigError, TrainingError
from unigen_ds.data.batches.validation_data import ValidationData
from unigen_ds.data.datasets.dataset import PlannedDataset
from unigen_ds.data.images.image_files import UnreadableImage
from unigen_ds.data.samples.sample import IGNORED, LoadedSplit, Sample, Split
from unigen_ds.data.samples.splits import ImageSplit, TextSplit, TokenSplit
from unigen_ds.evaluation.validation import evaluating
from unigen_ds.families.base import Family, families, family_of
from unigen_ds.inference.generated import BOTH, Kind, Request, to_picture
from unigen_ds.inference.prompts import Sampling
from unigen_ds.inference.together import AnotherRankFailed, TrainedModel
from unigen_ds.system import dist
from unigen_ds.system.seeding import derive_seed

Q = TypeVar("Q")
A = TypeVar("A")
Weights = Callable[[], AbstractContextManager[None]]
"""Makes the context in which the model has the weights to evaluate: ``average_of`` of a run."""
Prediction = str | Image.Image | tuple[str, Image.Image]
NO_ANSWER = "without such an answer, or without a prompt before it"
UNREADABLE, TOO_LONG = "with an unreadable image", "with a prompt longer than the model has positions"


class GenerationError(TrainingError):
    """Nothing could be generated. Raised on all ranks alike; training can continue."""

    everywhere = True


@dataclass(frozen=True)
class Records:
    """What a model is asked; ``ValidationData`` has these, too."""

    datasets: Sequence[PlannedDataset]
    names: Sequence[str]
    """The names of the sources, which sample ids begin with."""
    processor: Any
    seed: int = 0
    batch_size: int = 8


@dataclass(frozen=True, kw_only=True)
class Answering(Sampling):
    """How the model answers validation records for metrics. Raises ``ConfigError``."""

    max_new_tokens: Annotated[int, Ge(1)] = 64
    """The longest text, in tokens."""
    batch_size: Annotated[int, Ge(1)] | None = None
    """Records that are answered together; None: ``val_dataloader.batch_size``."""
    seed: int | None = None
    """The seed of every random number; None: that of ``val_dataloader``."""
    flow: Mapping[str, Any] | None = None
    """Settings of drawing, as ``PreviewHook.flow`` has them."""

    @classmethod
    def of(cls, arguments: Mapping[str, Any], *, where: str) -> Answering:
        """Read a config's section. Raises ``ConfigError`` for unknown keys and wrong values."""
        check_arguments(cls, dict(arguments), where=where)
        return Component(cls, arguments, where=where).build()

    def drawing(self, backend: Any) -> Any:
        """The settings of drawing of the family of the engine's model. Raises ``ConfigError``."""
        return trained_family(backend)[0].drawing_settings(backend.model, self.flow or {}, where="generation.flow")

    def facts(self) -> dict[str, str]:
        """Return what may change an answer, for a provenance."""
        return {key: str(value) for key, value in vars(self).items() if key != "batch_size"}


@dataclass(frozen=True)
class Question:
    """A record, divided into what a model reads and its answer."""

    key: str
    """Its name among all records: ``source:record``, as a sample id begins."""
    kind: Kind
    before: tuple[Split, ...]
    target: Split
    begin: tuple[int, ...]
    """The ids that a text begins with; the model reads them, too."""
    reference_ids: tuple[int, ...] = ()
    picture: Split | None = None
    """The picture of an answer with a text and a picture; ``target`` is the text."""
    picture_first: bool = False

    @property
    def num_tokens(self) -> int:
        """Those that the model reads before it answers."""
        return sum(split.num_tokens for split in self.before) + max(len(self.begin), 1)

    def request(self, processor: Any, *, seed: int) -> Request:
        """Decodes the images. Raises ``UnreadableImage``."""
        key = (seed, 0, self.key)
        prompt: list[LoadedSplit] = []
        for number, split in enumerate(self.before):  # an image's latent is sampled; all else is fixed
            is_latent = isinstance(split, ImageSplit) and split.kind == "vae"
            prompt.append(split.load(processor, (*key, number) if is_latent else None))
        picture = self.picture or self.target
        size = picture.picture_size(processor) if picture.drawn else None
        return Request(prompt, self.kind, derive_seed(*key, "answer"), self.begin, size, self.picture_first)

    def reference(self, processor: Any) -> str | Image.Image | None:
        """The record's own text, or picture in the size of training; None of both, which are compared to each other."""
        if self.picture is not None:
            return None
        if self.target.drawn:
            return to_picture(self.target.pixels(processor))
        return processor.tokenizer.decode([*self.reference_ids])

    def prompt(self, processor: Any) -> str:
        """The texts before the answer, a line each, as the tokenizer decodes them."""
        ids = [split.ids for split in self.before if isinstance(split, (TextSplit, TokenSplit))]
        if isinstance(self.target, TokenSplit):
            ids.append(self.begin)
        texts = [processor.tokenizer.decode([*each]).strip() for each in ids]
        return "\n".join(text for text in texts if text)

    def images(self, processor: Any) -> dict[str, Image.Image]:
        """The pictures before the answer, by their files. Raises ``UnreadableImage``."""
        pictures: dict[str, Image.Image] = {}
        for split in self.before:
            if not split.source or split.source in pictures:
                continue
            ready = getattr(split, "tensor", None)
            pictures[split.source] = processor.read_image(split.source) if ready is None else to_picture(ready)
        return pictures


@dataclass(frozen=True)
class Answer:
    """What the model made of one record, beside the record's own answer."""

    key: str
    prediction: Prediction
    reference: str | Image.Image | None
    prompt: str


@dataclass(frozen=True)
class Answers:
    """``mine``: this rank's part, each record on one rank. The numbers are those of all ranks."""

    mine: Sequence[Answer]
    num_asked: int
    left_out: Mapping[str, int]
    """Why records have no answer here -> how many of the ``num_asked`` and of those before them."""


def question_of(sample: Sample, kind: Kind, *, key: str, end_ids: Collection[int] = ()) -> Question | None:
    """The last answer of that kind in a record and all before it, or None. Each of ``end_ids`` ends an answer."""
    if sample.plain:
        return None
    if kind == BOTH:
        return _question_of_both(sample.splits, key)

    def is_answer(split: Split) -> bool:
        if kind == "image":
            return split.drawn
        return (isinstance(split, TextSplit) and split.loss) or (
            isinstance(split, TokenSplit) and split.num_targets > 0
        )

    number = max((i for i, split in enumerate(sample.splits) if is_answer(split)), default=None)
    if number is None:
        return None
    # a drawn picture that later turns refer to is there again, as a condition
    target, before = sample.splits[number], tuple(split for split in sample.splits[:number] if not split.drawn)
    begin: tuple[int, ...] = ()
    reference: tuple[int, ...] = target.ids if isinstance(target, TextSplit) else ()
    if isinstance(target, TokenSplit):  # the last run of positions that predict something
        stop = max(i for i, label in enumerate(target.labels) if label != IGNORED) + 1
        start = next((i + 1 for i in reversed(range(stop)) if target.labels[i] == IGNORED), 0)
        stop = next((i for i in range(start, stop) if target.labels[i] in end_ids), stop)
        begin, reference = target.ids[: start + 1], target.labels[start:stop]
    return Question(key, kind, before, target, begin, reference) if before or len(begin) > 1 else None


def _question_of_both(splits: Sequence[Split], key: str) -> Question | None:
    """The last picture that is drawn directly after a text of the same answer, or directly before one."""
    for number in reversed([i for i, split in enumerate(splits) if split.drawn]):
        image = splits[number]
        after = number + 1  # of the picture's copies, which are conditions of what follows
        while after < len(splits) and image.source and splits[after].source == image.source and not splits[after].drawn:
            after += 1
        for at in (number - 1, after):
            text = splits[at] if 0 <= at < len(splits) else None
            before = tuple(split for split in splits[: min(number, at)] if not split.drawn)
            if isinstance(text, TextSplit) and text.loss and before:
                return Question(key, BOTH, before, text, (), text.ids, image, picture_first=at == after)
    return None


def trained_family(backend: Backend) -> tuple[Family, type]:
    """Family and class of the model that is being trained. Raises ``ConfigError`` where no family has it."""
    engine: Any = backend.model
    is_whole = isinstance(engine, tuple(family.model for family in families()))
    kind = type(engine if is_whole else getattr(engine, "module", engine))
    return family_of(kind), kind


def inferencer_of(backend: Backend, processor: Any) -> tuple[TrainedModel, Any]:
    """The family's inferencer of the model that is being trained. Raises ``ConfigError`` where the family has none."""
    model = TrainedModel(backend)
    inferencer = trained_family(backend)[0].inferencer(model, processor)
    model.idle = getattr(inferencer, "idle", None)
    return model, inferencer


def check_answers(inferencer: Any, kind: Kind) -> None:
    """Raise ``ConfigError`` where an inferencer cannot answer a record in that kind."""
    able = getattr(inferencer, "answers", ())
    able = (*able, BOTH) if getattr(inferencer, "interleaves", False) else able
    if kind not in able:
        raise ConfigError(
            f"{type(inferencer).__name__} cannot answer with {kind}",
            allowed=" or ".join(able) or "an inferencer with `answers` and `complete` (docs/extending/answers.md)",
        )


def generate_all(
    backend: Backend,
    processor: Any,
    requests: Sequence[Q],
    make: Callable[[Any, Q], A],
    *,
    weights: Weights = nullcontext,
) -> dict[int, A]:
    """``make(inferencer, request)`` of each request: this rank's results, by number; each is on one rank. Collective.
    Raises ``GenerationError`` on all ranks where ``make`` raises on any, ``ConfigError`` where a family has none."""
    model, inferencer = inferencer_of(backend, processor)
    mine = range(dist.rank(), len(requests), dist.world_size())
    results: dict[int, A] = {}
    problem: str | None = None
    with weights(), evaluating(backend):
        try:
            for number in mine if model.shares else range(len(requests)):
                results[number] = make(inferencer, requests[number])
            model.finish()
        except AnotherRankFailed as error:
            problem = str(error)
        except Exception as error:
            problem = f"rank {dist.rank()}: {type(error).__name__}: {error}"
            model.finish(failed=True)
    problems = [each for each in dist.gather_objects(problem) if each is not None]
    if problems:
        own = [each for each in problems if each.startswith("rank ")]
        raise GenerationError((own or problems)[0])
    return {number: results[number] for number in mine}


def answers(
    backend: Backend,
    data: Records | ValidationData,
    kind: Kind,
    answering: Answering = Answering(),
    *,
    max_samples: int | None = None,
) -> Answers:
    """The model's answers to records of validation data, which are asked in turns, one of each source. Collective. A
    batch size or seed of None in ``answering`` is that of ``data``. ``max_samples``: so many records at most that have
    such an answer; None: all. Raises ``ConfigError`` where the family cannot do this, and ``GenerationError``.
    """
    check_answers(inferencer_of(backend, data.processor)[1], kind)
    limit = getattr(backend.model, "max_document_tokens", None)
    records, left_out = dist.on_main(lambda: ask(data, kind=kind, max_samples=max_samples, limit=limit))
    size = answering.batch_size or data.batch_size
    groups = [records[i : i + size] for i in range(0, len(records), size)]
    seed = data.seed if answering.seed is None else answering.seed
    options: dict[str, Any] = {"max_new_tokens": answering.max_new_tokens, "sampling": answering}
    if kind != "text":
        options["flow"] = answering.drawing(backend)

    def make(inferencer: Any, group: Sequence[tuple[int, int]]) -> list[Answer]:
        requests: list[Request] = []
        rows: list[Answer] = []
        for each in group:
            question = question_at(data, kind, *each)
            assert question is not None, "the data changed while it was read"
            try:
                reference = question.reference(data.processor)
                requests.append(question.request(data.processor, seed=seed))
            except UnreadableImage:
                continue
            rows.append(Answer(question.key, "", reference, question.prompt(data.processor)))
        predictions: list[Prediction] = [
            one.text if kind == "text" else (one.text, one.images[0]) if kind == BOTH else one.images[0]
            for one in (inferencer.complete(requests, **options) if requests else ())
        ]
        return [replace(row, prediction=one) for row, one in zip(rows, predictions, strict=True)]

    results = generate_all(backend, data.processor, groups, make)
    mine = [answer for number in sorted(results) for answer in results[number]]
    [unreadable] = dist.sum_floats([float(sum(len(groups[number]) - len(results[number]) for number in results))])
    left_out[UNREADABLE] += int(unreadable)
    return Answers(mine, len(records) - int(unreadable), {why: n for why, n in left_out.items() if n})


def ask(
    data: Records | ValidationData, *, kind: Kind, max_samples: int | None, limit: int | None = None
) -> tuple[list[tuple[int, int]], Counter[str]]:
    """(source, record) of the first with such an answer, and why others have none. ``limit``: tokens of a document."""
    records: list[tuple[int, int]] = []
    left_out: Counter[str] = Counter()
    for index in range(max((len(dataset) for dataset in data.datasets), default=0)):
        for source, dataset in enumerate(data.datasets):
            if index >= len(dataset):
                continue
            if max_samples is not None and len(records) >= max_samples:
                return records, left_out
            question = question_at(data, kind, source, index)
            if question is None:
                left_out[NO_ANSWER] += 1
            elif any(one is not None and one.error for one in (*question.before, question.target, question.picture)):
                left_out[UNREADABLE] += 1
            elif limit is not None and question.num_tokens > limit:
                left_out[TOO_LONG] += 1
            else:
                records.append((source, index))
    return records, left_out


def question_at(data: Records | ValidationData, kind: Kind, source: int, index: int) -> Question | None:
    dataset, tokenizer = data.datasets[source], getattr(data.processor, "tokenizer", None)
    end_ids: Any = getattr(tokenizer, "end_ids", (getattr(tokenizer, "eos_id", None),))
    numbers = getattr(dataset, "numbers", None)  # a part of a file: ids have the numbers of the whole
    key = f"{data.names[source]}:{index if numbers is None else int(numbers[index])}"
    question = question_of(dataset.sample(index), kind, key=key, end_ids=end_ids)
    if question is not None and isinstance(question.target, TextSplit):
        return replace(question, begin=(tokenizer.bos_id,))  # type: ignore[union-attr]
    return question
