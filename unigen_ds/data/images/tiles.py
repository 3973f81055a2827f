"""A picture -> a grid of square tiles, and the tokens around them: nanoVLM's image splitting.

The longer side becomes a multiple of ``tile_size``, at most ``max_size``; the shorter one is scaled alike, then rounded
up to a multiple. A picture of more than one tile gets a small copy of the whole before them, the global tile. Pixels
are in [0, 1]. Only ``grid`` is needed to plan a sequence, and it needs the picture's size alone.

Source: huggingface/nanoVLM (``custom_transforms.py``, ``processors.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from unigen_ds.core.errors import ConfigError
from unigen_ds.data.images.image_files import on_white

IMAGE_TOKEN, GLOBAL_TOKEN = "<|image|>", "<|global_image|>"
MAX_TILES_PER_SIDE = 8
"""nanoVLM has a token for each position in a grid of 8 x 8."""


def tile_token(row: int, column: int) -> str:
    """The token before a tile; rows and columns count from 0."""
    return f"<row_{row + 1}_col_{column + 1}>"


TILE_TOKENS = tuple(tile_token(r, c) for r in range(MAX_TILES_PER_SIDE) for c in range(MAX_TILES_PER_SIDE))


@dataclass(frozen=True)
class Tiling:
    """How pictures are split into tiles.

    Args:
        tile_size: pixels of a side of a tile.
        max_size: pixels of the longer side at most; a multiple of ``tile_size``.
        enlarge: enlarge small pictures to ``max_size``, too.
    """

    tile_size: int
    max_size: int
    enlarge: bool = False

    def __post_init__(self) -> None:
        tile, largest = self.tile_size, self.tile_size * MAX_TILES_PER_SIDE
        if tile < 1 or self.max_size % tile or not 0 < self.max_size <= largest:
            problem = f"processor.max_image_size is {self.max_size}, and model.vit.image_size (a tile) {tile}"
            raise ConfigError(problem, allowed=f"a multiple of the tile, up to {MAX_TILES_PER_SIDE} tiles")

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """(rows, columns) of tiles of a picture of that size."""
        tile = self.tile_size
        longer, shorter = max(width, height), min(width, height)
        target = self.max_size if self.enlarge else min(self.max_size, math.ceil(longer / tile) * tile)
        long, short = target // tile, max(1, math.ceil(shorter * (target / longer) / tile))
        return (short, long) if width >= height else (long, short)

    def pixels(self, image: Image.Image) -> Tensor:
        """The whole picture at its final size: [3, rows * tile_size, columns * tile_size] float32 in [0, 1]."""
        rows, columns = self.grid(*image.size)
        size = (columns * self.tile_size, rows * self.tile_size)
        picture = on_white(image, "RGB").resize(size, Image.Resampling.BICUBIC)
        return torch.from_numpy(np.array(picture, dtype=np.uint8)).permute(2, 0, 1).to(torch.float32).div_(255)


def split_tiles(whole: Tensor, tile: int) -> list[Tensor]:
    """[C, H, W] -> [C, tile, tile] of each tile: the global tile if there is more than one, then row by row."""
    tiles = [part for row in whole.split(tile, dim=1) for part in row.split(tile, dim=2)]
    if len(tiles) == 1:
        return tiles
    small = F.interpolate(whole[None], size=(tile, tile), mode="bilinear", antialias=True, align_corners=False)
    return [small[0], *tiles]


def num_tiles(grid: tuple[int, int]) -> int:
    """Tiles of a grid, the global one included."""
    rows, columns = grid
    return 1 if rows * columns == 1 else 1 + rows * columns


def image_string(grids: Sequence[tuple[int, int]], *, tokens_per_tile: int) -> str:
    """The text for the images of a message; several images are numbered."""
    parts = []
    for number, (rows, columns) in enumerate(grids):
        if len(grids) > 1:
            parts.append(f"<image: {number}>")
        heads = [GLOBAL_TOKEN]
        if rows * columns > 1:
            heads += [tile_token(row, column) for row in range(rows) for column in range(columns)]
        parts += [head + IMAGE_TOKEN * tokens_per_tile for head in heads]
    return "".join(parts)
