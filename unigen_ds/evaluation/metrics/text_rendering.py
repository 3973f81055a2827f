"""Text rendering: can the text that a picture should show be read in it?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unigen_ds.config.registry import METRICS
from unigen_ds.evaluation.metrics.base import Metric, package, pictures, text
from unigen_ds.evaluation.metrics.local_model import hash_of_files


@METRICS.register_module()
class TextRendering(Metric):
    """Text read from pictures by RapidOCR (PP-OCRv4) against the text that they should show, 0 to 1.

    ``text_rendering_accuracy``: the share of pictures whose text is exactly right. ``text_rendering_similarity``: the
    mean of 1 - edit distance / length of the longer text (both as in AnyText, Tuo et al., ICLR 2024). Lines are joined
    in reading order by spaces, and repeated spaces count as one. A picture without readable text has an empty text.

    Args:
        ignore_case: compare without upper and lower case.
    """

    name = "text_rendering"
    predicts = "image"
    compares = "text"
    library = "rapidocr-onnxruntime"

    def __init__(self, *, ignore_case: bool = False) -> None:
        super().__init__(ignore_case=ignore_case)
        self._ignore_case = ignore_case
        self._reader: Any = None

    def rows(self, predictions: Sequence[Any], references: Sequence[Any], keys: Sequence[str]) -> Sequence[Any]:
        distance = package("torchmetrics.functional.text").edit_distance
        rows = []
        for image, reference, key in zip(
            pictures(predictions, keys, what="the prediction"), references, keys, strict=True
        ):
            wanted, read = self._plain(text(reference, what="the text to show", key=key)), self._plain(self.read(image))
            longer = max(len(read), len(wanted))
            edits = int(distance([read], [wanted], reduction="sum")) if read and wanted else longer
            rows.append([float(read == wanted), 1.0 - edits / longer if longer else 1.0])
        return rows

    def read(self, image: Any) -> str:
        """The text of a picture, its lines joined by spaces."""
        if self._reader is None:
            self._reader = package("rapidocr_onnxruntime").RapidOCR()
        lines, _ = self._reader(np.ascontiguousarray(np.asarray(image)[:, :, ::-1]))  # as OpenCV has it: BGR
        return " ".join(line[1] for line in lines or ())

    def values(self, table: np.ndarray) -> dict[str, float]:
        exact, similar = table.mean(0)
        return {f"{self.name}_accuracy": float(exact), f"{self.name}_similarity": float(similar)}

    def details(self) -> dict[str, str]:
        folder = Path(package("rapidocr_onnxruntime").__path__[0]) / "models"
        model = f"PP-OCRv4 {hash_of_files(folder.glob('*.onnx'))}"
        return {"model": model, "precision": "model float32, mean float64"}

    def _plain(self, value: str) -> str:
        plain = " ".join(value.split())
        return plain.lower() if self._ignore_case else plain
