"""At the end of the emoji run: a report about drawn, edited and read emoji."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from unigen_ds.config.registry import HOOKS, checked
from unigen_ds.evaluation.generation import generate_all, trained_family
from unigen_ds.evaluation.sheet import Cell, contact_sheet
from unigen_ds.examples.demo import ReportHook
from unigen_ds.examples.emoji.catalogue import Variant, edits, variants
from unigen_ds.examples.emoji.classifier import LIMIT, EmojiClassifier, Finding
from unigen_ds.examples.emoji.dataset import EmojiDataset, stored_picture, write_emoji
from unigen_ds.hooks.base import Run
from unigen_ds.hooks.evaluate.ema import ema_of
from unigen_ds.system import dist

_SIDE, _MAX_WORDS = 64, 12


@dataclass(frozen=True)
class Task:
    """What the model is asked for once the training is complete."""

    group: str
    """``draw``, ``draw_new``, ``edit_new``, ``read`` or ``read_new``; new: the picture of ``asked`` is held out."""
    asked: Variant
    before: Variant | None = None
    """The picture before an edit."""


def tasks() -> list[Task]:
    """The plain emoji and a trained look of each, drawn and read; every held-out picture and edit."""
    held_out = variants(held_out=True)
    last = {variant.emoji: variant for variant in variants(held_out=False)}
    trained = [variant for emoji in last for variant in (Variant(emoji), last[emoji])]
    return [
        *(Task("draw", variant) for variant in trained),
        *(Task("draw_new", variant) for variant in held_out),
        *(Task("edit_new", after, before) for before, after in edits(held_out=True)),
        *(Task("read", variant) for variant in trained),
        *(Task("read_new", variant) for variant in held_out),
    ]


@HOOKS.register_module()
class EmojiReportHook(ReportHook):
    """Runs once the training is complete, with the EMA weights where there are some.

    Args:
        flow: how pictures are drawn, as of ``PreviewHook``.
        seed: of the first noise of each picture.
        root: folder of the emoji; None: that of the run's ``EmojiDataset``.
    """

    name = "emoji_report"
    dataset = EmojiDataset
    write_files = write_emoji

    @checked()
    def __init__(self, *, flow: Mapping[str, Any] | None = None, seed: int = 0, root: str | None = None) -> None:
        self.given, self.flow, self.seed, self.root = dict(flow or {}), None, seed, root

    def before_run(self, run: Run) -> None:
        super().before_run(run)
        family = trained_family(run.backend)[0]
        self.flow = family.drawing_settings(run.backend.model, self.given, where="EmojiReportHook.flow")

    def measure(self, run: Run, root: Path) -> tuple[dict[str, Any], Image.Image, str] | None:
        ema, asked = ema_of(run), tasks()
        own = generate_all(
            run.backend,
            run.processor,
            list(enumerate(asked)),
            lambda inferencer, request: self._answer(inferencer, root, *request),
            weights=lambda: ema.swapped(run) if ema else nullcontext(),
        )
        gathered = dist.gather_to_main(own)
        if gathered is None:
            return None
        answers = {number: answer for part in gathered for number, answer in part.items()}
        classifier, drawings, texts = EmojiClassifier(root), list[Drawing](), list[tuple[Task, str]]()
        for number, task in enumerate(asked):
            answer = answers[number]
            if isinstance(answer, str):
                texts.append((task, answer))
            else:
                drawings.append(Drawing(task, answer, classifier.classify(answer, task.asked)))
        results = {**scores(drawings, texts), "flow": vars(self.flow)}
        summary = (
            f"Right are {_share(results, 'draw')} emoji drawn by name, {_share(results, 'draw_new')} in a look that no"
            f" training record has, {_share(results, 'edit_new')} edits to such a look; {_share(results, 'read_new')}"
            " pictures of such a look are read correctly."
        )
        return results, samples(drawings, results, root), summary

    def _answer(self, inferencer: Any, root: Path, number: int, task: Task) -> str | Image.Image:
        if task.group.startswith("read"):
            image = stored_picture(root, task.asked)
            return str(inferencer.unified_generate("", images=image, understand=True, max_length=_MAX_WORDS).text)
        images = [] if task.before is None else [stored_picture(root, task.before)]
        prompt = task.asked.instruction() if images else task.asked.request()
        generated = inferencer.unified_generate(prompt, images=images, flow=self.flow, seed=self.seed + number)
        drawing: Image.Image = generated.images[0]
        return drawing


@dataclass(frozen=True)
class Drawing:
    """A picture that the model made."""

    task: Task
    image: Image.Image
    finding: Finding


def scores(drawings: Sequence[Drawing], texts: Sequence[tuple[Task, str]]) -> dict[str, Any]:
    """``results.json``: for each group its accuracy and size, and of pictures what the classifier saw."""
    results: dict[str, Any] = {}
    for group in ("draw", "draw_new", "edit_new"):
        findings = [each.finding for each in drawings if each.task.group == group]
        results[f"{group}_accuracy"] = float(np.mean([one.right for one in findings]))
        results[group] = {
            "number": len(findings),
            "emoji": float(np.mean([one.seen.emoji == one.asked.emoji for one in findings])),
            "look": float(np.mean([one.seen.look == one.asked.look for one in findings])),
            "error": float(np.mean([one.error for one in findings])),
        }
    for group in ("read", "read_new"):
        right = [text == task.asked.caption() for task, text in texts if task.group == group]
        results[f"{group}_accuracy"] = float(np.mean(right))
        results[group] = {"number": len(right)}
    results["classifier"] = f"the nearest of {len(variants())} true pictures, with an error of at most {LIMIT}"
    return results


def _share(results: Mapping[str, Any], group: str) -> str:
    return f"{results[f'{group}_accuracy']:.0%} of {results[group]['number']}"


def samples(drawings: Sequence[Drawing], results: Mapping[str, Any], root: Path) -> Image.Image:
    """The sheet: what was asked, made and true; a red frame is where the classifier disagrees."""
    sheets = []
    for group, title, columns, every in (
        ("draw", "Drawn by name, beside the true picture", 9, 2),
        ("draw_new", "Drawn in a look that no training picture of this emoji has, beside the true one", 9, 1),
        ("edit_new", "Edited to such a look: before, the model's picture, the true one", 6, 2),
    ):
        cells = [_cell(each, root) for each in drawings if each.task.group == group][::every]
        title = f"{title}. Right: {_share(results, group)}."
        sheets.append(contact_sheet(cells, columns=columns, title=title, side=_SIDE))
    whole = Image.new("RGB", (max(each.width for each in sheets), sum(each.height for each in sheets)), "white")
    top = 0
    for sheet in sheets:
        whole.paste(sheet, (0, top))
        top += sheet.height
    return whole


def _cell(drawing: Drawing, root: Path) -> Cell:
    before, asked = drawing.task.before, drawing.task.asked
    pictures = [] if before is None else [stored_picture(root, before)]
    text = asked.phrase if before is None else asked.instruction()
    return Cell([*pictures, drawing.image, stored_picture(root, asked)], text, wrong=not drawing.finding.right)
