"""Pictures of how the model is doing: fixed prompts, images and held-out records, every so many updates.

``previews/<update>.png`` is a sheet of all of them and ``previews/<update>.json`` has their texts in full; log writers
that show images get the sheet. Training with previews is bit-equal to training without.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt
from PIL import Image

from unigen_ds.config.registry import DATASETS, HOOKS, build, check_arguments
from unigen_ds.core.errors import ConfigError, UnigenError
from unigen_ds.data.datasets.dataset import source_names
from unigen_ds.evaluation.generation import (
    GenerationError,
    Question,
    Records,
    ask,
    check_answers,
    generate_all,
    inferencer_of,
    question_at,
    trained_family,
)
from unigen_ds.evaluation.sheet import Cell, contact_sheet
from unigen_ds.hooks.base import Hook, Run, UpdateResult, is_due
from unigen_ds.hooks.evaluate.ema import average_of
from unigen_ds.hooks.evaluate.evaluate import set_aside
from unigen_ds.hooks.log.logger import logger_of
from unigen_ds.inference import prompts as files_of_prompts
from unigen_ds.inference.prompts import Sampling
from unigen_ds.inference.together import AnotherRankFailed
from unigen_ds.system import dist
from unigen_ds.system.files import write_atomic, write_text_atomic
from unigen_ds.system.log import logger

_FOLDER = "previews"
_Side = Annotated[int, Ge(1)]


@dataclass(frozen=True)
class PreviewPrompt(files_of_prompts.Prompt):
    """One entry of ``prompts``."""

    understand: bool = False


@dataclass
class _Entry:
    """One cell: a request and its answer."""

    seed: int
    prompt: str = ""
    images: Sequence[str] = ()
    text: str = ""
    reference: str = ""
    """The record's own answer: its text, or the file of its picture, which is then the last of ``pictures``."""
    record: str = ""
    error: str = ""
    pictures: list[Image.Image] = field(default_factory=list)


