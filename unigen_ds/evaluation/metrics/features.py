"""Features of pictures for FID and KID: who extracts them, and the base of both metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import PIL
import torch
from annotated_types import Ge
from PIL import Image
from torch import Tensor, nn

from unigen_ds.config.registry import MODELS, build
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.evaluation.metrics.base import NOT_USED, Metric, pictures
from unigen_ds.evaluation.metrics.inception import SIZE, inception
from unigen_ds.evaluation.metrics.local_model import LocalModel, default_device, exact, pooled

ALLOWED = (
    "a file with the weights of FID's Inception network (.pth, .pt, .safetensors), a folder with a vision model of"
    " transformers, dict(type=...) of a registered module, or a module"
)


class ModuleExtractor:
    """A module or function: float32 (n, 3, height, width), values 0 to 255 -> (n, dimensions).

    Every extractor has ``name``, a part of the metric's, ``check``, ``features`` and ``details``, for the provenance.
    """

    def __init__(
        self, module: Callable[[Tensor], Any], name: str | None, resize: int | None, device: str | None
    ) -> None:
        self.module, self._resize, self._device = module, resize, device
        self.name = name or getattr(module, "__name__", type(module).__name__).lower()

    def check(self) -> None:
        """Raise ``ConfigError`` for what is missing."""

    def features(self, images: Sequence[Image.Image]) -> Tensor:
        """Shape (images, dimensions), on any device."""
        device = default_device(self._device)
        if isinstance(self.module, nn.Module):
            self.module.eval().to(device)
        return pooled(self.module(as_tensor(images, self._resize).to(device)))

    def details(self) -> dict[str, str]:
        size = f"bicubic, antialiased, {self._resize} x {self._resize} (Pillow {PIL.__version__})"
        return {"model": f"{self.name} {self._hash()}", "resize": size if self._resize else NOT_USED}

    def _hash(self) -> str:
        """Return a hash of the weights; a function has none."""
        if not isinstance(self.module, nn.Module):
            return "without weights"
        digest = blake2b(digest_size=16)
        for name, tensor in sorted(self.module.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


class InceptionExtractor(ModuleExtractor):
    """FID's own network, from a file of its weights; pictures are resized to 299 x 299."""

    def __init__(self, path: Path, where: str, name: str | None, resize: int | None, device: str | None) -> None:
        self._path, self._where = path.expanduser(), where
        self._resize, self._device, self.name = resize or SIZE, device, name or "inception"

    def check(self) -> None:
        if not self._path.is_file():
            raise ConfigError(
                f"{self._where} is {str(self._path)!r}, and there is no such file",
                allowed=ALLOWED,
                remedy=f"a relative path begins at {Path.cwd()}",
            )

    @cached_property
    def module(self) -> nn.Module:  # type: ignore[override]
        self.check()
        return inception(self._path)


class FolderExtractor:
    """A vision model of transformers in a local folder, with its own processor: CLIP-like ones, DINOv2, ViT."""

    def __init__(self, path: str, where: str, name: str | None, device: str | None) -> None:
        self._local, self._where = LocalModel(path, where=where, device=device), where
        self.name = name or self._local.name.lower()

    def check(self) -> None:
        try:
            self._local.check()
        except ConfigError as error:
            raise ConfigError(error.problem, allowed=ALLOWED, remedy=error.remedy) from error

    def features(self, images: Sequence[Image.Image]) -> Tensor:
        inputs = self._local.image_processor(images=list(images), return_tensors="pt").to(self._local.device)
        model = self._local.model
        vectors = pooled(getattr(model, "get_image_features", model)(**inputs))
        if vectors is None:
            raise ConfigError(f"{self._where}: {type(model).__name__} has no vector for a whole image (pooler_output)")
        return vectors

    def details(self) -> dict[str, str]:
        model = self._local.details()["model"].split()[-1]
        return {"model": f"{self.name} {model}", "resize": self._local.resize()}


