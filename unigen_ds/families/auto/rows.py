"""Documents as rows, for a model with one document in a row, and as a batch of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unigen_ds.core.batch import to_device
from unigen_ds.families.auto.batch import ModelBatch


class Rows:
    """Documents as rows ``[D, L]``, filled up at their ends."""

    def __init__(self, slots: Tensor, shape: tuple[int, int], lengths: Tensor) -> None:
        self.slots, self.shape, self.lengths = slots, shape, lengths

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Rows:
        sizes, longest = torch.tensor(lengths), max(lengths)
        row = torch.arange(len(lengths)).repeat_interleave(sizes)
        column = torch.arange(len(row)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        return cls(to_device(row * longest + column, device), (len(lengths), longest), to_device(sizes, device))

    def filled(self, values: Tensor, fill: int) -> Tensor:
        """``[T]`` -> ``[D, L]``."""
        whole = torch.full((self.shape[0] * self.shape[1],), fill, dtype=values.dtype, device=values.device)
        return whole.index_copy(0, self.slots, values).view(self.shape)

    @property
    def positions(self) -> Tensor:
        return torch.arange(self.shape[1], device=self.slots.device).expand(self.shape)

    @property
    def mask(self) -> Tensor:
        """1 at tokens of documents."""
        return (self.positions < self.lengths[:, None]).long()


def text_batch(documents: Sequence[Sequence[int]]) -> ModelBatch:
    """Documents of text ids, without targets."""
    lengths = tuple(map(len, documents))
    none, floats = torch.empty(0, dtype=torch.int64), torch.empty(0)
    number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    ids = torch.tensor([i for document in documents for i in document])
    return ModelBatch(
        document_ids=number, split_ids=number, split_modes=none, position_ids=positions, text_ids=ids,
        text_index=torch.arange(len(ids)), text_target_ids=none, text_target_index=none,
        text_target_weight=floats, vit_patches=floats, vit_index=none, vit_position_ids=none, vit_lengths=(),
        vae_images=floats, vae_noise=floats, latent_shapes=(), latent_index=none, latent_position_ids=none,
        timesteps=floats, flow_noise=floats, image_target_index=none, document_lengths=lengths,
    )  # fmt: skip
