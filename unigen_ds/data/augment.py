"""Random changes of training images that the model reads, keyed by sample: the same wherever a sample is loaded.

An augmentation accepts ``[C, H, W]`` and a generator and returns the same shape. Generated images are never augmented:
they are what the model is to learn.
"""

from __future__ import annotations

from typing import Annotated, Protocol

import torch
from annotated_types import Ge
from torch import Tensor
from torch.nn import functional as F

from unigen_ds.core.registry import TRANSFORMS, checked


class Augment(Protocol):
    """What ``processor.vit_augment`` lists."""

    def __call__(self, image: Tensor, generator: torch.Generator) -> Tensor: ...


@TRANSFORMS.register_module()
class RandomShift:
    """Move an image by up to ``max_pixels`` to either side, up or down; its border is repeated where it leaves.

    Args:
        max_pixels: pixels by which an image moves to any side at most; its border is repeated.
    """

    @checked()
    def __init__(self, *, max_pixels: Annotated[int, Ge(1)]) -> None:
        self.max_pixels = max_pixels

    def __call__(self, image: Tensor, generator: torch.Generator) -> Tensor:
        p = self.max_pixels
        top, left = torch.randint(0, 2 * p + 1, (2,), generator=generator).tolist()
        padded = F.pad(image, (p, p, p, p), mode="replicate")
        return padded[:, top : top + image.shape[1], left : left + image.shape[2]]
