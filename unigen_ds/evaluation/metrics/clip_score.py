"""CLIPScore: how well a picture matches its prompt, by a local CLIP-like model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge
from PIL import Image

from unigen_ds.core.errors import ConfigError
from unigen_ds.core.log import logger
from unigen_ds.core.registry import METRICS
from unigen_ds.evaluation.metrics.base import Metric, text
from unigen_ds.evaluation.metrics.images import pictures
from unigen_ds.evaluation.metrics.local_model import LocalModel, exact, pooled


class ClipModel:
    """Unit vectors of texts and pictures by a model with ``get_text_features`` and ``get_image_features``."""

    def __init__(self, path: str, *, where: str, batch_size: int, device: str | None) -> None:
        self.local, self._where, self._batch_size = LocalModel(path, where=where, device=device), where, batch_size

    def of_texts(self, texts: Sequence[str]) -> np.ndarray:
        """Float32, shape (texts, dimensions). Texts beyond the model's positions are truncated, with a warning."""
        tokenizer = getattr(self.local.processor, "tokenizer", None) or self.local.tokenizer
        config = self._model().config
        limit = int(getattr(config.get_text_config(), "max_position_embeddings", tokenizer.model_max_length))
        long = sum(len(tokenizer(one)["input_ids"]) > limit for one in texts)
        if long:
            logger().warning("%s: %d of %d texts are longer than %d tokens and are truncated",
                             self._where, long, len(texts), limit)  # fmt: skip
        padding = "max_length" if "siglip" in config.model_type else True  # SigLIP was trained with it
        return self._unit(
            [
                self._model().get_text_features(
                    **tokenizer(list(part), padding=padding, truncation=True, max_length=limit, return_tensors="pt").to(
                        self.local.device
                    )
                )
                for part in self._parts(texts)
            ]
        )

    def of_images(self, images: Sequence[Image.Image]) -> np.ndarray:
        """Float32, shape (images, dimensions); resized by the model's own processor."""
        processor = getattr(self.local.processor, "image_processor", None) or self.local.processor
        return self._unit(
            [
                self._model().get_image_features(
                    **processor(images=list(part), return_tensors="pt").to(self.local.device)
                )
                for part in self._parts(images)
            ]
        )

    def details(self) -> dict[str, str]:
        """For the provenance."""
        return {
            "model": f"{self.local.name} {self.local.model_hash}",
            "precision": "model float32, mean float64",
            "resize": resize_of(self.local.processor),
        }

    def _model(self) -> Any:
        model = self.local.model
        if not hasattr(model, "get_text_features") or not hasattr(model, "get_image_features"):
            raise ConfigError(
                f"{self._where}: {type(model).__name__} has no features of texts and images",
                allowed="a CLIP-like model: CLIP, SigLIP, SigLIP 2, ALIGN, Chinese-CLIP, AltCLIP",
            )
        return model

    def _parts(self, values: Sequence[Any]) -> list[Sequence[Any]]:
        return [values[n : n + self._batch_size] for n in range(0, len(values), self._batch_size)]

    @staticmethod
    def _unit(outputs: Sequence[Any]) -> np.ndarray:
        vectors = torch.cat([pooled(output) for output in outputs]).float()
        return (vectors / vectors.norm(dim=-1, keepdim=True)).cpu().numpy()


@METRICS.register_module()
class CLIPScore(Metric):
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

    def __init__(self, *, path: str, batch_size: Annotated[int, Ge(1)] = 16, device: str | None = None) -> None:
        super().__init__()
        self._clip = ClipModel(path, where="CLIPScore.path", batch_size=batch_size, device=device)

    def check(self) -> None:
        self._clip.local.check()

    def rows(self, predictions: Sequence[Any], references: Sequence[Any], keys: Sequence[str]) -> Sequence[Any]:
        images = pictures(predictions, keys, what="the prediction")
        prompts = [text(one, what="the prompt", key=key) for one, key in zip(references, keys, strict=True)]
        with exact():
            products = self._clip.of_images(images) * self._clip.of_texts(prompts)
        return products.astype(np.float64).sum(-1, keepdims=True).tolist()

    def values(self, table: np.ndarray) -> dict[str, float]:
        return {self.name: max(100.0 * float(table.mean()), 0.0)}

    def details(self) -> dict[str, str]:
        return self._clip.details()


def resize_of(processor: Any) -> str:
    """How a processor of transformers resizes, in words; Pillow's resizing is antialiased."""
    images = getattr(processor, "image_processor", None) or processor
    size, crop = (dict(getattr(images, name, None) or {}) for name in ("size", "crop_size"))
    filter_name = Image.Resampling(int(getattr(images, "resample", 3))).name.lower()
    return f"{filter_name}, antialiased, {size}" + (
        f", crop {crop}" if getattr(images, "do_center_crop", False) else ""
    )
