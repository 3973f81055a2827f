"""Augmentations: equal for equal keys, within their bounds, and only of images that the model reads."""

from __future__ import annotations

import torch

from unigen_ds.data.images.augment import RandomShift
from unigen_ds.system.seeding import generator


def test_shift_moves_whole_pixels_within_the_bound_and_repeats_the_border():
    image = torch.arange(25.0).reshape(1, 5, 5)
    seen = set()
    for i in range(200):
        moved = RandomShift(max_pixels=1)(image, generator(i))
        assert moved.shape == image.shape
        rows = (torch.arange(5)[None] + torch.tensor([[-1], [0], [1]])).clamp(0, 4).tolist()
        fits = [(r, c) for r in range(3) for c in range(3) if torch.equal(moved, image[:, rows[r]][:, :, rows[c]])]
        assert len(fits) == 1
        seen.add(fits[0])
    assert len(seen) == 9
