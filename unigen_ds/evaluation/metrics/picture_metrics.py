"""Metrics of pictures: FID, and by a local CLIP-like model CLIP score and multimodal consistency (against texts)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from unigen_ds.config.registry import METRICS, MODELS, build
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.evaluation.metrics.base import (
    NOT_USED,
    LocalModel,
    Metric,
    check_text,
    device,
    pictures,
    pool,
    vectors_of,
)
from unigen_ds.system.log import logger

WEIGHT = 2.5
"""Factor of CLIP-S (Hessel et al., 2021): it brings values of about 0 to 0.4 to about 0 to 1."""


def as_tensor(images: Sequence[Image.Image], size: int | None) -> Tensor:
    """Pictures as float32 of shape (n, 3, height, width), values 0 to 255.

    ``size``: height and width after resizing, bicubic with antialiasing in float32 (Parmar et al., "On Aliased Resizing
    and Surprising Subtleties in GAN Evaluation", CVPR 2022); None: as they are. Raises ``DataError`` for two sizes.
    """
    sizes = {image.size for image in images}
    if size is None and len(sizes) > 1:
        examples = ", ".join(f"{width} x {height}" for width, height in sorted(sizes)[:3])
        raise DataError(f"the images have {len(sizes)} sizes: {examples}", remedy="give resize, or images of one size")
    tensors = [torch.from_numpy(np.array(image, dtype=np.float32)).permute(2, 0, 1) for image in images]
    if size is not None:
        tensors = [F.interpolate(one[None], (size, size), mode="bicubic", antialias=True)[0] for one in tensors]
    return torch.stack(tensors).clamp(0, 255)


@METRICS.register_module()
class FID(Metric):
    """Frechet distance between generated and reference pictures, ``fid_<extractor>`` (Heusel et al., NeurIPS 2017).

    Smaller is better. Values of different extractors, sizes or numbers of samples cannot be compared. With fewer
    samples than dimensions the covariance has not full rank and the value is too large: a warning. A row is the
    features of the prediction, then those of the reference.

    Args:
        extractor: folder of a vision model of transformers, which has its own processor, ``dict(type=...)`` of a
            registered module, or a module that maps float32 (n, 3, height, width) from 0 to 255 to (n, dimensions).
        name: of the extractor, part of the metric's name; None: the folder's or the class's.
        resize: height and width that a module gets, bicubic with antialiasing; None: as they are.
    """

    predicts = compares = "image"

    def __init__(self, *, extractor: Any, name: str | None = None, resize: Annotated[int, Ge(1)] | None = None) -> None:
        super().__init__()
        where = "FID.extractor"
        self.local = LocalModel(extractor, where=where) if isinstance(extractor, str) else None
        self._module = build(MODELS, extractor, where=where) if isinstance(extractor, Mapping) else extractor
        self._resize = resize
        if self.local is None and not callable(self._module):
            choices = "a folder with a vision model of transformers, dict(type=...) of a registered module, or a module"
            raise ConfigError(f"{where} is {extractor!r}", allowed=choices)
        if self.local is not None and resize is not None:
            raise ConfigError(f"FID.resize is {resize}", remedy="leave it out: the folder's processor resizes")
        own = self.local.name if self.local else getattr(self._module, "__name__", type(self._module).__name__)
        self._extractor = name or own.lower()
        self.name = f"fid_{self._extractor}"

    def rows(self, predictions: Sequence[Any], references: Sequence[Any], keys: Sequence[str]) -> Sequence[Any]:
        of_predictions = vectors_of(pictures(predictions, keys, what="the prediction"), self._features)
        of_references = vectors_of(pictures(references, keys, what="the reference"), self._features)
        return list(np.concatenate([of_predictions, of_references], axis=-1))

    def _features(self, images: list[Image.Image]) -> Tensor:
        """Return features in the extractor's own precision, shape (images, dimensions)."""
        if self.local is not None:
            inputs = self.local.image_processor(images=images, return_tensors="pt").to(device())
            features = pool(getattr(self.local.model, "get_image_features", self.local.model)(**inputs))
        else:
            if isinstance(self._module, nn.Module):
                self._module.eval().to(device())
            features = pool(self._module(as_tensor(images, self._resize).to(device())))
        if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != len(images):
            shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise ConfigError(
                f"{self.name}: the extractor returned {shape} for {len(images)} images",
                allowed=f"a tensor of shape ({len(images)}, dimensions)",
            )
        return features.float() if features.dtype in (torch.float16, torch.bfloat16) else features

    def compute(self, rows: Sequence[Any]) -> dict[str, float]:
        if len(rows) == 1:
            raise DataError(f"{self.name} has 1 sample", allowed="at least 2")
        samples, dimensions = len(rows), len(rows[0]) // 2
        if samples < dimensions:
            logger().warning(
                "%s: %d samples are fewer than the %d dimensions of the features; the value is too large and cannot be"
                " compared with one of another number of samples. Remedy: evaluate more samples",
                self.name, samples, dimensions,
            )  # fmt: skip
        return super().compute(rows)

    def values(self, table: np.ndarray) -> dict[str, float]:
        return {self.name: frechet_distance_of_samples(*torch.from_numpy(table).chunk(2, dim=1))}

    def details(self) -> dict[str, str]:
        precision = "features as extracted, statistics float64"
        if self.local is not None:
            digest = self.local.details()["model"].split()[-1]
            return {"model": f"{self._extractor} {digest}", "resize": self.local.resize(), "precision": precision}
        size = f"bicubic, antialiased, {self._resize} x {self._resize} (torch {torch.__version__})"
        weights = blake2b(digest_size=16)
        for name, tensor in sorted(self._module.state_dict().items()) if isinstance(self._module, nn.Module) else ():
            weights.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            weights.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        model = f"{self._extractor} {weights.hexdigest()}"
        return {"model": model, "resize": size if self._resize else NOT_USED, "precision": precision}


def frechet_distance_of_samples(a: Tensor, b: Tensor) -> float:
    """Squared Frechet (2-Wasserstein) distance of the Gaussians of two sets of features, shapes (n, d) and (m, d)
    (Dowson and Landau, 1982): |mean_a - mean_b|^2 + tr(cov_a) + tr(cov_b) - 2 tr((cov_a cov_b)^(1/2)).

    With centred = Q R the last trace is the sum of the singular values of R_a R_b^T: no root of a matrix is needed.
    """
    centred = [(one - one.mean(0)) / (len(one) - 1) ** 0.5 for one in (a, b)]
    factors = [torch.linalg.qr(one, mode="r").R for one in centred]
    overlap = torch.linalg.svdvals(factors[0] @ factors[1].T).sum()
    traces = sum(one.square().sum() for one in centred)
    return float((a.mean(0) - b.mean(0)).square().sum() + traces - 2 * overlap)


class ClipMetric(Metric):
    """The base of both: unit vectors of texts and pictures by ``get_text_features`` and ``get_image_features``."""

    local: LocalModel

    def __init__(self, *, path: str) -> None:
        super().__init__()
        self.local = LocalModel(path, where=f"{type(self).__name__}.path")

    def details(self) -> dict[str, str]:
        return {**super().details(), "resize": self.local.resize()}

    def of_texts(self, texts: Sequence[str]) -> np.ndarray:
        """Float32, shape (texts, dimensions). Texts beyond the model's positions are truncated, with a warning."""
        tokenizer = getattr(self.local.processor, "tokenizer", None) or self.local.tokenizer
        config = self.local.model.config
        limit = int(getattr(config.get_text_config(), "max_position_embeddings", tokenizer.model_max_length))
        self.local.warn_of_truncated(tokenizer, texts, limit)
        options = {"truncation": True, "max_length": limit, "return_tensors": "pt"}
        options["padding"] = "max_length" if "siglip" in config.model_type else True  # SigLIP was trained with it
        return self._vectors("get_text_features", texts, lambda part: tokenizer(part, **options))

    def of_images(self, images: Sequence[Image.Image]) -> np.ndarray:
        """Float32, shape (images, dimensions); resized by the model's own processor."""
        processor = self.local.image_processor
        return self._vectors("get_image_features", images, lambda part: processor(images=part, return_tensors="pt"))

    def _vectors(self, name: str, values: Sequence[Any], prepare: Callable[[list[Any]], Any]) -> np.ndarray:
        model = self.local.model
        if not hasattr(model, name):
            raise ConfigError(
                f"{self.local.where}: {type(model).__name__} has no {name}",
                allowed="a CLIP-like model: CLIP, SigLIP, SigLIP 2, ALIGN, Chinese-CLIP, AltCLIP",
            )
        vectors = vectors_of(values, lambda part: pool(getattr(model, name)(**prepare(part).to(device()))).float())
        return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


@METRICS.register_module()
class CLIPScore(ClipMetric):
    """100 times the mean cosine between a picture and its prompt, not below 0 (Hessel et al., EMNLP 2021).

    As torchmetrics computes it: the mean is limited, not every sample. Values of different models cannot be compared.

    Args:
        path: folder of a CLIP-like model, as transformers' ``AutoModel`` and ``AutoProcessor`` read it.
    """

    name = "clip_score"
    predicts = "image"
    compares = "prompt"

    def rows(self, predictions: Sequence[Any], references: Sequence[Any], keys: Sequence[str]) -> Sequence[Any]:
        images = pictures(predictions, keys, what="the prediction")
        prompts = [check_text(one, what="the prompt", key=key) for one, key in zip(references, keys, strict=True)]
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
    """

    name = "multimodal_consistency"
    predicts = "text and image"
    compares = "nothing"

    def rows(self, predictions: Sequence[Any], references: Sequence[Any], keys: Sequence[str]) -> Sequence[Any]:
        for pair, key in zip(predictions, keys, strict=True):
            if not isinstance(pair, (list, tuple)) or len(pair) != 2:
                raise DataError(f"sample {key!r}: the prediction is {type(pair).__name__}", allowed="(text, picture)")
        answers, drawings = zip(*predictions, strict=True)
        texts = [check_text(one, what="the generated text", key=key) for one, key in zip(answers, keys, strict=True)]
        images = pictures(drawings, keys, what="the generated picture")
        return list(np.concatenate([self.of_texts(texts), self.of_images(images)], axis=-1))

    def values(self, table: np.ndarray) -> dict[str, float]:
        of_texts, of_images = np.split(table, 2, axis=1)
        cosines = of_images @ of_texts.T
        own = np.einsum("nd,nd->n", of_images, of_texts)
        closest = own >= cosines.max(1) - 1e-6  # equal texts are equally close, up to the rounding of float32
        return {
            self.name: float((WEIGHT * own.clip(min=0)).mean()),
            f"{self.name}_r_precision": float(closest.mean()),
        }
