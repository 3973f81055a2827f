"""What a model makes of records: the interface that the data package uses, and what processors of conversations share.

A family has a processor of its own (``families/bagel/processor.py``, ``families/nanovlm/processor.py``). Lengths are
known after planning; randomness comes later, when a split is loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from PIL import Image
from torch import Tensor

from unigen_ds.core.errors import DataError
from unigen_ds.data.images.augment import Augment
from unigen_ds.data.images.image_files import (
    ImageContent,
    ImageHeader,
    ImageTransform,
    flatten,
    image_header,
    open_image,
)
from unigen_ds.data.records.records import Turn, same_message
from unigen_ds.data.samples.sample import Sample, Split
from unigen_ds.data.samples.splits import ImageKind, ImageSplit, PackedBuilder

_CHANGES_NO_PLAN = ("augment", "ce_reweight", "dropout", "seed", "tokenizer", "vit_augment", "vocab_size")


class Processor(Protocol):
    """What loading a batch needs of a processor; it is copied to each loader process."""

    seed: int
    """Seed of dropout and noise."""
    dropout: Mapping[str, float]
    """Kind of condition (``Split.condition``) -> the probability that one is left out."""

    def builder(self) -> Any:
        """An empty micro-batch with ``num_tokens``, ``add_document``, ``add_padding`` and ``batch`` of
        ``PackedBuilder``. It is called in a loader's process, by one thread.
        """


class ConversationProcessor:
    """Conversations of texts and images as a ``PackedBatch``: what processors of such models share. A subclass has
    ``splits_of``; or, where whole conversations are tokenized by a chat template, ``plan_many``. Sizes that its model
    does not have keep their defaults.
    """

    on_white: ClassVar[bool] = True
    """Transparent parts become white, as in BAGEL; else the colours under them are visible."""
    dropout: Mapping[str, float] = {}
    vocab_size: int | None = None
    """Ids that the model has; None: not known, since its files decide and were not read yet."""
    vit_transform: Any = None
    vae_transform: ImageTransform | None = None
    augment: Sequence[Augment] = ()
    vit_augment: Sequence[Augment] = ()
    vit_patch_size = 14
    vit_max_patches_per_side = 70
    vae_downsample = 16
    latent_channels = 16
    latent_patch_size = 2
    vae_spatial_downsample = 8
    max_latent_size = 64
    vit_lowest = -1.0
    """Value of black in the patches of the vision tower; white is 1."""

    def __init__(self, tokenizer: Any, *, ce_reweight: bool = False, seed: int = 0) -> None:
        self.tokenizer: Any = tokenizer
        self.ce_reweight, self.seed = ce_reweight, seed

    @property
    def vit_channels(self) -> int:
        return self.vit_transform.channels if self.vit_transform else 3

    @property
    def vae_channels(self) -> int:
        return self.vae_transform.channels if self.vae_transform else 3

    @property
    def fingerprint(self) -> str:
        """Changes whenever the plan of a record may change; dropout, weights and seed change none. By default with the
        class, the tokenizer, and each public attribute that is a plain value or has a ``fingerprint``.
        """
        names = ("bos_id", "eos_id", "image_start_id", "image_end_id")
        facts: list[object] = [f"{type(self).__module__}.{type(self).__qualname__}", self.tokenizer.fingerprint]
        facts += (getattr(self.tokenizer, name, None) for name in names)
        for name, value in sorted(vars(self).items()):
            of_plan = name not in _CHANGES_NO_PLAN and not name.startswith("_")
            value = getattr(value, "fingerprint", value)
            if of_plan and isinstance(value, str | int | float | tuple | list | None):
                facts.append((name, value))
        return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()

    def builder(self) -> PackedBuilder:
        return PackedBuilder(self)

    def read_image(self, image: str | Path | ImageContent | Image.Image) -> Image.Image:
        """A picture as this model's family reads it, in RGB or L. Raises ``UnreadableImage``."""
        return flatten(image if isinstance(image, Image.Image) else open_image(image), white=self.on_white)

    def header(self, path: str, *, keep: bool) -> ImageHeader:
        """Return the header of an image; ``keep``: read the whole file, which is decoded next."""
        return image_header(ImageContent(path) if keep else path)

    def plan(self, turns: Sequence[Turn], where: object = "", **options: bool) -> Sample:
        """The splits of a conversation. ``where`` begins errors; ``options``: of ``plan_many``. An image whose header
        cannot be read does not raise: its split carries the reason and the smallest size.
        """
        return next(self.plan_many([(turns, where)], **options))

    def plan_many(
        self, records: Iterable[tuple[Sequence[Turn], object]], *, keep_images: bool = False
    ) -> Iterator[Sample]:
        """``plan`` of each (turns, where); texts are tokenized together. ``keep_images``: they are decoded next."""
        conversations = [(_merge(turns), where) for turns, where in records]
        texts = [turn.value for turns, _ in conversations for turn in turns if turn.kind == "text"]
        together = getattr(self.tokenizer, "encode_texts", None)  # a user's own tokenizer may have "encode" alone
        ids = iter(together(texts) if together else map(self.tokenizer.encode, texts))
        for turns, where in conversations:
            yield Sample(tuple(self.splits_of(turns, ids, where, keep_images=keep_images)), plain=is_document(turns))

    def splits_of(
        self, turns: Sequence[Turn], ids: Iterator[Sequence[int]], where: object, *, keep_images: bool
    ) -> Iterable[Split]:
        """Those of one record. Neighbouring texts of a role are one turn.

        Args:
            ids: of each text, in order: one is taken for each turn of kind ``text``.
            where: begins errors.
            keep_images: they are decoded next (``header``).
        """
        raise NotImplementedError(f"{type(self).__name__}.splits_of")

    def ready_image(self, image: Tensor, kind: ImageKind, where: str) -> ImageSplit:
        """The split of an image that a data set has as a tensor ``[C, H, W]``. Raises ``DataError`` for its shape."""
        latent = kind != "vit"
        stride = self.vae_downsample if latent else self.vit_patch_size
        table = self.max_latent_size if latent else self.vit_max_patches_per_side
        channels = self.vae_channels if latent else self.vit_channels
        c, height, width = image.shape
        if c != channels or height % stride or width % stride or max(height, width) > table * stride:
            raise DataError(
                f"{where} is a tensor of shape {tuple(image.shape)}",
                allowed=f"[{channels}, H, W] with sides that are multiples of {stride}, at most {table * stride}",
            )
        return ImageSplit(where, kind, (height // stride, width // stride), tensor=image.float())


def is_document(turns: Sequence[Turn]) -> bool:
    """Whether a record is plain text, all of it to be learned."""
    return all(turn.is_target and turn.kind == "text" for turn in turns)


def _merge(turns: Sequence[Turn]) -> list[Turn]:
    """Neighbouring texts of one message are one text."""
    merged_turns: list[Turn] = []
    for turn in turns:
        last = merged_turns[-1] if merged_turns else None
        if last is not None and turn.kind == last.kind == "text" and same_message(last, turn):
            merged_turns[-1] = last._replace(value=f"{last.value}\n{turn.value}")
        else:
            merged_turns.append(turn)
    return merged_turns
