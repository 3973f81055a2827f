"""A micro-batch as a person can look at it: its samples with their tokens as text, their images as pixels, and what of
them is learned.

Everything is taken from the batch that the loader made, nothing is read again: what condition dropout, truncation and
random changes left is what is shown. A batch of a family without texts and images has numbers of its samples alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from unigen_ds.core.batch import Batch, PackedBatch

Role = Literal["target", "condition", "edited"]


@dataclass(frozen=True)
class ShownToken:
    """One text token."""

    id: int
    text: str
    kind: Literal["text", "special", "unknown", "padding"]
    learned: bool = False
    """Whether it is predicted, with loss, from the tokens before it."""
    predicts: str | None = None
    """What is predicted here with loss, where that is not the next token of the sequence."""


@dataclass(frozen=True)
class ShownImage:
    """One image, or one tile of it, with all its tokens."""

    role: Role
    """``target``: it is drawn; ``condition``: the vision tower reads it; ``edited``: the autoencoder encodes it."""
    num_tokens: int
    size: tuple[int, int] | None
    """(width, height) in pixels, as the model has it; None: they cannot be arranged."""
    pixels: NDArray[np.uint8] | None = field(repr=False, default=None)
    """[H, W] or [H, W, 3]."""


@dataclass(frozen=True)
class ShownSample:
    """One sample of a sequence."""

    id: str
    """'' for what fills a sequence without a sample."""
    num_tokens: int
    targets: Mapping[str, int]
    """Of each loss term."""
    skipped: str
    """Why padding is in its position; '' where it was loaded."""
    parts: Sequence[ShownToken | ShownImage] = field(repr=False, default=())


class _Range(NamedTuple):
    """Tokens of the micro-batch."""

    start: int
    stop: int


def shown(batch: Batch, processor: Any) -> list[ShownSample]:
    """The samples of a batch on the CPU, in order. ``processor``: the one that the batch was made with."""
    ends = [0, *batch.sample_ends]
    ranges = [(sample, _Range(*span)) for sample, span in zip(batch.sample_ids, pairwise(ends), strict=True)]
    if ends[-1] < batch.num_tokens:
        ranges.append(("", _Range(ends[-1], batch.num_tokens)))
    parts = _Parts(batch, processor) if isinstance(batch, PackedBatch) and hasattr(processor, "tokenizer") else None
    skipped = {one["sample"]: one["why"] for one in batch.skipped}
    positions = {term: index.numpy() for term, (index, _) in batch.target_positions().items()}
    return [
        ShownSample(
            id=sample,
            num_tokens=span.stop - span.start,
            targets={term: int(((at >= span.start) & (at < span.stop)).sum()) for term, at in positions.items()},
            skipped=skipped.get(sample, ""),
            parts=() if parts is None else tuple(parts.of(span)),
        )
        for sample, span in ranges
    ]


class _Parts:
    """The tokens and images of a micro-batch, by their index."""

    def __init__(self, batch: PackedBatch, processor: Any) -> None:
        self._tokenizer = tokenizer = processor.tokenizer
        self._special = special_ids(tokenizer)
        self._images = [*_vit_images(batch, processor), *_latent_images(batch, processor)]
        total = batch.position_ids.numel()  # also of tokens that are no record's
        self._owner = np.full(total, -1)
        """Number of the image of each token; -1: text."""
        for number, (index, _) in enumerate(self._images):
            self._owner[index] = number
        self._ids = np.full(total, -1)
        self._ids[batch.text_index.numpy()] = batch.text_ids.numpy()
        documents = batch.document_ids.numpy()
        self._learned = np.zeros(total, dtype=bool)
        self._predicts: dict[int, str] = {}
        for at, target in zip(batch.text_target_index.tolist(), batch.text_target_ids.tolist(), strict=True):
            if at + 1 < len(self._ids) and self._ids[at + 1] == target and documents[at] == documents[at + 1]:
                self._learned[at + 1] = True
            else:
                self._predicts[at] = pieces_of(tokenizer, [target])[0]

    def of(self, span: _Range) -> Iterator[ShownToken | ShownImage]:
        """Those of a sample."""
        for number, run in groupby(range(span.start, span.stop), key=lambda at: int(self._owner[at])):
            yield from self._texts([*run]) if number < 0 else [self._images[number][1]]

    def _texts(self, indices: Sequence[int]) -> Iterator[ShownToken]:
        ids = [int(self._ids[at]) for at in indices]
        for at, token, text in zip(indices, ids, pieces_of(self._tokenizer, ids), strict=True):
            yield ShownToken(token, text, self._kind(token), bool(self._learned[at]), self._predicts.get(at))

    def _kind(self, token: int) -> Literal["text", "special", "unknown", "padding"]:
        if token == getattr(self._tokenizer, "unk_id", None):
            return "unknown"
        ends = (self._tokenizer.bos_id, self._tokenizer.eos_id)
        if token == self._tokenizer.pad_id and token not in ends:
            return "padding"
        return "special" if token in self._special else "text"


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that no text of a record has."""
    known: frozenset[int] = getattr(getattr(tokenizer, "special", None), "ids", frozenset())
    names = ("bos_id", "eos_id", "pad_id", "image_start_id", "image_end_id")
    return known | {getattr(tokenizer, name) for name in names if hasattr(tokenizer, name)}