@HOOKS.register_module()
class PreviewHook(Hook):
    """Shows what the model draws and writes. A preview that fails is a warning; the run continues.

    Args:
        prompts: texts, or ``dict(prompt=..., images=[...], parts=["a text", dict(image="a.png")], understand=True)``;
            or the path of a file of them, ``.txt`` or ``.jsonl``, as `tools/generate.py --prompts` reads it. A model
            that draws makes a picture of each, of one with ``understand`` a text, as any other model. Prompt i has the
            seed ``seed + i``, as there. A relative path begins in the folder in which the training is started.
        num_held_out: so many records of held-out data: the model's answer beside the record's own.
        held_out: component: a data set with these records; None: the run's validation data.
        interval: updates between previews.
        unit: of ``interval``.
        use_ema: with the average of the weights, where the run has one.
        seed: of every random number.
        size: (height, width) of drawn pictures in pixels; None: as large as possible.
        flow: settings of drawing, of the model's family. Of a ``UnifiedModel``: ``num_timesteps``, ``timestep_shift``,
            ``text_scale``, ``image_scale``, ``interval``, ``renorm`` and ``renorm_min``; what is left out is BAGEL's,
            with the ``timestep_shift`` of the training.
        max_new_tokens: of a text.
        temperature: of texts; 0 chooses the likeliest token.
        top_p: of texts: only the likeliest tokens are drawn, which have this probability together.
    """

    name = "preview"

    def __init__(
        self,
        *,
        prompts: str | Sequence[str | Mapping[str, Any]] = (),
        num_held_out: Annotated[int, Ge(0)] = 0,
        held_out: Mapping[str, Any] | None = None,
        interval: Annotated[float, Gt(0)] = 500,
        unit: Literal["update", "iteration", "epoch"] = "update",
        use_ema: bool = True,
        seed: int = 0,
        size: tuple[_Side, _Side] | None = None,
        flow: Mapping[str, Any] | None = None,
        max_new_tokens: Annotated[int, Ge(1)] = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
    ) -> None:
        self._prompts = _prompts(prompts)
        if not self._prompts and not num_held_out:
            raise ConfigError("PreviewHook has nothing to show", allowed="prompts or num_held_out")
        self._flow, self._drawing = flow or {}, None
        self._sampling = Sampling(temperature, top_p)
        self._num_held_out, self._held_out = num_held_out, held_out
        self._interval, self._unit = interval, unit
        self._use_ema, self._seed, self._size = use_ema, seed, tuple(size) if size else None
        self._max_new_tokens = max_new_tokens
        self._questions: list[Question] = []

    def before_run(self, run: Run) -> None:
        """Raises ``ConfigError`` for what the model cannot do, a missing picture, no held-out records. Collective."""
        inferencer = inferencer_of(run.backend, run.processor)[1]
        family = trained_family(run.backend)[0]
        self._drawing = family.drawing_settings(inferencer.model, self._flow, where="PreviewHook.flow")
        paths = [path for prompt in self._prompts for path in prompt.paths]
        if paths and not getattr(inferencer, "reads_images", True):
            problem = "PreviewHook has images, and this model reads texts alone"
            raise ConfigError(problem, remedy="delete images, or give prompts")
        if any(prompt.parts for prompt in self._prompts) and not getattr(inferencer, "interleaves", False):
            problem = f"PreviewHook.prompts has parts, which {type(inferencer).__name__} cannot read"
            raise ConfigError(problem, allowed="prompt and images for this model")
        missing = dist.on_main(lambda: [str(Path(path).absolute()) for path in paths if not Path(path).is_file()])
        if missing:
            raise ConfigError(
                f"PreviewHook: there is no picture {', '.join(missing)}",
                remedy="a path relative to the folder in which the training is started, or an absolute one",
            )
        if self._num_held_out:
            check_answers(inferencer, "text")
            self._questions = self._held_out_questions(run, inferencer)

    def after_load_checkpoint(self, run: Run, manifest: Mapping[str, Any]) -> None:
        set_aside(run.work_dir / _FOLDER, after=run.progress.updates)

    def after_update(self, run: Run, result: UpdateResult) -> None:
        if is_due(run, self._interval, self._unit):
            with run.clock("preview"):
                self.preview(run)

    def preview(self, run: Run) -> None:
        """Make one now. Collective."""
        update = run.progress.updates
        requests: list[PreviewPrompt | Question] = [*self._prompts, *self._questions]
        try:
            own = generate_all(
                run.backend,
                run.processor,
                list(enumerate(requests)),
                lambda inferencer, request: self._make(inferencer, *request),
                weights=lambda: average_of(run, use=self._use_ema),
            )
        except GenerationError as error:  # raised on every rank alike
            logger().warning("No preview at update %d: %s", update, error)
            return
        if (per_rank := dist.gather_to_main(own)) is None:
            return
        entries = [entry for _, entry in sorted(pair for part in per_rank for pair in part.items())]
        if errors := [entry.error for entry in entries if entry.error]:
            logger().warning("%d of %d previews at update %d failed; the first: %s",
                             len(errors), len(entries), update, errors[0])  # fmt: skip
        try:
            self._show(run, entries)
        except OSError as error:
            logger().warning("The preview of update %d was not written: %s", update, error)

    def _make(self, inferencer: Any, number: int, request: PreviewPrompt | Question) -> _Entry:
        entry = _Entry(self._seed + number)
        try:
            if isinstance(request, Question):
                self._answer(inferencer, request, entry)
            else:
                self._follow(inferencer, request, entry)
        except (UnigenError, OSError) as error:
            if isinstance(error, GenerationError | AnotherRankFailed):
                raise
            entry.error = str(error)
        return entry

    def _follow(self, inferencer: Any, request: PreviewPrompt, entry: _Entry) -> None:
        entry.prompt, entry.images = request.text, request.paths
        options: dict[str, Any] = request.arguments
        if "image" in getattr(inferencer, "answers", ()):
            options |= {"understand": True} if request.understand else {"flow": self._drawing, "size": self._size}
        options |= {key: value for key, value in vars(self._sampling).items() if value != vars(Sampling())[key]}
        entry.pictures += [inferencer.processor.read_image(path) for path in request.paths]
        result = inferencer.unified_generate(
            request.prompt, max_length=self._max_new_tokens, seed=entry.seed, **options
        )
        entry.text = result.text
        entry.pictures += result.images

    def _answer(self, inferencer: Any, question: Question, entry: _Entry) -> None:
        processor = inferencer.processor
        entry.record, entry.prompt = question.key, question.prompt(processor)
        pictures = question.images(processor)
        entry.images = [*pictures]
        entry.pictures += pictures.values()
        flow = {"flow": self._drawing} if question.kind == "image" else {}
        [result] = inferencer.complete(
            [question.request(processor, seed=self._seed)], max_new_tokens=self._max_new_tokens,
            sampling=self._sampling, **flow,
        )  # fmt: skip
        reference = question.reference(processor)
        entry.text = result.text
        entry.pictures += result.images
        if isinstance(reference, str):
            entry.reference = reference
        elif reference is not None:
            entry.pictures.append(reference)
            entry.reference = question.target.source

    def _held_out_questions(self, run: Run, inferencer: Any) -> list[Question]:
        if self._held_out is not None:
            datasets = [build(DATASETS, self._held_out, where="PreviewHook.held_out", processor=run.processor)]
            names = source_names(datasets)
        else:
            datasets, names = [*run.validation.datasets], run.validation.names
        data = Records(datasets, names, run.processor)
        limit = getattr(run.backend.model, "max_document_tokens", None)
        questions: list[Question] = []
        for kind in inferencer.answers if datasets else ():
            for source, index in ask(data, kind=kind, max_samples=self._num_held_out, limit=limit)[0]:
                question = question_at(data, kind, source, index)
                assert question is not None, "the data changed while it was read"
                questions.append(question)
        if not questions:
            raise ConfigError(
                "PreviewHook.num_held_out: no held-out record has an answer with a prompt before it",
                remedy="val_dataloader=..., or PreviewHook(held_out=dict(type=..., data_path=...))",
            )
        return questions

    def _show(self, run: Run, entries: Sequence[_Entry]) -> None:
        """Write the sheet and the texts, and log the sheet. On rank 0."""
        update, folder = run.progress.updates, run.work_dir / _FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        cells, rows = [], []
        for entry in entries:
            answer = f"failed: {entry.error}" if entry.error else entry.text
            lines = [entry.prompt, answer and f"> {answer}", entry.reference and f"= {entry.reference}"]
            cells.append(Cell(entry.pictures, "\n".join(line for line in lines if line)))
            rows.append({key: value for key, value in vars(entry).items() if key != "pictures"})
        sheet = contact_sheet(cells, title=f"update {update}")
        write_atomic(folder / f"{update}.png", lambda path: sheet.save(path, format="PNG"))
        write_text_atomic(folder / f"{update}.json", json.dumps(rows, ensure_ascii=False, indent=1) + "\n")
        logger_of(run).image(run, "preview", sheet, update=update)


def _prompts(value: str | Sequence[str | Mapping[str, Any]]) -> list[PreviewPrompt]:
    """Raises ``ConfigError`` and ``DataError``."""
    if isinstance(value, str):
        if Path(value).suffix not in (".txt", ".jsonl"):
            problem = f"PreviewHook.prompts is {value!r}"
            raise ConfigError(problem, allowed="a list, or a .txt or .jsonl file of prompts")
        prompts = files_of_prompts.read_prompts(Path(value), where="PreviewHook.prompts")
        return [PreviewPrompt(**vars(one)) for one in prompts]
    entries = [{"prompt": entry} if isinstance(entry, str) else entry for entry in value]
    for i, entry in enumerate(entries):
        check_arguments(PreviewPrompt, entry, where=f"PreviewHook.prompts[{i}]")
    return [PreviewPrompt(**entry) for entry in entries]
