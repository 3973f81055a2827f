"""CLIPScore and multimodal consistency: how well pictures and texts match, by a local CLIP-like model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge
from PIL import Image

from unigen_ds.config.registry import METRICS
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.evaluation.metrics.base import Metric, pictures, text
from unigen_ds.evaluation.metrics.local_model import LocalModel, exact, pooled
from unigen_ds.system.log import logger

WEIGHT = 2.5
"""Of CLIP-S (Hessel et al., 2021), which brings its values from about 0 to 0.4 to about 0 to 1."""


class ClipMetric(Metric):
    """The base of both: unit vectors of texts and pictures by ``get_text_features`` and ``get_image_features``."""

    def __init__(self, *, path: str, batch_size: Annotated[int, Ge(1)] = 16, device: str | None = None) -> None:
        super().__init__()
        self._where, self._batch_size = f"{type(self).__name__}.path", batch_size
        self._local = LocalModel(path, where=self._where, device=device)

    def check(self) -> None:
        self._local.check()

    def details(self) -> dict[str, str]:
        return {**self._local.details(), "resize": self._local.resize()}

    def of_texts(self, texts: Sequence[str]) -> np.ndarray:
        """Float32, shape (texts, dimensions). Texts beyond the model's positions are truncated, with a warning."""
        tokenizer = getattr(self._local.processor, "tokenizer", None) or self._local.tokenizer
        config = self._model().config
        limit = int(getattr(config.get_text_config(), "max_position_embeddings", tokenizer.model_max_length))
        long = sum(len(tokenizer(one)["input_ids"]) > limit for one in texts)
        if long:
            logger().warning("%s: %d of %d texts are longer than %d tokens and are truncated",
                             self._where, long, len(texts), limit)  # fmt: skip
        options = {"truncation": True, "max_length": limit, "return_tensors": "pt"}
        options["padding"] = "max_length" if "siglip" in config.model_type else True  # SigLIP was trained with it
        return self._unit("get_text_features", texts, lambda part: tokenizer(part, **options))

    def of_images(self, images: Sequence[Image.Image]) -> np.ndarray:
        """Float32, shape (images, dimensions); resized by the model's own processor."""
        processor = self._local.image_processor
        return self._unit("get_image_features", images, lambda part: processor(images=part, return_tensors="pt"))

    def _model(self) -> Any:
        model = self._local.model
        if not hasattr(model, "get_text_features") or not hasattr(model, "get_image_features"):
            raise ConfigError(
                f"{self._where}: {type(model).__name__} has no features of texts and images",
                allowed="a CLIP-like model: CLIP, SigLIP, SigLIP 2, ALIGN, Chinese-CLIP, AltCLIP",
            )
        return model

    def _unit(self, name: str, values: Sequence[Any], prepared: Any) -> np.ndarray:
        parts = [list(values[n : n + self._batch_size]) for n in range(0, len(values), self._batch_size)]
        features = getattr(self._model(), name)
        outputs = [pooled(features(**prepared(part).to(self._local.device))) for part in parts]
        vectors = torch.cat(outputs).float()
        return (vectors / vectors.norm(dim=-1, keepdim=True)).cpu().numpy()


@METRICS.register_module()
class CLIPScore(ClipMetric):
    """100 times the mean cosine between a picture and its prompt, not below 0 (Hessel et al., EMNLP 2021).

    As torchmetrics computes it: the mean is limited, not every sample. Values of different models cannot be compared.

    Args:
        path: folder of a CLIP-like model, as transformers' ``AutoModel`` and ``AutoProcessor`` read it.
        batch_size: pictures or texts at a time; changes rounding only.
        device: of the model; None: this process's CUDA device, or the CPU.
    """

    name = "clip_score"
    predicts = "image"
    compares = "prompt"

    def rows(self, predictions: Sequence[Any], references: Sequence[Any], keys: Sequence[str]) -> Sequence[Any]:
        images = pictures(predictions, keys, what="the prediction")
        prompts = [text(one, what="the prompt", key=key) for one, key in zip(references, keys, strict=True)]
        with exact():
            products = self.of_images(images) * self.of_texts(prompts)
        return products.astype(np.float64).sum(-1, keepdims=True).tolist()

    def values(self, table: np.ndarray) -> dict[str, float]:
        return {self.name: max(100.0 * float(table.mean()), 0.0)}


@METRICS.register_module()
class MultimodalConsistency(ClipMetric):
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

    def rows(self, predictions: Sequence[Any], references: Sequence[Any], keys: Sequence[str]) -> Sequence[Any]:
        for pair, key in zip(predictions, keys, strict=True):
            if not isinstance(pair, (list, tuple)) or len(pair) != 2:
                raise DataError(f"sample {key!r}: the prediction is {type(pair).__name__}", allowed="(text, picture)")
        texts = [text(one, what="the generated text", key=key) for (one, _), key in zip(predictions, keys, strict=True)]
        images = pictures([one for _, one in predictions], keys, what="the generated picture")
        with exact():
            return list(np.concatenate([self.of_texts(texts), self.of_images(images)], axis=-1))

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
