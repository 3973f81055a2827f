"""Features of pictures for FID and KID: who extracts them, and the base of both metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from PIL import Image
from torch import Tensor, nn

from unigen_ds.core.errors import ConfigError
from unigen_ds.core.registry import MODELS, build
from unigen_ds.evaluation.metrics.base import NOT_USED, Metric
from unigen_ds.evaluation.metrics.clip_score import resize_of
from unigen_ds.evaluation.metrics.images import as_tensor, pictures
from unigen_ds.evaluation.metrics.inception import SIZE, inception
from unigen_ds.evaluation.metrics.local_model import LocalModel, default_device, exact, pooled

ALLOWED = (
    "a file with the weights of FID's Inception network (.pth, .pt, .safetensors), a folder with a vision model of"
    " transformers, dict(type=...) of a registered module, or a module"
)


class Extractor:
    """Pictures -> features, with its name and a hash for the provenance."""

    name: str

    def check(self) -> None:
        """Raise ``ConfigError`` for what is missing."""

    def features(self, images: Sequence[Image.Image]) -> Tensor:
        """Shape (images, dimensions), on any device."""
        raise NotImplementedError

    def details(self) -> dict[str, str]:
        """``model`` and ``resize`` of a provenance."""
        raise NotImplementedError


class ModuleExtractor(Extractor):
    """A module or function: float32 (n, 3, height, width), values 0 to 255 -> (n, dimensions)."""

    def __init__(
        self, module: Callable[[Tensor], Any], *, name: str | None, resize: int | None, device: str | None
    ) -> None:
        self._module, self._resize, self._device = module, resize, device
        self.name = name or getattr(module, "__name__", type(module).__name__).lower()

    def features(self, images: Sequence[Image.Image]) -> Tensor:
        device = default_device(self._device)
        if isinstance(self._module, nn.Module):
            self._module.eval().to(device)
        return pooled(self._module(as_tensor(images, self._resize).to(device)))

    def details(self) -> dict[str, str]:
        size = f"bicubic, antialiased, {self._resize} x {self._resize} (Pillow {PIL.__version__})"
        return {"model": f"{self.name} {self._hash()}", "resize": size if self._resize else NOT_USED}

    def _hash(self) -> str:
        """Of the weights; a function has none."""
        if not isinstance(self._module, nn.Module):
            return "without weights"
        digest = blake2b(digest_size=16)
        for name, tensor in sorted(self._module.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


class FolderExtractor(Extractor):
    """A vision model of transformers in a local folder, with its own processor: CLIP-like ones, DINOv2, ViT."""

    def __init__(self, path: str, *, where: str, name: str | None, device: str | None) -> None:
        self._local = LocalModel(path, where=where, device=device)
        self._where = where
        self.name = name or self._local.name.lower()

    def check(self) -> None:
        try:
            self._local.check()
        except ConfigError as error:
            raise ConfigError(error.problem, allowed=ALLOWED, remedy=error.remedy) from error

    def features(self, images: Sequence[Image.Image]) -> Tensor:
        processor = getattr(self._local.processor, "image_processor", None) or self._local.processor
        inputs = processor(images=list(images), return_tensors="pt").to(self._local.device)
        model = self._local.model
        found = pooled(getattr(model, "get_image_features", model)(**inputs))
        if found is None:
            raise ConfigError(f"{self._where}: {type(model).__name__} has no vector for a whole image (pooler_output)")
        return found

    def details(self) -> dict[str, str]:
        return {"model": f"{self.name} {self._local.model_hash}", "resize": resize_of(self._local.processor)}


class InceptionExtractor(Extractor):
    """FID's own network, from a file of its weights; pictures are resized to 299 x 299."""

    def __init__(self, path: Path, *, where: str, name: str | None, resize: int | None, device: str | None) -> None:
        self._path, self._where = path.expanduser(), where
        self._resize, self._device = resize or SIZE, device
        self.name = name or "inception"

    def check(self) -> None:
        if not self._path.is_file():
            raise ConfigError(
                f"{self._where} is {str(self._path)!r}, and there is no such file",
                allowed=ALLOWED,
                remedy=f"a relative path begins at {Path.cwd()}",
            )

    @cached_property
    def _module(self) -> ModuleExtractor:
        self.check()
        return ModuleExtractor(inception(self._path), name=self.name, resize=self._resize, device=self._device)

    def features(self, images: Sequence[Image.Image]) -> Tensor:
        return self._module.features(images)

    def details(self) -> dict[str, str]:
        return self._module.details()


def extractor_of(given: Any, *, where: str, name: str | None, resize: int | None, device: str | None) -> Extractor:
    """What an argument ``extractor`` names. Raises ``ConfigError``."""
    if isinstance(given, Extractor):
        return given
    if isinstance(given, str) and Path(given).suffix in (".pth", ".pt", ".safetensors"):
        return InceptionExtractor(Path(given), where=f"{where}.extractor", name=name, resize=resize, device=device)
    if isinstance(given, str):
        if resize is not None:
            raise ConfigError(f"{where}.resize is {resize}", remedy="leave it out: the folder's processor resizes")
        return FolderExtractor(given, where=f"{where}.extractor", name=name, device=device)
    module = build(MODELS, given, where=f"{where}.extractor") if isinstance(given, Mapping) else given
    if not callable(module):
        raise ConfigError(
            f"{where}.extractor is {given!r}",
            allowed=ALLOWED,
        )
    return ModuleExtractor(module, name=name, resize=resize, device=device)


class FeatureMetric(Metric):
    """The base of FID and KID: a row is the features of the prediction, then those of the reference."""

    predicts = "image"
    compares = "image"
    kind = ""

    def __init__(
        self,
        extractor: Any,
        *,
        name: str | None,
        resize: int | None,
        batch_size: int,
        device: str | None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        where = type(self).__name__
        self._extractor = extractor_of(extractor, where=where, name=name, resize=resize, device=device)
        self._batch_size = batch_size
        self.name = f"{self.kind}_{self._extractor.name}"

    def check(self) -> None:
        self._extractor.check()

    def rows(self, predictions: Sequence[Any], references: Sequence[Any], keys: Sequence[str]) -> Sequence[Any]:
        made = self._features(pictures(predictions, keys, what="the prediction"))
        real = self._features(pictures(references, keys, what="the reference"))
        return list(np.concatenate([made, real], axis=-1))

    def _features(self, images: Sequence[Image.Image]) -> np.ndarray:
        """In the extractor's own precision, shape (images, dimensions)."""
        parts = [images[n : n + self._batch_size] for n in range(0, len(images), self._batch_size)]
        found = []
        with exact():
            for part in parts:
                features = self._extractor.features(part)
                if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != len(part):
                    shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
                    raise ConfigError(
                        f"{self.name}: the extractor returned {shape} for {len(part)} images",
                        allowed=f"a tensor of shape ({len(part)}, dimensions)",
                    )
                found.append(features.float() if features.dtype in (torch.float16, torch.bfloat16) else features)
        return torch.cat(found).cpu().numpy()

    def table(self, rows: Sequence[Any]) -> np.ndarray:
        return np.stack(rows).astype(np.float64)

    def details(self) -> dict[str, str]:
        return {**self._extractor.details(), "precision": "features as extracted, statistics float64"}
