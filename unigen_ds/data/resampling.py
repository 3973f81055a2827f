"""Pillow's bicubic resizing, about four times as fast where the package was installed with a C compiler.

The pixels are Pillow's to the bit in both cases, so a run may be resumed on a machine without one. The compiled
function (``_bicubic.c``) is compared with Pillow at its first use; with one that computes otherwise it is not used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType

import numpy as np
import PIL
from PIL import Image

from unigen_ds.core.log import logger

Size = tuple[int, int]
Box = tuple[float, float, float, float]

_PROBES: tuple[tuple[Size, Size, Box | None], ...] = (
    ((40, 32), (16, 24), None),
    ((24, 20), (40, 31), None),
    ((33, 90), (24, 21), None),
    ((44, 32), (16, 16), (6, 0, 38, 32)),
)
"""Sizes before and after, and the part: smaller, larger, tall, and cropped."""


def resized(image: Image.Image, size: Size, box: Box | None = None) -> Image.Image:
    """``image.resize(size, Image.Resampling.BICUBIC, box=box)``, to the bit. Several threads may call it."""
    down_first = _order() if image.mode == "RGB" and (size, box) != (image.size, None) else None
    made = None if down_first is None else _compiled(image, size, box, down_first)
    return image.resize(size, Image.Resampling.BICUBIC, box=box) if made is None else made


def compiled() -> ModuleType | None:
    """The compiled module, if the package was installed with a compiler."""
    try:
        from unigen_ds.data import _bicubic
    except ImportError:
        return None
    return _bicubic


def _never(given: Size, made: Size) -> bool:
    return False


def _tall(given: Size, made: Size) -> bool:
    """From Pillow 13: columns before rows where the height shrinks by more than twice the pixels of the width."""
    return given[1] > made[1] and given[1] - made[1] > 2 * (given[0] - made[0])


@cache
def _order() -> Callable[[Size, Size], bool] | None:
    """Whether this Pillow resizes columns before rows, by the sizes; None if the compiled function cannot be used."""
    if compiled() is None or sys.byteorder != "little" or not hasattr(Image.Image, "__arrow_c_array__"):
        return None
    draw = np.random.default_rng(0)
    given = [Image.fromarray(draw.integers(0, 256, (h, w, 3), dtype=np.uint8)) for (w, h), _, _ in _PROBES]
    wanted = [
        one.resize(size, Image.Resampling.BICUBIC, box=box) for one, (_, size, box) in zip(given, _PROBES, strict=True)
    ]
    for down_first in (_tall, _never):
        made = [_compiled(one, size, box, down_first) for one, (_, size, box) in zip(given, _PROBES, strict=True)]
        if all(one and one.tobytes() == two.tobytes() for one, two in zip(made, wanted, strict=True)):
            return down_first
    logger().info(
        "Pillow %s resizes by a rule that the compiled resizing does not know: Pillow resizes all images",
        PIL.__version__,
    )
    return None


def _compiled(
    image: Image.Image, size: Size, box: Box | None, down_first: Callable[[Size, Size], bool]
) -> Image.Image | None:
    """None for what is left to Pillow: images of few pixels a side, and of more than one block of Pillow's memory."""
    module = compiled()
    assert module is not None
    made = Image.new("RGB", size)
    try:
        source, target = image.__arrow_c_array__()[1], made.__arrow_c_array__()[1]  # no copies: the images' own memory
    except ValueError:
        return None
    done = module.bicubic(source, image.size, target, size, box or (0, 0, *image.size), down_first(image.size, size))
    return made if done else None
