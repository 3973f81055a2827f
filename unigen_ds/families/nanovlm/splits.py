"""An image of a vision-language model, split into tiles, with a token before each. Causal, as text is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from PIL import Image
from torch import Tensor

from unigen_ds.core.batch import CAUSAL
from unigen_ds.data.augment import Augment
from unigen_ds.data.image_files import ImageContent, UnreadableImage
from unigen_ds.data.packed import PackedBuilder
from unigen_ds.data.samples import Split, Tally
from unigen_ds.data.splits import augmented, count_image, unreadable
from unigen_ds.data.tiles import Tiling, TransformTiling, num_tiles, split_tiles
from unigen_ds.data.transforms import patchify


class TileProcessor(Protocol):
    """What a tiled image needs of the processor that it is loaded for."""

    tiling: Tiling | TransformTiling
    augment: Sequence[Augment]
    vit_augment: Sequence[Augment]
    vit_patch_size: int

    def read_image(self, image: str | ImageContent) -> Image.Image: ...


@dataclass(frozen=True)
class TiledSplit(Split):
    """An image split into tiles (``tiles.Tiling``), not yet decoded, with all that is between the tiles."""

    path: str
    ids: tuple[int, ...]
    """Token ids; ``image_id`` at each index of a tile's token, tile by tile."""
    image_id: int
    num_tiles: int
    error: str = ""
    """As of ``ImageSplit``."""
    touched: bool = field(default=False, compare=False, repr=False)
    """As of ``ImageSplit``."""
    content: ImageContent | None = field(default=None, compare=False, repr=False)
    """As of ``ImageSplit``."""

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    def count(self, tally: Tally) -> None:
        count_image(tally, self)

    @property
    def num_encoded(self) -> int:
        return self.num_tiles

    @property
    def source(self) -> str:
        return self.path

    def load(self, processor: TileProcessor, key: tuple[object, ...] | None) -> LoadedTiles:
        tile = processor.tiling.tile_size
        try:
            image, tiling = processor.read_image(self.content or self.path), processor.tiling
            grid, pixels = tiling.grid(*image.size), tiling.pixels(image)
        except UnreadableImage as error:
            raise unreadable(self.path, error.problem) from error
        if num_tiles(grid) != self.num_tiles or tuple(pixels.shape[1:]) != (grid[0] * tile, grid[1] * tile):
            # a transform of a user's own, or a file that was replaced between two readings
            raise unreadable(
                self.path,
                f"image {self.path} has {pixels.shape[1]} x {pixels.shape[2]} pixels and {num_tiles(grid)} tiles,"
                f" {self.num_tiles} when planned",
            )
        pixels = augmented(pixels, processor.augment, processor.vit_augment, key, lowest=processor.tiling.lowest)
        tiles = split_tiles(pixels, tile)
        return LoadedTiles(self, torch.cat([patchify(each, processor.vit_patch_size) for each in tiles]))


@dataclass(frozen=True)
class LoadedTiles:
    """The patches of all tiles of one image."""

    split: TiledSplit
    vit_patches: Tensor

    def place(self, builder: PackedBuilder, position: int) -> int:
        """As of ``Loaded``."""
        split, start, side = self.split, builder.num_tokens, builder.processor.vit_max_patches_per_side
        text = [i for i, token in enumerate(split.ids) if token != split.image_id]
        builder.add_text([split.ids[i] for i in text], [start + i for i in text])
        indices = [start + i for i, token in enumerate(split.ids) if token == split.image_id]
        index = torch.tensor(indices, dtype=torch.int64)
        positions = torch.arange(side * side).repeat(split.num_tiles)
        builder.add_patches(self.vit_patches, index, positions, (side * side,) * split.num_tiles)
        builder.add_split(len(split.ids), CAUSAL, torch.arange(position, position + len(split.ids)))
        return position + split.num_tokens
