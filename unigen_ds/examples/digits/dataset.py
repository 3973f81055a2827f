"""Scikit-learn's 1,797 real handwritten digits as a data set: 8 x 8 grey PNG files and conversations about them.

A real task, small enough for every test and every first run: draw a named digit, and name a drawn one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from unigen_ds.config.registry import DATASETS
from unigen_ds.data.datasets.dataset import UnifiedGenerationDataset
from unigen_ds.data.images.image_files import open_image
from unigen_ds.data.order.order import permute_many
from unigen_ds.data.samples.processor import ConversationProcessor
from unigen_ds.examples.demo import prepare_folder, record
from unigen_ds.system.machine import import_optional

_SPLIT_KEY = 20240817
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TRAIN_SIZE = 1500


def draw_prompt(digit: int) -> str:
    """The user's request: ``draw a handwritten seven``."""
    return f"draw a handwritten {WORDS[digit]}"


def caption(digit: int) -> str:
    """The assistant's answer about an image: ``this is a seven``."""
    return f"this is a {WORDS[digit]}"


@DATASETS.register_module()
class DigitsDataset(UnifiedGenerationDataset):
    """The digits; 1,500 for training and 297 for validation.

    Args:
        root: folder of the files, written when it does not exist; safe where several processes start together.
        split: ``train`` or ``val``.
        processor: plans a conversation; its transforms need ``mode='L'`` or ``'RGB'``.
        task: ``draw`` (text to image), ``caption`` (image to text) or ``both`` (two records a digit).
        weight: relative share of an epoch in a mixture; all sources have one, or none has.
        name: first part of a sample id; None: ``digits_<split>``.
    """

    def __init__(
        self,
        root: str | Path,
        split: Literal["train", "val"] = "train",
        *,
        processor: ConversationProcessor,
        task: Literal["both", "draw", "caption"] = "both",
        weight: float | None = None,
        name: str | None = None,
    ) -> None:
        self.root = write_digits(Path(root))
        path = self.root / (f"{split}.jsonl" if task == "both" else f"{split}_{task}.jsonl")
        super().__init__(path, processor, weight=weight, name=name or f"digits_{split}")


def write_digits(root: Path) -> Path:
    """Write images and JSONL files under ``root`` unless they are there; returns ``root``."""
    return prepare_folder(root, _write, argument="DigitsDataset.root")


def read_split(root: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """The real images of a split as the files hold them: ``[n, 8, 8]`` float64 in 0..1, and their digits ``[n]``."""
    images, labels = [], []
    for line in (root / f"{split}_caption.jsonl").read_text(encoding="utf-8").splitlines():
        question, answer = json.loads(line)["conversations"]
        images.append(np.asarray(open_image(root / question["image_path"]), dtype=np.float64) / 255.0)
        labels.append(WORDS.index(answer["content"].split()[-1]))
    return np.stack(images), np.asarray(labels)


def _write(folder: Path) -> None:
    data = import_optional("sklearn.datasets", "DigitsDataset", install="'unigen_ds[demo]'").load_digits()
    images = np.round(data.images * (255.0 / 16.0)).astype(np.uint8)
    order = permute_many(np.arange(len(images), dtype=np.int64), len(images), _SPLIT_KEY).tolist()
    for split, members in (("train", order[:TRAIN_SIZE]), ("val", order[TRAIN_SIZE:])):
        (folder / split).mkdir()
        draw, describe = [], []
        for number in members:
            digit, path = int(data.target[number]), f"{split}/{number:04d}.png"
            Image.fromarray(images[number]).save(folder / path)
            draw.append(record(("user", "text", draw_prompt(digit)), ("assistant", "image", path)))
            describe.append(record(("user", "image", path), ("assistant", "text", caption(digit))))
        both = [line for pair in zip(draw, describe, strict=True) for line in pair]
        for suffix, lines in (("", both), ("_draw", draw), ("_caption", describe)):
            (folder / f"{split}{suffix}.jsonl").write_text("".join(lines), encoding="utf-8")