def extractor_of(
    value: Any, *, where: str, name: str | None, resize: int | None, device: str | None
) -> ModuleExtractor | FolderExtractor:
    """What an argument ``extractor`` names. Raises ``ConfigError``."""
    if isinstance(value, str) and Path(value).suffix in (".pth", ".pt", ".safetensors"):
        return InceptionExtractor(Path(value), f"{where}.extractor", name, resize, device)
    if isinstance(value, str):
        if resize is not None:
            raise ConfigError(f"{where}.resize is {resize}", remedy="leave it out: the folder's processor resizes")
        return FolderExtractor(value, f"{where}.extractor", name, device)
    module = build(MODELS, value, where=f"{where}.extractor") if isinstance(value, Mapping) else value
    if not callable(module):
        raise ConfigError(f"{where}.extractor is {value!r}", allowed=ALLOWED)
    return ModuleExtractor(module, name, resize, device)


def as_tensor(images: Sequence[Image.Image], size: int | None) -> Tensor:
    """Pictures as float32 of shape (n, 3, height, width), values 0 to 255.

    ``size``: height and width after resizing, bicubic with antialiasing in float32, as clean-fid does it (Parmar et
    al., "On Aliased Resizing and Surprising Subtleties in GAN Evaluation", CVPR 2022); None: as they are, which must be
    one size. Raises ``DataError``.
    """
    sizes = {image.size for image in images}
    if size is None and len(sizes) > 1:
        listed = ", ".join(f"{width} x {height}" for width, height in sorted(sizes)[:3])
        raise DataError(f"the images have {len(sizes)} sizes: {listed}", remedy="give resize, or images of one size")
    return torch.from_numpy(np.stack([_resized(image, size) for image in images])).permute(0, 3, 1, 2)


def _resized(image: Image.Image, size: int | None) -> np.ndarray:
    """float32, shape (height, width, 3)."""
    if size is None or image.size == (size, size):
        return np.asarray(image, dtype=np.float32)
    bands = [
        band.convert("F").resize((size, size), Image.Resampling.BICUBIC, reducing_gap=None) for band in image.split()
    ]
    return np.stack([np.asarray(band, dtype=np.float32) for band in bands], axis=-1).clip(0, 255)


class FeatureMetric(Metric):
    """The base of FID and KID: a row is the features of the prediction, then those of the reference."""

    predicts = "image"
    compares = "image"

    def __init__(
        self,
        *,
        extractor: Any,
        name: str | None = None,
        resize: Annotated[int, Ge(1)] | None = None,
        batch_size: Annotated[int, Ge(1)] = 16,
        device: str | None = None,
    ) -> None:
        super().__init__()
        where = type(self).__name__
        self._extractor = extractor_of(extractor, where=where, name=name, resize=resize, device=device)
        self._batch_size = batch_size
        self.name = f"{where.lower()}_{self._extractor.name}"

    def check(self) -> None:
        self._extractor.check()

    def rows(self, predictions: Sequence[Any], references: Sequence[Any], keys: Sequence[str]) -> Sequence[Any]:
        of_predictions = self._features(pictures(predictions, keys, what="the prediction"))
        of_references = self._features(pictures(references, keys, what="the reference"))
        return list(np.concatenate([of_predictions, of_references], axis=-1))

    def _features(self, images: Sequence[Image.Image]) -> np.ndarray:
        """Return features in the extractor's own precision, shape (images, dimensions)."""
        parts = [images[n : n + self._batch_size] for n in range(0, len(images), self._batch_size)]
        with exact():
            return torch.cat([self._features_of_part(part) for part in parts]).cpu().numpy()

    def _features_of_part(self, images: Sequence[Image.Image]) -> Tensor:
        features = self._extractor.features(images)
        if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != len(images):
            shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise ConfigError(
                f"{self.name}: the extractor returned {shape} for {len(images)} images",
                allowed=f"a tensor of shape ({len(images)}, dimensions)",
            )
        return features.float() if features.dtype in (torch.float16, torch.bfloat16) else features

    def table(self, rows: Sequence[Any]) -> np.ndarray:
        return np.stack(rows).astype(np.float64)

    def details(self) -> dict[str, str]:
        return {**self._extractor.details(), "precision": "features as extracted, statistics float64"}
