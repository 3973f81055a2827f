"""A micro-batch for a person to look at: samples with tokens as text, images as pixels, and what of them is learned.

Everything is taken from the batch that the loader made, nothing is read again: what condition dropout, truncation and
random changes left is what is shown. A batch of a family without texts and images has numbers of its samples alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from unigen_ds.core.batch import Batch, PackedBatch


@dataclass(frozen=True)
class ShownToken:
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

    role: Literal["target", "condition", "edited"]
    """``target``: it is drawn; ``condition``: the vision tower reads it; ``edited``: the autoencoder encodes it."""
    num_tokens: int
    pixels: NDArray[np.uint8] | None = field(repr=False, default=None)
    """[H, W] or [H, W, 3], as the model has it; None: they cannot be arranged."""

    @property
    def size(self) -> tuple[int, int] | None:
        """(width, height)."""
        return None if self.pixels is None else (self.pixels.shape[1], self.pixels.shape[0])


@dataclass(frozen=True)
class ShownSample:
    id: str
    """'' for what fills a sequence without a sample."""
    num_tokens: int
    targets: Mapping[str, int]
    why: str
    """Why padding is in its position; '' where it was loaded."""
    parts: Sequence[ShownToken | ShownImage] = field(repr=False, default=())


def display_samples(batch: Batch, processor: Any) -> list[ShownSample]:
    """The samples of a batch on the CPU, in order. ``processor``: the one that the batch was made with."""
    ends, ids = [0, *batch.sample_ends], [*batch.sample_ids]
    if ends[-1] < batch.num_tokens:
        ends, ids = [*ends, batch.num_tokens], [*ids, ""]
    parts = _parts(batch, processor) if isinstance(batch, PackedBatch) and hasattr(processor, "tokenizer") else {}
    reasons = {one["sample"]: one["why"] for one in batch.skipped}
    positions = {term: index.numpy() for term, (index, _) in batch.target_positions().items()}
    return [
        ShownSample(
            id=sample,
            num_tokens=stop - start,
            targets={term: int(((at >= start) & (at < stop)).sum()) for term, at in positions.items()},
            why=reasons.get(sample, ""),
            parts=[part for at in range(start, stop) for part in parts.get(at, ())],
        )
        for sample, (start, stop) in zip(ids, pairwise(ends), strict=True)
    ]


def _parts(batch: PackedBatch, processor: Any) -> dict[int, list[ShownToken | ShownImage]]:
    """The tokens and images of a micro-batch by the index of their first token."""
    tokenizer = processor.tokenizer
    special = {
        *getattr(getattr(tokenizer, "special", None), "ids", ()),
        *(getattr(tokenizer, one, -1) for one in ("bos_id", "eos_id", "image_start_id", "image_end_id")),
    }
    parts: dict[int, list[ShownToken | ShownImage]] = {}
    within: set[int] = set()
    for index, image in (*_vit_images(batch, processor), *_latent_images(batch, processor)):
        parts[int(index[0])] = [image]
        within |= {*index.tolist()}
    ids = dict(sorted(zip(batch.text_index.tolist(), batch.text_ids.tolist(), strict=True)))
    ids = {at: token for at, token in ids.items() if at not in within}
    documents, positions, predicts = batch.document_ids.tolist(), set[int](), dict[int, str]()
    for at, target in zip(batch.text_target_index.tolist(), batch.text_target_ids.tolist(), strict=True):
        if ids.get(at + 1) == target and documents[at] == documents[at + 1]:
            positions.add(at + 1)
        else:
            predicts[at] = _pieces(tokenizer, [target])[0]
    for (at, token), text in zip(ids.items(), _pieces(tokenizer, [*ids.values()]), strict=True):
        kind: Literal["text", "special", "unknown", "padding"] = "special" if token in special else "text"
        if token == getattr(tokenizer, "unk_id", None):
            kind = "unknown"
        elif token == tokenizer.pad_id and token not in (tokenizer.bos_id, tokenizer.eos_id):
            kind = "padding"
        parts[at] = [ShownToken(token, text, kind, at in positions, predicts.get(at))]
    return parts


def _pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What each id adds to the text of those before it; of a user's own tokenizer its own text, or its number."""
    if hasattr(tokenizer, "pieces"):
        return tokenizer.pieces(ids)
    texts = []
    for token in ids:
        try:
            texts.append(str(tokenizer.decode([token])) or f"<{token}>")
        except Exception:  # half of a character, an id without text
            texts.append(f"<{token}>")
    return texts


def _vit_images(batch: PackedBatch, processor: Any) -> Iterator[tuple[NDArray[np.int64], ShownImage]]:
    """Token indices of each image of the vision tower, and the image."""
    index, table, side = batch.vit_index.numpy(), processor.vit_max_patches_per_side, processor.vit_patch_size
    patches_per_token = len(batch.vit_patches) // max(len(index), 1)
    first = 0
    for length in batch.vit_lengths:
        patches, positions = (values[first : first + length] for values in (batch.vit_patches, batch.vit_position_ids))
        own = index[first // patches_per_token : (first + length) // patches_per_token]
        rows, columns = int(positions.max()) // table + 1, int((positions % table).max()) + 1
        channels, pixels = patches.shape[1] // side**2, None
        if rows * columns == length and channels in (1, 3):  # patches of a grid
            grid = patches.reshape(rows, columns, side, side, channels).permute(0, 2, 1, 3, 4)
            pixels = _bytes(grid.reshape(rows * side, columns * side, channels), processor.vit_lowest)
        yield own, ShownImage("condition", len(own), pixels)
        first += length


def _latent_images(batch: PackedBatch, processor: Any) -> Iterator[tuple[NDArray[np.int64], ShownImage]]:
    """Token indices of each image of the autoencoder, and the image."""
    index, under, first = batch.latent_index.numpy(), processor.vae_downsample, 0
    for image, (rows, columns) in zip(batch.vae_images, batch.latent_shapes, strict=True):
        own = slice(first, first + rows * columns)
        is_target = bool(batch.timesteps[own].isfinite().any())
        pixels = _bytes(image[:, : rows * under, : columns * under].permute(1, 2, 0), -1.0)
        yield index[own], ShownImage("target" if is_target else "edited", rows * columns, pixels)
        first = own.stop


def _bytes(values: Tensor, lowest: float) -> NDArray[np.uint8]:
    """[H, W, C] from ``lowest`` (black) to 1 (white) as bytes; grey without its axis of channels."""
    pixels = ((values.float() - lowest) / (1 - lowest) * 255).round().clamp(0, 255).byte().numpy()
    return pixels[:, :, 0] if pixels.shape[2] == 1 else pixels
