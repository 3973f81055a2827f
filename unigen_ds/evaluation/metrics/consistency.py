"""Multimodal consistency: do the text and the picture that a model made for one sample belong together?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge

from unigen_ds.core.errors import DataError
from unigen_ds.core.registry import METRICS
from unigen_ds.evaluation.metrics.base import Metric, text
from unigen_ds.evaluation.metrics.clip_score import ClipModel
from unigen_ds.evaluation.metrics.images import pictures
from unigen_ds.evaluation.metrics.local_model import exact

WEIGHT = 2.5
"""Of CLIP-S (Hessel et al., 2021), which brings its values from about 0 to 0.4 to about 0 to 1."""


@METRICS.register_module()
class MultimodalConsistency(Metric):
    """Whether generated text and generated picture agree, two numbers from the same embeddings.

    ``multimodal_consistency``: CLIP-S, the mean of 2.5 * max(cosine, 0) over the pairs (Hessel et al., "CLIPScore",
    EMNLP 2021), with the model's own text instead of a caption. ``multimodal_consistency_r_precision``:
    CLIP-R-Precision, the share of pictures to which no other sample's text is closer than their own (Park et al.,
    "Benchmark for Compositional Text-to-Image Synthesis", NeurIPS 2021); it has no offset of the model, but depends on
    the number of samples. A prediction is a pair (text, picture); references are not used and may be None.

    Args:
        path: folder of a CLIP-like model, as transformers' ``AutoModel`` and ``AutoProcessor`` read it.
        batch_size: pictures or texts at a time; changes rounding only.
        device: of the model; None: this process's CUDA device, or the CPU.
    """

    name = "multimodal_consistency"
    predicts = "text and image"
    compares = "nothing"

    def __init__(self, *, path: str, batch_size: Annotated[int, Ge(1)] = 16, device: str | None = None) -> None:
        super().__init__()
        self._clip = ClipModel(path, where="MultimodalConsistency.path", batch_size=batch_size, device=device)

    def check(self) -> None:
        self._clip.local.check()

    def rows(self, predictions: Sequence[Any], references: Sequence[Any], keys: Sequence[str]) -> Sequence[Any]:
        for pair, key in zip(predictions, keys, strict=True):
            if not isinstance(pair, (list, tuple)) or len(pair) != 2:
                raise DataError(f"sample {key!r}: the prediction is {type(pair).__name__}", allowed="(text, picture)")
        written = [
            text(pair[0], what="the generated text", key=key) for pair, key in zip(predictions, keys, strict=True)
        ]
        drawn = pictures([pair[1] for pair in predictions], keys, what="the generated picture")
        with exact():
            return list(np.concatenate([self._clip.of_texts(written), self._clip.of_images(drawn)], axis=-1))

    def table(self, rows: Sequence[Any]) -> np.ndarray:
        return np.stack(rows).astype(np.float64)

    def values(self, table: np.ndarray) -> dict[str, float]:
        of_texts, of_images = np.split(table, 2, axis=1)
        cosines = of_images @ of_texts.T
        own = np.einsum("nd,nd->n", of_images, of_texts)
        closest = own >= cosines.max(1) - 1e-6  # equal texts are equally close, up to the rounding of float32
        return {
            self.name: float((WEIGHT * own.clip(min=0)).mean()),
            f"{self.name}_r_precision": float(closest.mean()),
        }

    def details(self) -> dict[str, str]:
        return self._clip.details()
