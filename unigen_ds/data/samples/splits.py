"""Splits of texts, of ready token ids and of whole images: how each is counted, shortened, loaded and added to a batch.

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
from typing import Any, Literal

import torch
from torch import Tensor

from unigen_ds.core.batch import FULL, NOISE
from unigen_ds.data.images.augment import Augment, changed
from unigen_ds.data.images.image_files import ImageContent, UnreadableImage
from unigen_ds.data.images.transforms import ImageTransform, patchify
from unigen_ds.data.samples.packed import Latent, PackedBuilder, PackedSizes
from unigen_ds.data.samples.sample import IGNORED, Split, Tally, TextTokenizer
from unigen_ds.system.seeding import generator

ImageKind = Literal["vit", "vae", "noise"]
END = -1
"""As ``TextSplit.following``: the end token."""


@dataclass(frozen=True)
class TextSplit(Split):
    """A text, or a part of one; ``ids`` without begin and end. ``droppable``: condition dropout may remove it."""

    ids: tuple[int, ...]
    loss: bool
    droppable: bool = False
    begins: bool = True
    """Whether the begin token comes first: not in a later part of a text."""
    following: int | None = None
    """None: the text ends here, with the end token. In an earlier part, which has none: what its last token predicts,
    the text's next id, ``END`` or ``IGNORED``."""

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

    def count(self, tally: Tally) -> None:
        tally.text_targets += self.num_targets
        if tally.unk_id is not None:
            tally.unknown += self.ids.count(tally.unk_id)

    def shortened(self, num_tokens: int) -> TextSplit | None:
        return replace(self.part(0, num_tokens), following=IGNORED) if num_tokens > 1 else None

    @property
    def condition(self) -> str | None:
        return "text" if self.droppable else None

    def load(self, processor: Any, key: tuple[object, ...] | None) -> TextSplit:
        return self

    def place(self, builder: PackedBuilder, position: int) -> int:
        """As of ``Loaded``."""
        ids, targets = text_tokens(self, builder.tokenizer)
        builder.add_tokens(ids, targets, position)
        return position + len(ids)


