"""Documents of splits -> one ``PackedBatch``: texts, ViT patches and latents, each with its indices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from unigen_ds.core.batch import CAUSAL, PackedBatch
from unigen_ds.data.samples.sample import IGNORED, Loaded, TextTokenizer


class PackedSizes(Protocol):
    """What the splits of a conversation and their batch need of a processor (``processor.ConversationProcessor``)."""

    tokenizer: TextTokenizer
    ce_reweight: bool
    vit_transform: Any
    vae_transform: Any
    augment: Sequence[Any]
    vit_augment: Sequence[Any]
    vit_patch_size: int
    vit_max_patches_per_side: int
    vae_downsample: int
    latent_channels: int
    latent_patch_size: int
    vae_spatial_downsample: int
    max_latent_size: int

    @property
    def vit_channels(self) -> int: ...
    @property
    def vae_channels(self) -> int: ...
    def read_image(self, image: Any) -> Any: ...


@dataclass(frozen=True)
class Latent:
    """One image for the autoencoder."""

    grid: tuple[int, int]
    """(rows, columns) of latent patches."""
    image: Tensor
    noise: Tensor
    flow_noise: Tensor | None
    timestep: float
    is_target: bool


@dataclass(frozen=True)
class _Patches:
    """One entry of the four ViT fields of ``PackedBatch``."""

    patches: Tensor
    index: Tensor
    position_ids: Tensor
    lengths: tuple[int, ...]


class PackedBuilder:
    """Adds documents one after the other and keeps every list of ``PackedBatch``."""

    def __init__(self, processor: PackedSizes) -> None:
        self.processor = processor
        self.tokenizer = processor.tokenizer
        self.num_tokens = 0
        self._positions: list[Tensor] = []
        self._document_lengths: list[int] = []
        self._split_lengths: list[int] = []
        self._split_modes: list[int] = []
        self._text_ids: list[int] = []
        self._text_index: list[int] = []
        self._target_ids: list[int] = []
        self._target_index: list[int] = []
        self._target_weight: list[float] = []
        self._patches: list[_Patches] = []
        self._latents: list[tuple[Latent, int]] = []

    @property
    def image_ends(self) -> tuple[int, int]:
        """The ids before and after a whole image."""
        return self.tokenizer.image_start_id, self.tokenizer.image_end_id

    def add_document(self, loaded: Sequence[Loaded]) -> None:
        """One sample. Rotary positions restart at 0."""
        start, position = self.num_tokens, 0
        for split in loaded:
            position = split.place(self, position)
        if self.num_tokens > start:
            self._document_lengths.append(self.num_tokens - start)

    def add_padding(self, num_tokens: int) -> None:
        """A document of ``pad_id`` without targets."""
        start = self.num_tokens
        self.add_tokens((self.tokenizer.pad_id,) * num_tokens, (IGNORED,) * num_tokens, 0)
        if self.num_tokens > start:
            self._document_lengths.append(self.num_tokens - start)

    def add_split(self, length: int, mode: int, positions: Tensor) -> None:
        """The next ``length`` tokens; what they are has been added with their indices. ``positions``: rotary ones."""
        self._split_lengths.append(length)
        self._split_modes.append(mode)
        self._positions.append(positions)
        self.num_tokens += length

    def add_text(self, ids: Sequence[int], index: Sequence[int]) -> None:
        """Text ids at these indices, without targets."""
        self._text_ids += ids
        self._text_index += index

    def add_tokens(self, ids: Sequence[int], targets: Sequence[int], position: int, *, mode: int = CAUSAL) -> None:
        """A split of ids; ``targets[i]``: what id i predicts (``IGNORED``: nothing)."""
        if not ids:
            return
        start = self.num_tokens
        self.add_text(ids, range(start, start + len(ids)))
        predicted = [(start + i, target) for i, target in enumerate(targets) if target != IGNORED]
        self._target_index += (index for index, _ in predicted)
        self._target_ids += (target for _, target in predicted)
        weight = 1.0 / math.sqrt(len(predicted)) if predicted and self.processor.ce_reweight else 1.0
        self._target_weight += [weight] * len(predicted)
        self.add_split(len(ids), mode, torch.arange(position, position + len(ids)))

    def add_patches(self, patches: Tensor, index: Tensor, position_ids: Tensor, lengths: tuple[int, ...]) -> None:
        """Patches for the vision tower, as the four ViT fields of ``PackedBatch`` have them."""
        self._patches.append(_Patches(patches, index, position_ids, lengths))

    def vit_positions(self, grid: tuple[int, int]) -> Tensor:
        """Positions of the patches of a whole image in the vision tower's table."""
        return _grid_positions(grid, self.processor.vit_max_patches_per_side)

    def add_latent(self, latent: Latent, start: int) -> None:
        """An image whose latent patches begin at index ``start``."""
        self._latents.append((latent, start))

    def batch(
        self, num_sequences: int, sample_ids: tuple[str, ...], skipped: tuple[dict[str, str], ...]
    ) -> PackedBatch:
        """Everything as tensors."""
        documents, splits = _integers(self._document_lengths), _integers(self._split_lengths)
        return PackedBatch(
            document_ids=torch.repeat_interleave(torch.arange(len(documents)), documents),
            split_ids=torch.repeat_interleave(torch.arange(len(splits)), splits),
            split_modes=_integers(self._split_modes),
            position_ids=_joined(self._positions, torch.empty(0, dtype=torch.int64)),
            text_ids=_integers(self._text_ids),
            text_index=_integers(self._text_index),
            text_target_ids=_integers(self._target_ids),
            text_target_index=_integers(self._target_index),
            text_target_weight=torch.tensor(self._target_weight, dtype=torch.float32),
            num_sequences=num_sequences,
            num_samples=len(sample_ids),
            sample_ids=sample_ids,
            skipped=skipped,
            **self._vit(),
            **self._vae(),
        )

    def _vit(self) -> dict[str, Any]:
        parts, none = self._patches, torch.empty(0, dtype=torch.int64)
        width = self.processor.vit_channels * self.processor.vit_patch_size**2
        return {
            "vit_patches": _joined([part.patches for part in parts], torch.empty(0, width)),
            "vit_index": _joined([part.index for part in parts], none),
            "vit_position_ids": _joined([part.position_ids for part in parts], none),
            "vit_lengths": tuple(length for part in parts for length in part.lengths),
        }

    def _vae(self) -> dict[str, Any]:
        pairs, processor, none = self._latents, self.processor, torch.empty(0, dtype=torch.int64)
        p, z, down = processor.latent_patch_size, processor.latent_channels, processor.vae_spatial_downsample
        grids = [latent.grid for latent, _ in pairs]
        rows, columns = max((g[0] for g in grids), default=1), max((g[1] for g in grids), default=1)
        images = torch.zeros(len(pairs), processor.vae_channels, rows * p * down, columns * p * down)
        noise = torch.zeros(len(pairs), z, rows * p, columns * p)
        for k, (latent, _) in enumerate(pairs):
            images[k, :, : latent.image.shape[1], : latent.image.shape[2]] = latent.image
            noise[k, :, : latent.noise.shape[1], : latent.noise.shape[2]] = latent.noise
        indices = [start + torch.arange(g[0] * g[1]) for (_, start), g in zip(pairs, grids, strict=True)]
        times = [
            torch.full((len(index),), latent.timestep, dtype=torch.float32)
            for (latent, _), index in zip(pairs, indices, strict=True)
        ]
        targets = [index for (latent, _), index in zip(pairs, indices, strict=True) if latent.is_target]
        return {
            "vae_images": images,
            "vae_noise": noise,
            "latent_shapes": tuple(grids),
            "latent_index": _joined(indices, none),
            "latent_position_ids": _joined([_grid_positions(g, processor.max_latent_size) for g in grids], none),
            "timesteps": _joined(times, torch.empty(0)),
            "flow_noise": _joined(
                [latent.flow_noise for latent, _ in pairs if latent.flow_noise is not None], torch.empty(0, z * p * p)
            ),
            "image_target_index": _joined(targets, none),
        }


def _integers(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@lru_cache(maxsize=64)
def _grid_positions(grid: tuple[int, int], table: int) -> Tensor:
    """Read only: the same tensor for each image of that grid."""
    rows, columns = torch.arange(grid[0]), torch.arange(grid[1])
    return (rows[:, None] * table + columns).flatten()


def _joined(parts: Sequence[Tensor], empty: Tensor) -> Tensor:
    return torch.cat(list(parts)) if parts else empty
