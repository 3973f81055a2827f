"""Micro-batches of random documents for tests of attention and cost: every kind of split, with its tensors."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from unigen_ds.core.batch import CAUSAL, FULL, NOISE, PackedBatch

MODES = (CAUSAL, FULL, NOISE)
Splits = Sequence[tuple[int, int]]
"""(mode, length) of each split of a document."""


def random_documents(seed: int, number: int, *, longest: int = 12) -> list[Splits]:
    draw = random.Random(seed)
    return [[(draw.choice(MODES), draw.randint(1, longest)) for _ in range(draw.randint(1, 4))] for _ in range(number)]


def packed(documents: Sequence[Splits]) -> PackedBatch:
    """Only the fields that attention reads are filled: documents, splits, modes and positions."""
    lengths = [sum(length for _, length in splits) for splits in documents]
    modes, sizes = [], []
    for mode, length in (split for splits in documents for split in splits):
        modes.append(mode)
        sizes.append(length)
    none, empty = torch.empty(0, dtype=torch.int64), torch.empty(0)
    return PackedBatch(
        document_ids=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64)),
        document_lengths=tuple(lengths),
        split_ids=torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes, dtype=torch.int64)),
        split_modes=torch.tensor(modes, dtype=torch.int64),
        position_ids=torch.cat([torch.arange(n) for n in lengths]) if lengths else none,
        text_ids=none,
        text_index=none,
        text_target_ids=none,
        text_target_index=none,
        text_target_weight=empty,
        vit_patches=empty.view(0, 1),
        vit_index=none,
        vit_position_ids=none,
        vit_lengths=(),
        vae_images=empty.view(0, 1, 1, 1),
        vae_noise=empty.view(0, 1, 1, 1),
        latent_shapes=(),
        latent_index=none,
        latent_position_ids=none,
        timesteps=empty,
        flow_noise=empty.view(0, 1),
        image_target_index=none,
    )
