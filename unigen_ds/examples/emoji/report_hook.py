"""A report about drawn, edited and read emoji, at the end of the emoji run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from unigen_ds.config.registry import HOOKS, checked
from unigen_ds.evaluation.generation import generate_all, trained_family
from unigen_ds.evaluation.sheet import Cell, contact_sheet
from unigen_ds.examples.demo import ReportHook
from unigen_ds.examples.emoji.catalogue import Variant, edits, variants
from unigen_ds.examples.emoji.dataset import LIMIT, EmojiClassifier, EmojiDataset, stored_picture
from unigen_ds.hooks.base import Run
from unigen_ds.hooks.evaluate.ema import average_of
from unigen_ds.system import dist


class Task(NamedTuple):
    group: str
    """``draw``, ``draw_new``, ``edit_new``, ``read`` or ``read_new``; new: the picture of ``target`` is held out."""
    target: Variant
    before: Variant | None = None


class GlyphAnswer(NamedTuple):
    task: Task
    value: str | Image.Image
    right: bool


def tasks() -> list[Task]:
    """The plain emoji and a trained look of each, drawn and read; every held-out picture and edit."""
    held_out = variants(held_out=True)
    last = {variant.emoji: variant for variant in variants(held_out=False)}
    train_variants = [variant for emoji in last for variant in (Variant(emoji), last[emoji])]
    return [
        *(Task("draw", variant) for variant in train_variants),
        *(Task("draw_new", variant) for variant in held_out),
        *(Task("edit_new", after, before) for before, after in edits(held_out=True)),
        *(Task("read", variant) for variant in train_variants),
        *(Task("read_new", variant) for variant in held_out),
    ]


@HOOKS.register_module()
class EmojiReportHook(ReportHook):
    """Runs once the training is complete, with the EMA weights where there are some.

    Args:
        flow: how pictures are drawn, as of ``PreviewHook``.
        seed: of the first noise of each picture.
    """

    name = "emoji_report"
    dataset = EmojiDataset

    @checked()
    def __init__(self, *, flow: Mapping[str, Any] | None = None, seed: int = 0) -> None:
        self.settings, self.flow, self.seed = dict(flow or {}), None, seed

    def before_run(self, run: Run) -> None:
        super().before_run(run)
        family = trained_family(run.backend)[0]
        self.flow = family.drawing_settings(run.backend.model, self.settings, where="EmojiReportHook.flow")

    def measure(self, run: Run, root: Path) -> tuple[dict[str, Any], Image.Image, str] | None:
        def make(inferencer: Any, request: tuple[int, Task]) -> str | Image.Image:
            number, task = request
            if task.group.startswith("read"):
                image = stored_picture(root, task.target)
                return str(inferencer.unified_generate("", images=image, understand=True, max_length=12).text)
            images = [] if task.before is None else [stored_picture(root, task.before)]
            prompt = task.target.instruction() if images else task.target.request()
            answer = inferencer.unified_generate(prompt, images=images, flow=self.flow, seed=self.seed + number)
            return answer.images[0]

        all_tasks = tasks()
        own = generate_all(run.backend, run.processor, [*enumerate(all_tasks)], make, weights=lambda: average_of(run))
        parts = dist.gather_to_main(own)
        if parts is None:
            return None
        values = {number: value for part in parts for number, value in part.items()}
        answers = answers_of([(task, values[number]) for number, task in enumerate(all_tasks)], root)
        results = {**scores(answers), "flow": vars(self.flow)}
        shares = {name: f"{results[f'{name}_accuracy']:.0%} of {results[f'{name}_number']}"
                  for name in ("draw", "draw_new", "edit_new", "read_new")}  # fmt: skip
        summary = (
            f"Right are {shares['draw']} emoji drawn by name, {shares['draw_new']} in a look that no training record"
            f" has, {shares['edit_new']} edits to such a look; {shares['read_new']} pictures of such a look are read"
            " correctly."
        )
        return results, samples(answers, root, title=summary), summary


def answers_of(values: Sequence[tuple[Task, str | Image.Image]], root: Path) -> list[GlyphAnswer]:
    """Whether each answer is right: a text word for word, a picture by the classifier."""
    classifier, answers = EmojiClassifier(root), []
    for task, value in values:
        right = value == task.target.caption() if isinstance(value, str) else classifier.right(value, task.target)
        answers.append(GlyphAnswer(task, value, right))
    return answers


def scores(answers: Sequence[GlyphAnswer]) -> dict[str, Any]:
    """``results.json``: accuracy and size of each group."""
    results: dict[str, Any] = {}
    for group in dict.fromkeys(each.task.group for each in answers):
        right = [each.right for each in answers if each.task.group == group]
        results |= {f"{group}_accuracy": sum(right) / len(right), f"{group}_number": len(right)}
    results["classifier"] = f"the nearest of {len(variants())} true pictures, with an error of at most {LIMIT}"
    return results


def samples(answers: Sequence[GlyphAnswer], root: Path, *, title: str) -> Image.Image:
    """Every second picture: before an edit, the model's, the true one. A red frame: the classifier disagrees."""
    cells = []
    for each in answers:
        before, target = each.task.before, each.task.target
        if isinstance(each.value, Image.Image):
            sides = [] if before is None else [stored_picture(root, before)]
            text = target.request() if before is None else target.instruction()
            cells.append(Cell([*sides, each.value, stored_picture(root, target)], text, wrong=not each.right))
    return contact_sheet(cells[::2], columns=9, title=title, side=64)
