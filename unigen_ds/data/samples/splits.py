"""Splits of texts, of ready token ids and of whole images: how each is counted, shortened, loaded and added to a batch;
and ``PackedBuilder``, which makes one ``PackedBatch`` of the documents that they are.

Token layout of a split, as in BAGEL's public packing code:

* text: ``[begin, ids..., end]``; with loss, position i predicts ``(ids + [end])[i]``; the end input itself predicts
  nothing. Causal.
* image: ``[image_start, patches..., image_end]``, one rotary position for all of it. ``vit`` (understanding) and
  ``vae`` (clean latent) are FULL and advance the position by one; ``noise`` (generation target) does not advance it.
* tokens: ids as a user's own data set returns them, with explicit labels. Causal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from unigen_ds.core.batch import CAUSAL, FULL, NOISE, PackedBatch
from unigen_ds.data.images.augment import augment_image
from unigen_ds.data.images.image_files import ImageContent, UnreadableImage, patchify
from unigen_ds.data.samples.sample import IGNORED, LoadedSplit, Split, Tally, TextTokenizer
from unigen_ds.system.seeding import generator

ImageKind = Literal["vit", "vae", "noise"]
END = -1
"""The value of ``TextSplit.following`` that means the end token."""


class _Ids(Split):
    """Token ids, which need no loading."""

    def count(self: Any, tally: Tally) -> None:
        tally.text_targets += self.num_targets
        if tally.unk_id is not None:
            tally.unknown += self.ids.count(tally.unk_id)

    def load(self, processor: Any, key: tuple[object, ...] | None) -> Any:
        return self


@dataclass(frozen=True)
class TextSplit(_Ids):
    """A text, or a part of one; ``ids`` without begin and end. ``droppable``: condition dropout may remove it."""

    ids: tuple[int, ...]
    loss: bool
    droppable: bool = False
    begins: bool = True
    """Whether the begin token comes first: not in a later part of a text."""
    following: int | None = None
    """What the last token of an earlier part predicts: an id, ``END`` or ``IGNORED``; None: an end token follows."""

    @property
    def num_tokens(self) -> int:
        return len(self.ids) + self.begins + (self.following is None)

    @property
    def num_targets(self) -> int:
        return self.loss * max(0, self.num_tokens - (self.following in (None, IGNORED)))

    def part(self, start: int, stop: int) -> TextSplit:
        """Tokens ``start .. stop`` of a whole text, begin and end counted. Its last token predicts what follows."""
        following = (*self.ids, END)[stop - 1] if stop < self.num_tokens else None
        ids = self.ids[max(start - 1, 0) : stop - 1]
        return replace(self, ids=ids, begins=start == 0, following=following)

    def shortened(self, num_tokens: int) -> TextSplit | None:
        return replace(self.part(0, num_tokens), following=IGNORED) if num_tokens > 1 else None

    @property
    def condition(self) -> str | None:
        return "text" if self.droppable else None

    def place(self, builder: PackedBuilder, position: int) -> int:
        ids, targets = text_tokens(self, builder.tokenizer)
        builder.add_tokens(ids, targets, position)
        return position + len(ids)


@dataclass(frozen=True)
class TokenSplit(_Ids):
    """Ids from a user's own data set; nothing is added. ``labels[i]`` is what position i predicts (-100: nothing)."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]

    @classmethod
    def unlearned(cls, ids: Sequence[int]) -> TokenSplit:
        """Tokens of which none predicts anything, as of a prompt."""
        return cls(tuple(ids), (IGNORED,) * len(ids))

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def num_targets(self) -> int:
        return sum(label >= 0 for label in self.labels)

    def part(self, start: int, stop: int) -> TokenSplit:
        return TokenSplit(self.ids[start:stop], self.labels[start:stop])

    def shortened(self, num_tokens: int) -> TokenSplit | None:
        if num_tokens < 1:
            return None
        first = self.part(0, num_tokens)
        return replace(first, labels=(*first.labels[:-1], IGNORED))

    def place(self, builder: PackedBuilder, position: int) -> int:
        builder.add_tokens(self.ids, self.labels, position)
        return position + len(self.ids)


