"""At the end of the emoji run: ``samples.png``, ``curves.png`` and ``results.json`` in the work dir."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from unigen_ds.config.registry import HOOKS, checked
from unigen_ds.core.errors import ConfigError
from unigen_ds.evaluation.generation import generate_all, trained_family
from unigen_ds.evaluation.plots import plot_curves
from unigen_ds.evaluation.sheet import Cell, contact_sheet
from unigen_ds.examples.emoji.catalogue import Variant, edits, variants
from unigen_ds.examples.emoji.classifier import LIMIT, EmojiClassifier, Finding
from unigen_ds.examples.emoji.dataset import EmojiDataset, stored_picture, write_emoji
from unigen_ds.hooks.base import Hook, Run
from unigen_ds.hooks.evaluate.ema import ema_of
from unigen_ds.system import dist
from unigen_ds.system.files import write_atomic, write_text_atomic
from unigen_ds.system.journals import METRICS_FILE
from unigen_ds.system.log import logger

_SIDE, _MAX_WORDS = 64, 12


@dataclass(frozen=True)
class Task:
    """What the model is asked for once the training is complete."""

    group: str
    """``draw``, ``draw_new``, ``edit_new``, ``read`` or ``read_new``; new: the picture of ``asked`` is held out."""
    asked: Variant
    before: Variant | None = None
    """Of an edit."""


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
class EmojiReportHook(Hook):
    """Runs once the training is complete, with the EMA weights where there are some.

    Args:
        flow: how pictures are drawn, as of ``PreviewHook``.
        seed: of the first noise of each picture.
        root: folder of the emoji; None: that of the run's ``EmojiDataset``.
    """

    name = "emoji_report"

    @checked()
    def __init__(self, *, flow: Mapping[str, Any] | None = None, seed: int = 0, root: str | None = None) -> None:
        self.given, self.flow, self.seed, self.root = dict(flow or {}), None, seed, root

    def before_run(self, run: Run) -> None:
        self._root(run)  # refused now, not when the training is complete
        family = trained_family(run.backend)[0]
        self.flow = family.drawing_settings(run.backend.model, self.given, where="EmojiReportHook.flow")

    def _root(self, run: Run) -> Path:
        if self.root is not None:
            return write_emoji(Path(self.root))
        roots = [dataset.root for dataset in run.datasets if isinstance(dataset, EmojiDataset)]
        if not roots:
            problem = "EmojiReportHook.root is not given, and the run has no EmojiDataset"
            raise ConfigError(problem, remedy="root='work_dirs/data/emoji', or any folder that does not exist")
        return roots[0]

    def after_run(self, run: Run) -> None:
        if not run.finished:
            return
        root, ema, asked = self._root(run), ema_of(run), tasks()
        mine = generate_all(
            run.backend,
            run.processor,
            list(enumerate(asked)),
            lambda inferencer, request: self._answer(inferencer, root, *request),
            weights=lambda: ema.swapped(run) if ema else nullcontext(),
        )
        gathered = dist.gather_to_main(mine)
        if gathered is None:
            return
        answers = {number: answer for part in gathered for number, answer in part.items()}
        self._write(run.work_dir, root, asked, [answers[number] for number in range(len(asked))])

    def _answer(self, inferencer: Any, root: Path, number: int, task: Task) -> str | Image.Image:
        if task.group.startswith("read"):
            shown = [stored_picture(root, task.asked)]
            text: str = inferencer.unified_generate("", images=shown, understand=True, max_length=_MAX_WORDS).text
            return text
        drawing: dict[str, Any] = {"flow": self.flow, "seed": self.seed + number}
        if task.before is None:
            made = inferencer.unified_generate(task.asked.request(), **drawing)
        else:
            shown = [stored_picture(root, task.before)]
            made = inferencer.unified_generate(task.asked.instruction(), images=shown, **drawing)
        image: Image.Image = made.images[0]
        return image

    def _write(self, work_dir: Path, root: Path, asked: Sequence[Task], answers: Sequence[str | Image.Image]) -> None:
        """On rank 0."""
        classifier = EmojiClassifier(root)
        drawn = [
            Drawn(task, answer, classifier.classify(answer, task.asked))
            for task, answer in zip(asked, answers, strict=True)
            if isinstance(answer, Image.Image)
        ]
        read = [(task, answer) for task, answer in zip(asked, answers, strict=True) if isinstance(answer, str)]
        results = scores(drawn, read)
        results["flow"] = vars(self.flow)
        write_text_atomic(work_dir / "results.json", json.dumps(results, indent=1) + "\n")
        sheet = samples(drawn, results, root)
        write_atomic(work_dir / "samples.png", lambda path: sheet.save(path, format="PNG"))
        plot_curves(work_dir / METRICS_FILE, work_dir / "curves.png")
        logger().info(
            "Right are %.0f %% of %d emoji drawn by name, %.0f %% of %d in a look that no training record has, %.0f %%"
            " of %d edits to such a look; %.0f %% of %d pictures of such a look are read correctly."
            " Pictures: %s, %s; numbers: %s.",
            *(number for group in ("draw", "draw_new", "edit_new", "read_new") for number in _share(results, group)),
            work_dir / "samples.png",
            work_dir / "curves.png",
            work_dir / "results.json",
        )


@dataclass(frozen=True)
class Drawn:
    """A picture that the model made."""

    task: Task
    image: Image.Image
    finding: Finding


def scores(drawn: Sequence[Drawn], read: Sequence[tuple[Task, str]]) -> dict[str, Any]:
    """``results.json``: for each group its accuracy and size, and of pictures what the classifier saw."""
    results: dict[str, Any] = {}
    for group in ("draw", "draw_new", "edit_new"):
        found = [each.finding for each in drawn if each.task.group == group]
        results[f"{group}_accuracy"] = float(np.mean([one.right for one in found]))
        results[group] = {
            "number": len(found),
            "emoji": float(np.mean([one.seen.emoji == one.asked.emoji for one in found])),
            "look": float(np.mean([one.seen.look == one.asked.look for one in found])),
            "error": float(np.mean([one.error for one in found])),
        }
    for group in ("read", "read_new"):
        right = [text == task.asked.caption() for task, text in read if task.group == group]
        results[f"{group}_accuracy"] = float(np.mean(right))
        results[group] = {"number": len(right)}
    results["classifier"] = f"the nearest of {len(variants())} true pictures, with an error of at most {LIMIT}"
    return results


def _share(results: Mapping[str, Any], group: str) -> tuple[float, int]:
    return 100 * results[f"{group}_accuracy"], results[group]["number"]


def samples(drawn: Sequence[Drawn], results: Mapping[str, Any], root: Path) -> Image.Image:
    """The sheet: what was asked, made and true; a red frame is where the classifier disagrees."""

    def part(group: str, title: str, *, columns: int, every: int = 1) -> Image.Image:
        chosen = [each for each in drawn if each.task.group == group][::every]
        share, number = _share(results, group)
        title = f"{title}. Right: {share:.0f} % of {number}."
        return contact_sheet([_cell(each, root) for each in chosen], columns=columns, title=title, side=_SIDE)

    parts = [
        part("draw", "Drawn by name, beside the true picture", columns=9, every=2),
        part("draw_new", "Drawn in a look that no training picture of this emoji has, beside the true one", columns=9),
        part("edit_new", "Edited to such a look: before, the model's picture, the true one", columns=6, every=2),
    ]
    sheet = Image.new("RGB", (max(each.width for each in parts), sum(each.height for each in parts)), "white")
    top = 0
    for each in parts:
        sheet.paste(each, (0, top))
        top += each.height
    return sheet


def _cell(made: Drawn, root: Path) -> Cell:
    before, asked = made.task.before, made.task.asked
    pictures = [] if before is None else [stored_picture(root, before)]
    text = asked.phrase if before is None else asked.instruction()
    return Cell([*pictures, made.image, stored_picture(root, asked)], text, wrong=not made.finding.right)
