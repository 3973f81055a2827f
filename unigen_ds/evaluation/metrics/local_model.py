"""Models that score: a user's local folder, read by transformers without executing anything, and its hash."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from unigen_ds.config.hub import folder_of
from unigen_ds.core.errors import ConfigError
from unigen_ds.system.files import file_digest

BATCH_SIZE = 16
"""Texts or pictures that a model reads at a time; it changes rounding only."""
_READ = {".json", ".safetensors", ".txt", ".model"}
"""Suffixes of the files that transformers reads here; pickled weights are not read."""


class LocalModel:
    """A model of transformers in float32 and what prepares its inputs, loaded at the first use.

    ``path``: its folder, or its name on the hub. ``where``: names it in errors.
    """

    def __init__(self, path: str, *, where: str) -> None:
        self._path, self.where = path, where

    @cached_property
    def folder(self) -> Path:
        """Where its files are. Raises ``ConfigError`` for a name of the hub that cannot be loaded."""
        return folder_of(self._path, where=self.where)

    @property
    def name(self) -> str:
        """The folder's."""
        return self.folder.resolve().name

    def check(self) -> None:
        """Raise ``ConfigError`` where the folder is not there, or has no safetensors."""
        if not any(self.folder.glob("*.safetensors")):
            raise ConfigError(
                f"{self.where}: {str(self.folder)!r} is no folder with safetensors",
                allowed="a folder with a published model, or a name on the hub: organisation/name",
                remedy=f"a relative path begins at {Path.cwd()}; save_pretrained saves a model so: pickled weights are"
                " not read",
            )

    def details(self) -> dict[str, str]:
        """For the provenance: the name, and a hash of the config, the weights, the tokenizer and the processor."""
        self.check()
        digest = blake2b(digest_size=16)
        for path in sorted(self.folder.iterdir()):
            if path.suffix in _READ and path.is_file():
                digest.update(f"{path.name} {file_digest(path)}\n".encode())
        return {"model": f"{self.name} {digest.hexdigest()}", "precision": "model float32, mean float64"}

    def resize(self) -> str:
        """How its processor resizes pictures, in words; Pillow's resizing is antialiased."""
        images = self.image_processor
        size, crop = (dict(getattr(images, name, None) or {}) for name in ("size", "crop_size"))
        filter_name = Image.Resampling(int(getattr(images, "resample", 3))).name.lower()
        cropped = f", crop {crop}" if getattr(images, "do_center_crop", False) else ""
        return f"{filter_name}, antialiased, {size}{cropped}"

    @cached_property
    def model(self) -> Any:
        """The model in evaluation mode, on its device."""
        return self._load("AutoModel", use_safetensors=True, dtype=torch.float32).eval().to(device())

    @cached_property
    def tokenizer(self) -> Any:
        return self._load("AutoTokenizer")

    @cached_property
    def processor(self) -> Any:
        """The processor of texts and images, or of images alone."""
        return self._load("AutoProcessor")

    @property
    def image_processor(self) -> Any:
        """The processor of images alone."""
        return getattr(self.processor, "image_processor", None) or self.processor

    def _load(self, kind: str, **arguments: Any) -> Any:
        """Load the folder by a class of transformers. Raises ``ConfigError``."""
        import transformers

        self.check()
        try:
            with torch.random.fork_rng(devices=[]):
                return getattr(transformers, kind).from_pretrained(str(self.folder), local_files_only=True, **arguments)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ConfigError(f"{self.where}: {kind} cannot read {self.folder}: {error}") from error


def device() -> torch.device:
    """This process's CUDA device, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@contextmanager
def exact() -> Iterator[None]:
    """No gradients, no autocast, and float32 as float32: TF32 would change features by a thousandth."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with (
            torch.inference_mode(),
            torch.random.fork_rng(devices=[]),  # a loader of torch draws a seed
            torch.autocast(device().type, enabled=False),
            torch.backends.cudnn.flags(enabled=True, allow_tf32=False),
        ):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def vectors_of(values: Sequence[Any], compute: Callable[[list[Any]], torch.Tensor]) -> np.ndarray:
    """``compute`` of ``BATCH_SIZE`` values at a time, ``exact``: shape (values, dimensions)."""
    with exact():
        parts = [compute(list(values[n : n + BATCH_SIZE])) for n in range(0, len(values), BATCH_SIZE)]
        return torch.cat(parts).cpu().numpy()


def pool(output: Any) -> Any:
    """The vectors of a model's output: a tensor, or what transformers 5 returns around it; None where it has none."""
    return output if isinstance(output, torch.Tensor) else getattr(output, "pooler_output", None)
