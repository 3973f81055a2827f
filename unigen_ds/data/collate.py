"""Rows (which samples make which sequences) -> one ``PackedBatch``: read, decode, tokenise, place, draw noise.

Everything random is keyed by (seed, pass, sample id, purpose, place of the image in its sample), so a sample is the
same wherever it is loaded. A sample whose image cannot be decoded, or whose length is no longer the one it was planned
with, becomes a document of padding of the planned length and is named in ``skipped``. A row without any token becomes
one padding token, so that no micro-batch is empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unigen_ds.core.batch import CAUSAL, FULL, NOISE, PackedBatch
from unigen_ds.core.seeding import generator
from unigen_ds.data.datasets import PlannedDataset, source_names
from unigen_ds.data.order import Draw
from unigen_ds.data.overflow import part_of, unit_tokens
from unigen_ds.data.processor import UnifiedProcessor
from unigen_ds.data.samples import (
    END,
    IGNORED,
    ImageSplit,
    Sample,
    Split,
    TextSplit,
    TextTokenizer,
    TiledSplit,
    TokenSplit,
)
from unigen_ds.data.stream import Row
from unigen_ds.data.transforms import UnreadableImage, patchify


@dataclass(frozen=True)
class LoadedImage:
    """The tensors of one image split. ``vit``: patches. ``vae`` and ``noise``: image, noises and raw time step."""

    split: ImageSplit
    vit_patches: Tensor | None = None
    vae_image: Tensor | None = None
    vae_noise: Tensor | None = None
    flow_noise: Tensor | None = None
    timestep: float = -math.inf


@dataclass(frozen=True)
class LoadedTiles:
    """The patches of all tiles of one image."""

    split: TiledSplit
    vit_patches: Tensor


@dataclass(frozen=True)
class DroppedImage:
    """An image that condition dropout removed: no token, but its rotary position is used up."""


Loaded = TextSplit | TokenSplit | LoadedImage | LoadedTiles | DroppedImage


@dataclass(frozen=True)
class _VitPart:
    """One entry of the four ViT fields of ``PackedBatch``."""

    patches: Tensor
    index: Tensor
    position_ids: Tensor
    lengths: tuple[int, ...]


def collate(
    rows: Sequence[Row],
    datasets: Sequence[PlannedDataset],
    processor: UnifiedProcessor,
    *,
    seq_length: int,
    seed: int | None = None,
    names: Sequence[str] | None = None,
) -> PackedBatch:
    """One micro-batch.

    Args:
        rows: the sequences, as ``SequenceStream`` gives them.
        datasets: the sources that the draws point into.
        processor: sizes and ids; ``seed`` and ``names`` default to the processor's and the data sets' own.
        seq_length: each sample is truncated to it.
    """
    seed = processor.seed if seed is None else seed
    names = source_names(datasets) if names is None else names
    builder = _Builder(processor)
    sample_ids: list[str] = []
    skipped: list[dict[str, str]] = []
    for row in rows:
        before = builder.num_tokens
        for draw in row:
            sample_id = draw.sample_id(names)
            sample_ids.append(sample_id)
            try:
                loaded = load(draw, datasets[draw.source], processor, seq_length=seq_length, seed=seed, name=sample_id)
            except UnreadableImage as error:
                skipped.append({"sample": sample_id, "path": error.path, "why": error.problem})
                planned = int(datasets[draw.source].lengths()[0][draw.index])
                builder.add_padding(unit_tokens(planned, draw.piece, seq_length))
                continue
            builder.add_document(loaded)
        if builder.num_tokens == before:
            builder.add_padding(1)
    return builder.batch(len(rows), tuple(sample_ids), tuple(skipped))


def pack_documents(documents: Sequence[Sequence[Loaded]], processor: UnifiedProcessor) -> PackedBatch:
    """One document after the other, as given: for inference, where nothing is read from a data set."""
    builder = _Builder(processor)
    for document in documents:
        builder.add_document(document)
    return builder.batch(len(documents), (), ())


def load(
    draw: Draw, dataset: PlannedDataset, processor: UnifiedProcessor, *, seq_length: int, seed: int, name: str
) -> list[Loaded]:
    """Read, truncate, drop conditions, decode. Raises ``UnreadableImage`` where the sample must be skipped."""
    sample = dataset.sample(draw.index, pass_number=draw.pass_number)
    version = processor.rules.overflow
    cut = sample if draw.piece >= 0 else sample.truncated(seq_length, version=version)
    for split in cut.splits:
        if isinstance(split, (ImageSplit, TiledSplit)) and split.error:
            raise _unreadable(split.path, split.error)
    planned = int(dataset.lengths()[0][draw.index])
    if sample.num_tokens != planned:
        changed = next((s.path for s in sample.splits if isinstance(s, (ImageSplit, TiledSplit))), "")
        raise _unreadable(changed, f"the sample has {sample.num_tokens} tokens, but {planned} when it was indexed")
    part = part_of(sample, draw.piece, seq_length, version=version)
    key = (seed, draw.pass_number, name)
    dropped = _dropped(part, processor, key)
    loaded: list[Loaded] = []
    for place, split in enumerate(part.splits):
        if isinstance(split, TiledSplit):
            loaded.append(load_tiles(split, processor))
        elif not isinstance(split, ImageSplit):
            if place not in dropped:
                loaded.append(split)
        elif place in dropped:
            loaded.append(DroppedImage())
        else:
            loaded.append(_load_image(split, processor, (*key, place)))
    return loaded


def _unreadable(path: str, why: str) -> UnreadableImage:
    error = UnreadableImage(why)
    error.path = path
    return error


def _dropped(sample: Sample, processor: UnifiedProcessor, key: tuple[object, ...]) -> set[int]:
    """Places of the splits that condition dropout removes. One number is drawn for every split, droppable or not."""
    chances = torch.rand(len(sample.splits), generator=generator(*key, "dropout"), dtype=torch.float32).tolist()
    return {
        place
        for place, (split, chance) in enumerate(zip(sample.splits, chances, strict=True))
        if isinstance(split, (TextSplit, ImageSplit)) and split.droppable and chance < processor.dropout[_kind(split)]
    }


def _kind(split: Split) -> str:
    return split.kind if isinstance(split, ImageSplit) else "text"


def _load_image(split: ImageSplit, processor: UnifiedProcessor, key: tuple[object, ...]) -> LoadedImage:
    vit = split.kind == "vit"
    image = split.tensor
    if image is None:
        transform = processor.vit_transform if vit else processor.vae_transform
        assert transform is not None, "planned without a transform"
        try:
            image = transform(processor.read_image(split.content or split.path))
        except UnreadableImage as error:
            raise _unreadable(split.path, error.problem) from error
    stride = processor.vit_patch_size if vit else processor.vae_downsample
    grid = (image.shape[1] // stride, image.shape[2] // stride)
    if grid != split.grid:  # a transform of a user's own, or a file that was replaced between two readings
        raise _unreadable(split.path, f"image {split.path} has {grid} patches, {split.grid} when it was planned")
    if vit:
        for number, augment in enumerate(processor.vit_augment):
            image = augment(image, generator(*key, "augment", number))
        return LoadedImage(split, vit_patches=patchify(image, stride))
    p, z = processor.latent_patch_size, processor.latent_channels
    timestep = -math.inf
    if split.kind == "noise":
        timestep = _normal((), (*key, "timestep")).item()
    return LoadedImage(
        split,
        vae_image=image,
        vae_noise=_normal((z, grid[0] * p, grid[1] * p), (*key, "vae")),
        flow_noise=_normal((grid[0] * grid[1], z * p * p), (*key, "flow")),
        timestep=timestep,
    )


def load_tiles(split: TiledSplit, processor: UnifiedProcessor) -> LoadedTiles:
    """Decode and cut. Raises ``UnreadableImage``."""
    assert processor.tiling is not None, "planned without tiles"
    try:
        tiles = processor.tiling(processor.read_image(split.content or split.path))
    except UnreadableImage as error:
        raise _unreadable(split.path, error.problem) from error
    if len(tiles) != split.num_tiles:  # as above
        raise _unreadable(split.path, f"image {split.path} has {len(tiles)} tiles, {split.num_tiles} when planned")
    return LoadedTiles(split, torch.cat([patchify(tile, processor.vit_patch_size) for tile in tiles]))


def text_tokens(split: TextSplit, tokenizer: TextTokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids of a text and what each predicts."""
    begin, end = (tokenizer.bos_id,) * split.begins, (tokenizer.eos_id,) * (split.following is None)
    ids = (*begin, *split.ids, *end)
    following = {None: IGNORED, END: tokenizer.eos_id}.get(split.following, split.following)
    targets = (*ids[1:], following) if split.loss else (IGNORED,) * len(ids)
    return ids, targets  # type: ignore[return-value]