def pieces_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What each id adds to the text of those before it; of a tokenizer of a user's own its own text, or its number."""
    if hasattr(tokenizer, "pieces"):
        found: list[str] = tokenizer.pieces(ids)
        return found
    return [_alone(tokenizer, token) for token in ids]


def _alone(tokenizer: Any, token: int) -> str:
    try:
        text = str(tokenizer.decode([token]))
    except Exception:  # of a class of a user's own: half of a character, an id without text
        text = ""
    return text or f"<{token}>"


def _vit_images(batch: PackedBatch, processor: Any) -> Iterator[tuple[NDArray[np.int64], ShownImage]]:
    """Token indices of each image of the vision tower, and the image."""
    patches, index = batch.vit_patches, batch.vit_index.numpy()
    table, lowest = processor.vit_max_patches_per_side, processor.vit_lowest
    merged = len(patches) // max(len(index), 1)  # patches for each token
    first = 0
    for length in batch.vit_lengths:
        positions = batch.vit_position_ids[first : first + length]
        own = index[first // merged : (first + length) // merged]
        pixels = _arranged(patches[first : first + length], positions, table, processor.vit_patch_size, lowest)
        yield own, ShownImage("condition", len(own), _size(pixels), pixels)
        first += length


def _arranged(patches: Tensor, positions: Tensor, table: int, side: int, lowest: float) -> NDArray[np.uint8] | None:
    """Patches [N, side * side * C] of a grid as pixels. None: they are no grid."""
    rows, columns = int(positions.max()) // table + 1, int((positions % table).max()) + 1
    channels = patches.shape[1] // side**2
    if rows * columns != len(patches) or channels not in (1, 3):
        return None
    grid = patches.reshape(rows, columns, side, side, channels).permute(0, 2, 1, 3, 4)
    return _bytes(grid.reshape(rows * side, columns * side, channels), lowest)


def _latent_images(batch: PackedBatch, processor: Any) -> Iterator[tuple[NDArray[np.int64], ShownImage]]:
    """Token indices of each image of the autoencoder, and the image."""
    index, times = batch.latent_index.numpy(), batch.timesteps
    under, first = processor.vae_downsample, 0
    for image, (rows, columns) in zip(batch.vae_images, batch.latent_shapes, strict=True):
        own = slice(first, first + rows * columns)
        role: Role = "target" if bool(times[own].isfinite().any()) else "edited"
        pixels = _bytes(image[:, : rows * under, : columns * under].permute(1, 2, 0), -1.0)
        yield index[own], ShownImage(role, rows * columns, _size(pixels), pixels)
        first = own.stop


def _bytes(values: Tensor, lowest: float) -> NDArray[np.uint8]:
    """[H, W, C] from ``lowest`` (black) to 1 (white) as bytes; grey without its axis of channels."""
    found = ((values.float() - lowest) / (1 - lowest) * 255).round().clamp(0, 255).byte().numpy()
    return found[:, :, 0] if found.shape[2] == 1 else found


def _size(pixels: NDArray[np.uint8] | None) -> tuple[int, int] | None:
    return None if pixels is None else (pixels.shape[1], pixels.shape[0])
