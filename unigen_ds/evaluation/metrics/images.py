"""Pictures as metrics need them: checked, and resized without aliasing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from unigen_ds.core.errors import DataError


def picture(value: Any, *, what: str, key: str) -> Image.Image:
    """A picture in RGB. Raises ``DataError`` for anything else: grey or transparent ones are not converted."""
    if not isinstance(value, Image.Image):
        raise DataError(f"sample {key!r}: {what} is {type(value).__name__}", allowed="a PIL image in RGB")
    if value.mode != "RGB":
        raise DataError(
            f"sample {key!r}: {what} is an image of mode {value.mode}",
            allowed="RGB",
            remedy="convert it where it is made: image.convert('RGB')",
        )
    if min(value.size) < 1:
        raise DataError(f"sample {key!r}: {what} is {value.width} x {value.height} pixels", allowed="at least 1 x 1")
    return value


def pictures(values: Sequence[Any], keys: Sequence[str], *, what: str) -> list[Image.Image]:
    """``picture`` of each."""
    return [picture(value, what=what, key=key) for value, key in zip(values, keys, strict=True)]


def as_tensor(images: Sequence[Image.Image], size: int | None) -> Tensor:
    """Pictures as float32 of shape (n, 3, height, width), values 0 to 255.

    ``size``: height and width after resizing, bicubic with antialiasing in float32, as clean-fid does it (Parmar et
    al., "On Aliased Resizing and Surprising Subtleties in GAN Evaluation", CVPR 2022); None: as they are, which must be
    one size. Raises ``DataError``.
    """
    sizes = {image.size for image in images}
    if size is None and len(sizes) > 1:
        shown = ", ".join(f"{width} x {height}" for width, height in sorted(sizes)[:3])
        raise DataError(f"the images have {len(sizes)} sizes: {shown}", remedy="give resize, or images of one size")
    return torch.from_numpy(np.stack([_resized(image, size) for image in images])).permute(0, 3, 1, 2)


def _resized(image: Image.Image, size: int | None) -> np.ndarray:
    """float32, shape (height, width, 3)."""
    if size is None or image.size == (size, size):
        return np.asarray(image, dtype=np.float32)
    bands = [
        band.convert("F").resize((size, size), Image.Resampling.BICUBIC, reducing_gap=None) for band in image.split()
    ]
    return np.stack([np.asarray(band, dtype=np.float32) for band in bands], axis=-1).clip(0, 255)
