"""A picture file -> a size known from its header alone -> a normalised tensor -> flat patches.

The size rule is BAGEL's: the longer side at most ``max_size``, the shorter at least ``min_size`` (the upper limit wins
where both cannot hold), both multiples of ``stride``. Only ``size`` is needed to plan a sequence, so a data set is
indexed without decoding a single picture. Resizing is PIL's bicubic on uint8, once.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image, PngImagePlugin
from torch import Tensor

from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.core.registry import TRANSFORMS

PngImagePlugin.MAX_TEXT_CHUNK = 100 << 20  # web pictures carry long comments; PIL's 1 MiB refuses the whole picture


class UnreadableImage(DataError):
    """A picture cannot be opened or decoded. The loader turns it into a counted skip."""

    path = ""
    """The file, where it is known."""


def image_size(path: str | Path) -> tuple[int, int]:
    """(width, height) from the header. Raises ``UnreadableImage`` naming the path."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                width, height = image.size
        if min(width, height) < 1:
            raise ValueError(f"its size is {width} x {height}")
        return width, height
    except MemoryError:
        raise
    except Exception as error:  # PIL's readers raise anything on a broken file
        raise UnreadableImage(f"image {path} cannot be read: {type(error).__name__}: {error}") from error


def open_image(path: str | Path) -> Image.Image:
    """The decoded picture. Raises ``UnreadableImage`` naming the path; a cut-off file is refused, not greyed out."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path) as image:
                image.load()
                return image
    except MemoryError:
        raise
    except Exception as error:  # as above
        raise UnreadableImage(f"image {path} cannot be decoded: {type(error).__name__}: {error}") from error


def on_white(image: Image.Image, mode: str) -> Image.Image:
    """``image`` in ``mode``; transparent places become white."""
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        background = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        image = Image.alpha_composite(background, rgba)
    return image.convert(mode)


@TRANSFORMS.register_module()
class ImageTransform:
    """Resize by the rule above and normalise to [-1, 1].

    Args:
        max_size: longest side in pixels.
        min_size: shortest side in pixels, where ``max_size`` allows it.
        stride: both sides become multiples of it (a patch size, or the pixels under one latent patch).
        mode: ``RGB`` (3 channels) or ``L`` (1 channel).
    """

    def __init__(self, max_size: int, min_size: int, stride: int, mode: Literal["RGB", "L"] = "RGB") -> None:
        if not (stride > 0 and 0 < min_size <= max_size and stride <= max_size):
            raise ConfigError(
                f"image transform of max_size {max_size}, min_size {min_size}, stride {stride}",
                allowed="0 < min_size <= max_size and 0 < stride <= max_size",
            )
        if mode not in ("RGB", "L"):
            raise ConfigError(f"image mode {mode!r}", allowed="RGB, L")
        self.max_size, self.min_size, self.stride, self.mode = max_size, min_size, stride, mode

    @property
    def channels(self) -> int:
        return 3 if self.mode == "RGB" else 1

    @property
    def largest_side(self) -> int:
        """The longest side that ``size`` can give."""
        return self._rounded(self.max_size)

    @property
    def fingerprint(self) -> str:
        """Changes whenever a size or a pixel may change."""
        return f"{type(self).__name__}/{self.max_size}/{self.min_size}/{self.stride}/{self.mode}"

    def _rounded(self, side: float) -> int:
        # to whole pixels first, as the public code does: 23.6 pixels at stride 16 become 32, not 16
        return max(self.stride, round(round(side) / self.stride) * self.stride)

    def size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) after the transform."""
        scale = min(self.max_size / max(width, height), 1.0)
        scale = max(scale, self.min_size / min(width, height))
        width, height = self._rounded(width * scale), self._rounded(height * scale)
        if max(width, height) > self.max_size:
            scale = self.max_size / max(width, height)
            width, height = self._rounded(width * scale), self._rounded(height * scale)
        return width, height

    def resize(self, image: Image.Image) -> Image.Image:
        """The picture in ``mode`` and at its final size."""
        image = on_white(image, self.mode)
        return image.resize(self.size(*image.size), Image.Resampling.BICUBIC)

    def __call__(self, image: Image.Image) -> Tensor:
        """[C, H, W] float32 in [-1, 1]."""
        pixels = torch.from_numpy(np.array(self.resize(image), dtype=np.uint8))
        pixels = pixels.reshape(pixels.shape[0], pixels.shape[1], self.channels).permute(2, 0, 1)
        return pixels.to(torch.float32).div(255).sub(0.5).div(0.5).contiguous()


def patchify(image: Tensor, patch_size: int) -> Tensor:
    """[C, H, W] -> [H/p * W/p, p * p * C]: patches row by row; (row, column, channel) inside a patch."""
    channels, height, width = image.shape
    p = patch_size
    blocks = image.reshape(channels, height // p, p, width // p, p)
    return blocks.permute(1, 3, 2, 4, 0).reshape(-1, p * p * channels)
