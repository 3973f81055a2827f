"""A decoded image (``image_files.py``) -> its size by a rule -> a normalised tensor -> flat patches.

The size rule is BAGEL's: the longer side at most ``max_size``, the shorter at least ``min_size`` (the upper limit wins
where both cannot hold), both multiples of ``stride``. Only ``size`` is needed to plan a sequence, so a data set is
indexed without decoding a single picture. Resizing is PIL's bicubic on uint8, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Ge
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from unigen_ds.config.registry import TRANSFORMS, checked
from unigen_ds.core.errors import ConfigError
from unigen_ds.data.images.image_files import on_white


@TRANSFORMS.register_module()
class ImageTransform:
    """Resize by the rule above and normalise to [-1, 1].

    Args:
        max_size: longest side in pixels; within the model's position table.
        min_size: shortest side in pixels, where ``max_size`` allows it; at most ``max_size``.
        stride: both sides are multiples of so many pixels; a multiple of the ViT's patch, or of the pixels under one
            latent patch.
        mode: ``RGB`` (3 channels) or ``L`` (grey, 1 channel).
    """

    side_keys: ClassVar[Sequence[str]] = ("max_size",)
    """Arguments that limit its sides."""

    @checked()
    def __init__(
        self,
        max_size: Annotated[int, Ge(1)],
        min_size: Annotated[int, Ge(1)],
        stride: Annotated[int, Ge(1)],
        mode: Literal["RGB", "L"] = "RGB",
    ) -> None:
        if min_size > max_size or stride > max_size:
            raise ConfigError(
                f"image transform of max_size {max_size}, min_size {min_size}, stride {stride}",
                allowed="min_size and stride of at most max_size",
            )
        self.max_size, self.min_size, self.stride, self.mode = max_size, min_size, stride, mode

    @property
    def channels(self) -> int:
        return 3 if self.mode == "RGB" else 1

    @property
    def largest_side(self) -> int:
        """The longest side that ``size`` can return."""
        return _rounded(self.max_size, self.stride)

    @property
    def fingerprint(self) -> str:
        """Changes whenever a size or a pixel may change."""
        return f"{type(self).__name__}/{self.max_size}/{self.min_size}/{self.stride}/{self.mode}"

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Return (width, height) after the transform, by the rule at the top of this file."""
        scale = min(self.max_size / max(width, height), 1.0)
        scale = max(scale, self.min_size / min(width, height))
        width, height = _rounded(width * scale, self.stride), _rounded(height * scale, self.stride)
        if max(width, height) > self.max_size:
            scale = self.max_size / max(width, height)
            width, height = _rounded(width * scale, self.stride), _rounded(height * scale, self.stride)
        return width, height

    def resize(self, image: Image.Image) -> Image.Image:
        """The picture in ``mode`` and at its final size. It may be called by several threads."""
        image = on_white(image, self.mode)
        return image.resize(self.size(*image.size), Image.Resampling.BICUBIC)

    def __call__(self, image: Image.Image) -> Tensor:
        """[C, H, W] float32 in [-1, 1]."""
        return normalised(np.array(self.resize(image), dtype=np.uint8))


def _rounded(side: float, stride: int) -> int:
    # to whole pixels first, as the public code does: 23.6 pixels at stride 16 become 32, not 16
    return max(stride, round(round(side) / stride) * stride)


def normalised(pixels: NDArray[np.uint8]) -> Tensor:
    """[H, W, C] or [H, W] bytes -> [C, H, W] float32 in [-1, 1]."""
    channels_last = torch.from_numpy(pixels).reshape(*pixels.shape[:2], -1)
    floats = channels_last.permute(2, 0, 1).to(torch.float32, memory_format=torch.contiguous_format)
    return floats.div_(255).sub_(0.5).div_(0.5)


@TRANSFORMS.register_module()
class CenterCrop(ImageTransform):
    """A square: the picture is resized until its shorter side fits, and the middle of it is kept.

    Args:
        side: pixels of a side; a multiple of ``stride``.
        stride: as of ``ImageTransform``.
        mode: ``RGB`` (3 channels) or ``L`` (grey, 1 channel).
    """

    side_keys = ("side",)

    @checked()
    def __init__(
        self, side: Annotated[int, Ge(1)], stride: Annotated[int, Ge(1)], mode: Literal["RGB", "L"] = "RGB"
    ) -> None:
        _check_sides(type(self).__name__, (side,), stride)
        super().__init__(side, side, stride, mode)
        self.side = side

    def size(self, width: int, height: int) -> tuple[int, int]:
        return self.max_size, self.max_size

    def resize(self, image: Image.Image) -> Image.Image:
        image = on_white(image, self.mode)
        (width, height), side = image.size, min(image.size)
        box = ((width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2)
        return image.resize(self.size(width, height), Image.Resampling.BICUBIC, box)


@TRANSFORMS.register_module()
class FixedSize(ImageTransform):
    """Always the same size: the picture is stretched to it.

    Args:
        width: pixels; a multiple of ``stride``.
        height: pixels; a multiple of ``stride``.
        stride: as of ``ImageTransform``.
        mode: ``RGB`` (3 channels) or ``L`` (grey, 1 channel).
    """

    side_keys = ("width", "height")

    @checked()
    def __init__(
        self,
        width: Annotated[int, Ge(1)],
        height: Annotated[int, Ge(1)],
        stride: Annotated[int, Ge(1)],
        mode: Literal["RGB", "L"] = "RGB",
    ) -> None:
        _check_sides(type(self).__name__, (width, height), stride)
        super().__init__(max(width, height), min(width, height), stride, mode)
        self.width, self.height = width, height

    @property
    def fingerprint(self) -> str:
        return f"{type(self).__name__}/{self.width}/{self.height}/{self.stride}/{self.mode}"

    def size(self, width: int, height: int) -> tuple[int, int]:
        return self.width, self.height


def _check_sides(name: str, sides: Sequence[int], stride: int) -> None:
    if any(side % stride for side in sides):
        size = " x ".join(map(str, sides))
        raise ConfigError(f"{name} of {size} pixels, stride {stride}", allowed="sides that are multiples of stride")


def patchify(image: Tensor, patch_size: int) -> Tensor:
    """[C, H, W] -> [H/p * W/p, p * p * C]: patches row by row; (row, column, channel) inside a patch."""
    channels, height, width = image.shape
    p = patch_size
    blocks = image.reshape(channels, height // p, p, width // p, p)
    return blocks.permute(1, 3, 2, 4, 0).reshape(-1, p * p * channels)
