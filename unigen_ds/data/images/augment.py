"""Random changes of training images, keyed by sample: the same wherever a sample is loaded.

An augmentation accepts ``[C, H, W]`` and a generator and returns the same shape. ``processor.vit_augment`` changes the
images that the model reads, each on its own; ``processor.augment`` changes all images of a record in the same way, also
those that are to be generated: it draws the same numbers for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Protocol

import torch
from annotated_types import Gt, Le
from torch import Tensor
from torch.nn import functional as F

from unigen_ds.config.registry import TRANSFORMS, checked, registered_name
from unigen_ds.config.values import Share
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.system.seeding import generator

CHANGES = ("augment", "vit_augment")
"""Keys of ``processor`` that are lists of random changes; one component is a list of one."""


class Augment(Protocol):
    """What ``processor.vit_augment`` and ``processor.augment`` list."""

    def __call__(self, image: Tensor, generator: torch.Generator) -> Tensor: ...


@TRANSFORMS.register_module()
class RandomFlip:
    """Mirror an image.

    Args:
        probability: of a mirrored image.
        vertical: exchange top and bottom instead of left and right.
    """

    @checked()
    def __init__(self, *, probability: Share = 0.5, vertical: bool = False) -> None:
        self.probability, self.vertical = probability, vertical

    def __call__(self, image: Tensor, generator: torch.Generator) -> Tensor:
        if torch.rand((), generator=generator).item() >= self.probability:
            return image
        return image.flip(1 if self.vertical else 2)


@TRANSFORMS.register_module()
class RandomCrop:
    """A part of an image of the same shape, anywhere in it, enlarged to the whole size.

    Args:
        min_area: share of the area at least; the share is drawn evenly between it and 1.
    """

    @checked()
    def __init__(self, *, min_area: Annotated[float, Gt(0), Le(1)]) -> None:
        self.min_area = min_area

    def __call__(self, image: Tensor, generator: torch.Generator) -> Tensor:
        area, down, right = torch.rand(3, generator=generator).tolist()
        side = (self.min_area + (1 - self.min_area) * area) ** 0.5
        height, width = (max(1, round(side * length)) for length in image.shape[1:])
        top, left = round(down * (image.shape[1] - height)), round(right * (image.shape[2] - width))
        part = image[None, :, top : top + height, left : left + width]
        return F.interpolate(part, size=image.shape[1:], mode="bilinear", antialias=True, align_corners=False)[0]


def transform_problems(cls: type, where: str, *, changes: bool) -> list[ConfigError]:
    """An error where a transform that sets a size is to change images (``changes``), or the other way round."""
    wrong = hasattr(cls, "largest_side") if changes else not hasattr(cls, "size")
    if not wrong:
        return []
    fitting = [name for name, one in TRANSFORMS.module_dict.items() if hasattr(one, "size") is not changes]
    what = "sets the size of an image" if changes else "changes images at random, and sets no size"
    other = "processor.vit_transform or processor.vae_transform" if changes else "processor.augment or vit_augment"
    problem = f"{where}.type is {registered_name(cls) or cls.__name__}, which {what}"
    return [ConfigError(problem, allowed=", ".join(sorted(fitting)), remedy=f"it belongs to {other}")]


def augment_image(
    image: Tensor, of_record: Sequence[Augment], of_image: Sequence[Augment], key: tuple[object, ...] | None
) -> Tensor:
    """``image`` after changes of its record, then its own, each keyed by its number. ``key``: of its split, its number
    last; None: as it is. Raises ``DataError`` for another shape.
    """
    for changes, own_key in ((of_record, key[:-1]), (of_image, key)) if key is not None else ():
        for number, change in enumerate(changes):
            after = change(image, generator(*own_key, "augment", number))
            if after.shape != image.shape:
                problem = f"{type(change).__name__} returned {tuple(after.shape)} for an image of {tuple(image.shape)}"
                raise DataError(problem, allowed="the same shape: lengths are planned before an image is read")
            image = after
    return image