@dataclass(frozen=True)
class ImageSplit(Split):
    """An image, not yet decoded. ``grid`` = (rows, columns) of patches after the transform."""

    path: str
    kind: ImageKind
    grid: tuple[int, int]
    droppable: bool = False
    error: str = ""
    """Why its header could not be read; then ``grid`` is that of the smallest image and the sample becomes a skip."""
    tensor: Tensor | None = field(default=None, compare=False, repr=False)
    """The image itself, [C, H, W] in [-1, 1], where a user's own data set returned it; ``path`` then only names it."""
    content: ImageContent | None = field(default=None, compare=False, repr=False)
    """The file, where planning has read all of it."""

    @property
    def num_tokens(self) -> int:
        return self.grid[0] * self.grid[1] + 2

    def count(self, tally: Tally) -> None:
        count_image(tally, self)
        if self.kind == "noise":
            tally.image_targets += self.num_tokens - 2

    @property
    def num_encoded(self) -> int:
        return int(self.kind != "noise")

    @property
    def drawn(self) -> bool:  # type: ignore[override]
        return self.kind == "noise"

    @property
    def source(self) -> str:
        return self.path

    @property
    def condition(self) -> str | None:
        return self.kind if self.droppable else None

    def dropped(self) -> DroppedImage:
        return DroppedImage()

    def pixels(self, processor: Any) -> Tensor:
        if self.tensor is not None:
            return self.tensor
        transform = processor.vit_transform if self.kind == "vit" else processor.vae_transform
        assert transform is not None, "planned without a transform"
        return transform(processor.read_image(self.content or self.path))

    def picture_size(self, processor: Any) -> tuple[int, int]:
        stride = processor.vae_downsample
        return self.grid[0] * stride, self.grid[1] * stride

    def load(self, processor: Any, key: tuple[object, ...] | None) -> LoadedImage:
        vit = self.kind == "vit"
        image = self.pixels(processor)
        stride = processor.vit_patch_size if vit else processor.vae_downsample
        grid = (image.shape[1] // stride, image.shape[2] // stride)
        if grid != self.grid:  # a transform of a user's own, or a file that was replaced between two readings
            problem = f"image {self.path} has {grid} patches, {self.grid} when it was planned"
            raise UnreadableImage(problem, path=self.path)
        changes = (processor.augment, processor.vit_augment if vit else ())
        if any(changes):
            image = augment_image(image.contiguous(), *changes, key)
        if vit:
            return LoadedImage(self, vit_patches=patchify(image, stride))
        assert key is not None, "an image is drawn with noise"
        p, z = processor.latent_patch_size, processor.latent_channels
        return LoadedImage(
            self,
            vae_image=image,
            vae_noise=_normal((z, grid[0] * p, grid[1] * p), (*key, "vae")),
            flow_noise=_normal((grid[0] * grid[1], z * p * p), (*key, "flow")),
            timestep=_normal((), (*key, "timestep")).item() if self.kind == "noise" else -math.inf,
        )


@dataclass(frozen=True)
class LoadedImage:
    """The tensors of one image split. ``vit``: patches. ``vae`` and ``noise``: image, noises and raw time step."""

    split: ImageSplit
    vit_patches: Tensor | None = None
    vae_image: Tensor | None = None
    vae_noise: Tensor | None = None
    flow_noise: Tensor | None = None
    timestep: float = -math.inf

    def place(self, builder: PackedBuilder, position: int) -> int:
        split, start = self.split, builder.num_tokens
        ends = (builder.tokenizer.image_start_id, builder.tokenizer.image_end_id)
        builder.add_text(ends, (start, start + split.num_tokens - 1))
        if self.vit_patches is not None:
            number = len(self.vit_patches)
            index = torch.arange(start + 1, start + 1 + number)
            positions = _grid_positions(split.grid, builder.processor.vit_max_patches_per_side)
            builder.add_patches(self.vit_patches, index, positions, (number,))
        noise = split.kind == "noise"
        if self.vae_image is not None:
            builder.latents.append((self, start + 1))
        builder.add_split(split.num_tokens, NOISE if noise else FULL, torch.full((split.num_tokens,), position))
        return position + (not noise)


@dataclass(frozen=True)
class DroppedImage:
    """An image that condition dropout removed: no token, but its rotary position is used up."""

    def place(self, builder: PackedBuilder, position: int) -> int:
        return position + 1


def text_tokens(split: TextSplit, tokenizer: TextTokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids of a text and what each predicts."""
    begin, end = (tokenizer.bos_id,) * split.begins, (tokenizer.eos_id,) * (split.following is None)
    ids = (*begin, *split.ids, *end)
    following = {None: IGNORED, END: tokenizer.eos_id}.get(split.following, split.following)
    targets = (*ids[1:], following) if split.loss else (IGNORED,) * len(ids)
    return ids, targets  # type: ignore[return-value]


def count_image(tally: Tally, split: Split) -> None:
    tally.images += 1
    tally.image_tokens += split.num_tokens
    tally.tiles += split.num_encoded
    tally.unreadable += bool(split.error)


def _normal(shape: tuple[int, ...], key: tuple[object, ...]) -> Tensor:
    return torch.randn(shape, generator=generator(*key), dtype=torch.float32)


class PackedBuilder:
    """Makes a ``PackedBatch`` of documents. ``processor``: a ``ConversationProcessor``, or what has its sizes."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.num_tokens = 0
        self.tokenizer: TextTokenizer = processor.tokenizer
        self._positions: list[Tensor] = []
        self._document_lengths: list[int] = []
        self._split_lengths: list[int] = []
        self._split_modes: list[int] = []
        self._text_ids: list[int] = []
        self._text_index: list[int] = []
        self._target_ids: list[int] = []
        self._target_index: list[int] = []
        self._target_weight: list[float] = []
        self._patches: list[tuple[Tensor, Tensor, Tensor]] = []
        self._patch_lengths: list[int] = []
        self.latents: list[tuple[LoadedImage, int]] = []
        """Images for the autoencoder, and the index at which the latent patches of each begin."""

    def add_document(self, loaded: Sequence[LoadedSplit]) -> None:
        """One sample, as its loaded splits. Rotary positions restart at 0."""
        start, position = self.num_tokens, 0
        for split in loaded:
            position = split.place(self, position)
        if self.num_tokens > start:
            self._document_lengths.append(self.num_tokens - start)

    def add_padding(self, num_tokens: int) -> None:
        """A document of ``pad_id`` without targets: a sample that cannot be loaded, or an empty sequence."""
        self.add_document([TokenSplit.unlearned((self.tokenizer.pad_id,) * num_tokens)])

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

    def add_tokens(self, ids: Sequence[int], targets: Sequence[int], position: int) -> None:
        """A split of ids; ``targets[i]``: what id i predicts (``IGNORED``: nothing)."""
        if not ids:
            return
        start = self.num_tokens
        self.add_text(ids, range(start, start + len(ids)))
        labels = np.asarray(targets)
        indices = np.flatnonzero(labels != IGNORED)
        self._target_index += (start + indices).tolist()
        self._target_ids += labels[indices].tolist()
        weight = 1.0 / math.sqrt(len(indices)) if len(indices) and self.processor.ce_reweight else 1.0
        self._target_weight += [weight] * len(indices)
        self.add_split(len(ids), CAUSAL, torch.arange(position, position + len(ids)))

    def add_patches(self, patches: Tensor, index: Tensor, position_ids: Tensor, lengths: tuple[int, ...]) -> None:
        """Patches for the vision tower, as the four ViT fields of ``PackedBatch`` have them."""
        self._patches.append((patches, index, position_ids))
        self._patch_lengths += lengths

    def batch(
        self, num_sequences: int, sample_ids: tuple[str, ...], skipped: tuple[dict[str, str], ...]
    ) -> PackedBatch:
        """All documents. The arguments are fields of the batch."""
        processor, integers = self.processor, _integers(())
        documents, splits = _integers(self._document_lengths), _integers(self._split_lengths)
        patches, vit_index, vit_positions = zip(*self._patches, strict=True) if self._patches else ((), (), ())
        width = processor.vit_channels * processor.vit_patch_size**2
        p, z, down = processor.latent_patch_size, processor.latent_channels, processor.vae_spatial_downsample
        grids = tuple(image.split.grid for image, _ in self.latents)
        rows, columns = max((g[0] for g in grids), default=1), max((g[1] for g in grids), default=1)
        images = torch.zeros(len(grids), processor.vae_channels, rows * p * down, columns * p * down)
        noise = torch.zeros(len(grids), z, rows * p, columns * p)
        indices, times, flows, targets = [], [], [], []
        for k, (image, start) in enumerate(self.latents):
            assert image.vae_image is not None and image.vae_noise is not None
            images[k, :, : image.vae_image.shape[1], : image.vae_image.shape[2]] = image.vae_image
            noise[k, :, : image.vae_noise.shape[1], : image.vae_noise.shape[2]] = image.vae_noise
            indices.append(start + torch.arange(grids[k][0] * grids[k][1]))
            times.append(torch.full((len(indices[k]),), image.timestep, dtype=torch.float32))
            flows += [image.flow_noise] if image.flow_noise is not None else []
            targets += [indices[k]] if image.split.kind == "noise" else []
        return PackedBatch(
            document_ids=torch.repeat_interleave(torch.arange(len(documents)), documents),
            split_ids=torch.repeat_interleave(torch.arange(len(splits)), splits),
            split_modes=_integers(self._split_modes),
            position_ids=_join(self._positions, integers),
            text_ids=_integers(self._text_ids),
            text_index=_integers(self._text_index),
            text_target_ids=_integers(self._target_ids),
            text_target_index=_integers(self._target_index),
            text_target_weight=torch.tensor(self._target_weight, dtype=torch.float32),
            vit_patches=_join(patches, torch.empty(0, width)),
            vit_index=_join(vit_index, integers),
            vit_position_ids=_join(vit_positions, integers),
            vit_lengths=tuple(self._patch_lengths),
            vae_images=images,
            vae_noise=noise,
            latent_shapes=grids,
            latent_index=_join(indices, integers),
            latent_position_ids=_join([_grid_positions(g, processor.max_latent_size) for g in grids], integers),
            timesteps=_join(times, torch.empty(0)),
            flow_noise=_join(flows, torch.empty(0, z * p * p)),
            image_target_index=_join(targets, integers),
            document_lengths=tuple(self._document_lengths),
            num_sequences=num_sequences,
            num_samples=len(sample_ids),
            sample_ids=sample_ids,
            skipped=skipped,
        )


def _integers(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@lru_cache(maxsize=64)
def _grid_positions(grid: tuple[int, int], table: int) -> Tensor:
    """Positions of the patches of a whole image in a table of a model: one tensor of each grid, which is only read."""
    rows, columns = torch.arange(grid[0]), torch.arange(grid[1])
    return (rows[:, None] * table + columns).flatten()


def _join(parts: Sequence[Tensor], empty: Tensor) -> Tensor:
    return torch.cat(list(parts)) if parts else empty