def _normal(shape: tuple[int, ...], key: tuple[object, ...]) -> Tensor:
    return torch.randn(shape, generator=generator(*key), dtype=torch.float32)


def _integers(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _grid_positions(grid: tuple[int, int], table: int) -> Tensor:
    rows, columns = torch.arange(grid[0]), torch.arange(grid[1])
    return (rows[:, None] * table + columns).flatten()


class _Builder:
    """Places documents one after the other and keeps every list of ``PackedBatch``."""

    def __init__(self, processor: UnifiedProcessor) -> None:
        self.processor = processor
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
        self._vit_parts: list[_VitPart] = []
        self._images: list[tuple[LoadedImage, int]] = []

    def add_document(self, loaded: Sequence[Loaded]) -> None:
        """One sample. Rotary positions restart at 0."""
        start, position = self.num_tokens, 0
        for split in loaded:
            if isinstance(split, DroppedImage):
                position += 1
            elif isinstance(split, LoadedImage):
                self._add_image(split, position)
                position += split.split.kind != "noise"
            elif isinstance(split, LoadedTiles):
                self._add_tiles(split, position)
                position += split.split.num_tokens
            elif isinstance(split, TokenSplit):
                self._add_tokens(split.ids, split.labels, position)
                position += len(split.ids)
            else:
                ids, targets = text_tokens(split, self.processor.tokenizer)
                self._add_tokens(ids, targets, position)
                position += len(ids)
        if self.num_tokens > start:
            self._document_lengths.append(self.num_tokens - start)

    def add_padding(self, num_tokens: int) -> None:
        """A document of ``pad_id`` without targets."""
        pad = TokenSplit((self.processor.tokenizer.pad_id,) * num_tokens, (IGNORED,) * num_tokens)
        self.add_document([pad])

    def _add_split(self, length: int, mode: int, positions: Tensor) -> None:
        self._split_lengths.append(length)
        self._split_modes.append(mode)
        self._positions.append(positions)
        self.num_tokens += length

    def _add_tokens(self, ids: Sequence[int], targets: Sequence[int], position: int) -> None:
        if not ids:
            return
        start = self.num_tokens
        self._text_ids += ids
        self._text_index += range(start, start + len(ids))
        predicted = [(start + i, target) for i, target in enumerate(targets) if target != IGNORED]
        self._target_index += (place for place, _ in predicted)
        self._target_ids += (target for _, target in predicted)
        weight = 1.0 / math.sqrt(len(predicted)) if predicted and self.processor.ce_reweight else 1.0
        self._target_weight += [weight] * len(predicted)
        self._add_split(len(ids), CAUSAL, torch.arange(position, position + len(ids)))

    def _add_image(self, image: LoadedImage, position: int) -> None:
        start, length = self.num_tokens, image.split.num_tokens
        self._text_ids += (self.processor.tokenizer.image_start_id, self.processor.tokenizer.image_end_id)
        self._text_index += (start, start + length - 1)
        if image.vit_patches is not None:
            number = len(image.vit_patches)
            positions = _grid_positions(image.split.grid, self.processor.vit_max_patches_per_side)
            index = torch.arange(start + 1, start + 1 + number)
            self._vit_parts.append(_VitPart(image.vit_patches, index, positions, (number,)))
        self._images.append((image, start + 1))
        mode = NOISE if image.split.kind == "noise" else FULL
        self._add_split(length, mode, torch.full((length,), position))

    def _add_tiles(self, tiles: LoadedTiles, position: int) -> None:
        start, split, side = self.num_tokens, tiles.split, self.processor.vit_max_patches_per_side
        text = [i for i, token in enumerate(split.ids) if token != split.image_id]
        self._text_ids += [split.ids[i] for i in text]
        self._text_index += [start + i for i in text]
        index = _integers([start + i for i, token in enumerate(split.ids) if token == split.image_id])
        positions = torch.arange(side * side).repeat(split.num_tiles)
        self._vit_parts.append(_VitPart(tiles.vit_patches, index, positions, (side * side,) * split.num_tiles))
        self._add_split(len(split.ids), CAUSAL, torch.arange(position, position + len(split.ids)))

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
        parts, none = self._vit_parts, torch.empty(0, dtype=torch.int64)
        width = self.processor.vit_channels * self.processor.vit_patch_size**2
        return {
            "vit_patches": _joined([part.patches for part in parts], torch.empty(0, width)),
            "vit_index": _joined([part.index for part in parts], none),
            "vit_position_ids": _joined([part.position_ids for part in parts], none),
            "vit_lengths": tuple(length for part in parts for length in part.lengths),
        }

    def _vae(self) -> dict[str, Any]:
        pairs = [(image, start) for image, start in self._images if image.vae_image is not None]
        processor, none = self.processor, torch.empty(0, dtype=torch.int64)
        p, z, down = processor.latent_patch_size, processor.latent_channels, processor.vae_spatial_downsample
        grids = [image.split.grid for image, _ in pairs]
        rows, columns = max((g[0] for g in grids), default=1), max((g[1] for g in grids), default=1)
        images = torch.zeros(len(pairs), processor.vae_channels, rows * p * down, columns * p * down)
        noise = torch.zeros(len(pairs), z, rows * p, columns * p)
        for k, (image, _) in enumerate(pairs):
            assert image.vae_image is not None and image.vae_noise is not None
            images[k, :, : image.vae_image.shape[1], : image.vae_image.shape[2]] = image.vae_image
            noise[k, :, : image.vae_noise.shape[1], : image.vae_noise.shape[2]] = image.vae_noise
        places = [start + torch.arange(g[0] * g[1]) for (_, start), g in zip(pairs, grids, strict=True)]
        times = [
            torch.full((len(place),), image.timestep, dtype=torch.float32)
            for (image, _), place in zip(pairs, places, strict=True)
        ]
        targets = [place for (image, _), place in zip(pairs, places, strict=True) if image.split.kind == "noise"]
        return {
            "vae_images": images,
            "vae_noise": noise,
            "latent_shapes": tuple(grids),
            "latent_index": _joined(places, none),
            "latent_position_ids": _joined([_grid_positions(g, processor.max_latent_size) for g in grids], none),
            "timesteps": _joined(times, torch.empty(0)),
            "flow_noise": _joined(
                [image.flow_noise for image, _ in pairs if image.flow_noise is not None], torch.empty(0, z * p * p)
            ),
            "image_target_index": _joined(targets, none),
        }


def _joined(parts: Sequence[Tensor], empty: Tensor) -> Tensor:
    return torch.cat(list(parts)) if parts else empty
