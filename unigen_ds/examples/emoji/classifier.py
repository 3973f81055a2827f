"""Whether a picture shows the emoji that was asked for, in the look that was asked for, sharply enough.

It knows the 240 true pictures and nothing of the model. A drawn picture is what the nearest true one is, pixel by
pixel; a copy of a training picture, where a look was asked for that no training record has, is therefore wrong. It is
right only if it is also close: its error, relative to what a blank sheet has, is at most ``LIMIT``. Of the true
pictures in blocks of 2 x 2 pixels 97 % pass, in blocks of 4 x 4 fewer than 20 %; the median error of those is 0.36, of
a shift by one pixel 0.33, of another emoji 0.7.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from unigen_ds.config.registry import METRICS
from unigen_ds.core.errors import DataError
from unigen_ds.evaluation.metrics import Metric
from unigen_ds.examples.emoji.catalogue import Variant, variants
from unigen_ds.examples.emoji.dataset import SIDE, stored_picture, write_emoji

LIMIT = 0.3


class EmojiClassifier:
    """Compares with the pictures under ``root``, which are written where there are none."""

    def __init__(self, root: str | Path) -> None:
        folder = write_emoji(Path(root))
        self.variants = variants()
        self._true = np.stack([_pixels(stored_picture(folder, variant)) for variant in self.variants])

    def nearest(self, image: Image.Image) -> Variant:
        """The variant whose true picture is nearest. Raises ``DataError`` for a picture of another size."""
        if image.size != (SIDE, SIDE):
            raise DataError(f"a picture of {image.size[0]} x {image.size[1]} pixels", allowed=f"{SIDE} x {SIDE}")
        return self.variants[int(np.linalg.norm(self._true - _pixels(image), axis=1).argmin())]

    def error(self, image: Image.Image, asked: Variant) -> float:
        """Distance to the true picture of ``asked``; 1 is that of a blank sheet."""
        true = self._true[self.variants.index(asked)]
        return float(np.linalg.norm(true - _pixels(image)) / np.linalg.norm(true - 1.0))

    def right(self, image: Image.Image, asked: Variant) -> bool:
        return self.nearest(image) == asked and self.error(image, asked) <= LIMIT


@METRICS.register_module()
class EmojiAccuracy(Metric):
    """For ``EvaluateHook``: ``emoji_right``, the share of pictures that are right; ``emoji_shape`` and ``emoji_look``,
    those of which the nearest true picture has the emoji, or the colour or skin tone, that was asked for;
    ``emoji_error``, the mean distance from the true picture, where a blank sheet has 1. A reference is a true picture.

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
            asked, seen = self._classifier.nearest(reference), self._classifier.nearest(image)
            right, error = self._classifier.right(image, asked), self._classifier.error(image, asked)
            rows.append([right, seen.emoji == asked.emoji, seen.look == asked.look, error])
        return rows

    def values(self, table: np.ndarray) -> dict[str, float]:
        names = ("right", "shape", "look", "error")
        return {f"{self.name}_{name}": float(value) for name, value in zip(names, table.mean(0), strict=True)}


def _pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB"), dtype=np.float64).reshape(-1) / 255.0
