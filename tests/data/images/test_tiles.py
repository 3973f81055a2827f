"""Image splitting compared with public nanoVLM (``tests/golden/nanovlm/image_split.*``)."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.support.golden_files import NANOVLM, atol, read_json
from unigen_ds.core.errors import ConfigError
from unigen_ds.data.images.image_files import open_image
from unigen_ds.data.images.tiles import Tiling, image_string, num_tiles, split_tiles

SPLIT = read_json(NANOVLM / "image_split.json")
ATOL = atol("nanovlm/image_split tiles")


@pytest.mark.parametrize("number", range(len(SPLIT["cases"])))
def test_tiles_and_their_string(number: int) -> None:
    case = SPLIT["cases"][number]
    tiling = Tiling(case["splitted_image_size"], case["max_img_size"], case["resize_to_max_side_len"])
    image = open_image(NANOVLM / case["png"])
    assert (image.height, image.width) == (case["height"], case["width"])
    grid = tiling.grid(*image.size)
    assert list(grid) == case["grid"]
    assert [side * tiling.tile_size for side in grid] == case["resized_hw"]
    tiles = split_tiles(tiling.pixels(image), tiling.tile_size)
    assert len(tiles) == num_tiles(grid) == case["n_tiles"]
    torch.testing.assert_close(
        torch.stack(tiles), load_file(NANOVLM / "image_split.safetensors")[f"tiles_{number}"], atol=ATOL, rtol=0
    )
    side = tiling.tile_size // case["vit_patch_size"] // case["pixel_shuffle_factor"]
    assert side**2 == case["mp_image_token_length"]
    assert image_string([grid], tokens_per_tile=side**2) == case["image_string"]


@pytest.mark.parametrize("case", SPLIT["image_strings"], ids=lambda case: str(case["grids"]))
def test_strings_of_several_images(case: dict) -> None:
    grids = [tuple(grid) for grid in case["grids"]]
    assert image_string(grids, tokens_per_tile=case["mp_image_token_length"]) == case["image_string"]


@pytest.mark.parametrize("sizes", [(16, 24), (16, 0), (16, 144), (0, 16)])
def test_sizes_that_cannot_be_divided(sizes: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=r"processor\.max_image_size is .*multiple of the tile"):
        Tiling(*sizes)