@dataclass(frozen=True)
class TokenSplit(Split):
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
        """Tokens ``start .. stop``."""
        return TokenSplit(self.ids[start:stop], self.labels[start:stop])

    def count(self, tally: Tally) -> None:
        tally.text_targets += self.num_targets
        if tally.unk_id is not None:
            tally.unknown += self.ids.count(tally.unk_id)

    def shortened(self, num_tokens: int) -> TokenSplit | None:
        if num_tokens < 1:
            return None
        first = self.part(0, num_tokens)
        return replace(first, labels=(*first.labels[:-1], IGNORED))

    def load(self, processor: Any, key: tuple[object, ...] | None) -> TokenSplit:
        return self

    def place(self, builder: PackedBuilder, position: int) -> int:
        """As of ``Loaded``."""
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
    touched: bool = field(default=False, compare=False, repr=False)
    """Whether the rule ``images`` (``rules.py``) changes what PIL decodes."""
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

    def pixels(self, processor: PackedSizes) -> Tensor:
        if self.tensor is not None:
            return self.tensor
        transform = self._transform(processor)
        assert transform is not None, "planned without a transform"
        return transform(processor.read_image(self.content or self.path))

    def picture_size(self, processor: PackedSizes) -> tuple[int, int]:
        stride = processor.vae_downsample
        return self.grid[0] * stride, self.grid[1] * stride

    def _transform(self, processor: PackedSizes) -> ImageTransform | None:
        return processor.vit_transform if self.kind == "vit" else processor.vae_transform

    def load(self, processor: PackedSizes, key: tuple[object, ...] | None) -> LoadedImage:
        vit = self.kind == "vit"
        try:
            image = self.pixels(processor)
        except UnreadableImage as error:
            raise unreadable(self.path, error.problem) from error
        stride = processor.vit_patch_size if vit else processor.vae_downsample
        grid = (image.shape[1] // stride, image.shape[2] // stride)
        if grid != self.grid:  # a transform of a user's own, or a file that was replaced between two readings
            raise unreadable(self.path, f"image {self.path} has {grid} patches, {self.grid} when it was planned")
        image = augmented(image, processor.augment, processor.vit_augment if vit else (), key)
        if vit:
            return LoadedImage(self, vit_patches=patchify(image, stride))
        assert key is not None, "an image is drawn with noise"
        p, z = processor.latent_patch_size, processor.latent_channels
        timestep = -math.inf
        if self.kind == "noise":
            timestep = _normal((), (*key, "timestep")).item()
        return LoadedImage(
            self,
            vae_image=image,
            vae_noise=_normal((z, grid[0] * p, grid[1] * p), (*key, "vae")),
            flow_noise=_normal((grid[0] * grid[1], z * p * p), (*key, "flow")),
            timestep=timestep,
        )


@dataclass(frozen=True)
class LoadedImage:
    """The tensors of one image split. ``vit``: patches. ``vae`` and ``noise``:
    image, noises and raw time step.
    """

    split: ImageSplit
    vit_patches: Tensor | None = None
    vae_image: Tensor | None = None
    vae_noise: Tensor | None = None
    flow_noise: Tensor | None = None
    timestep: float = -math.inf

    def place(self, builder: PackedBuilder, position: int) -> int:
        """As of ``Loaded``."""
        split, start = self.split, builder.num_tokens
        builder.add_text(builder.image_ends, (start, start + split.num_tokens - 1))
        if self.vit_patches is not None:
            number = len(self.vit_patches)
            index = torch.arange(start + 1, start + 1 + number)
            builder.add_patches(self.vit_patches, index, builder.vit_positions(split.grid), (number,))
        noise = split.kind == "noise"
        if self.vae_image is not None:
            assert self.vae_noise is not None
            latent = Latent(split.grid, self.vae_image, self.vae_noise, self.flow_noise, self.timestep, noise)
            builder.add_latent(latent, start + 1)
        builder.add_split(split.num_tokens, NOISE if noise else FULL, torch.full((split.num_tokens,), position))
        return position + (not noise)


@dataclass(frozen=True)
class DroppedImage:
    """An image that condition dropout removed: no token, but its rotary position is used up."""

    def place(self, builder: PackedBuilder, position: int) -> int:
        """As of ``Loaded``."""
        return position + 1


def text_tokens(split: TextSplit, tokenizer: TextTokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids of a text and what each predicts."""
    begin, end = (tokenizer.bos_id,) * split.begins, (tokenizer.eos_id,) * (split.following is None)
    ids = (*begin, *split.ids, *end)
    following = {None: IGNORED, END: tokenizer.eos_id}.get(split.following, split.following)
    targets = (*ids[1:], following) if split.loss else (IGNORED,) * len(ids)
    return ids, targets  # type: ignore[return-value]


def count_image(tally: Tally, split: Split) -> None:
    """What any image adds to the counts of its record."""
    length = split.num_tokens
    tally.images += 1
    tally.image_tokens += length
    tally.tiles += split.num_encoded
    tally.unreadable += bool(split.error)
    tally.largest_image = max(tally.largest_image, length)


def augmented(
    image: Tensor,
    of_record: Sequence[Augment],
    of_image: Sequence[Augment],
    key: tuple[object, ...] | None,
    *,
    lowest: float = -1.0,
) -> Tensor:
    """``image`` after random changes: those of all images of its record alike, then its own.

    ``key``: of its split, which ends with its number in the record; None: as it is. ``lowest``: value of black.
    """
    if key is None or not (of_record or of_image):
        return image
    return changed(changed(image, of_record, key[:-1], lowest=lowest), of_image, key, lowest=lowest)


def unreadable(path: str, why: str) -> UnreadableImage:
    """An error that names the file."""
    error = UnreadableImage(why)
    error.path = path
    return error


def _normal(shape: tuple[int, ...], key: tuple[object, ...]) -> Tensor:
    return torch.randn(shape, generator=generator(*key), dtype=torch.float32)
