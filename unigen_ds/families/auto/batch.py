"""The batch of a model of transformers: a ``PackedBatch`` with what the model's own image processor makes of images.

Every token is a text token, also those that an image's features replace. Where a micro-batch has no image, a document
of a plain one without targets is added: so the vision tower takes part in every micro-batch, as ZeRO and FSDP need.

Shape suffixes: T tokens of the micro-batch, D documents, L tokens of the longest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import Self

from unigen_ds.core.batch import PackedBatch, to_device
from unigen_ds.data.images.image_files import UnreadableImage
from unigen_ds.data.samples.sample import Tally
from unigen_ds.data.samples.splits import PackedBuilder
from unigen_ds.families.chat import ChatImage

Inputs = Mapping[str, Tensor]
"""What an image processor makes of images, by the names of the model's arguments."""
_IMAGES = "image_inputs."


@dataclass(frozen=True, kw_only=True)
class ModelBatch(PackedBatch):
    image_inputs: Inputs = field(default_factory=dict)
    """The model's inputs of all images, in the order of their tokens."""
    host: Inputs = field(default_factory=dict)
    """``text_ids``, ``token_types`` ([T], 1 at an image's tokens) and ``image_inputs`` of whole numbers, which stay on
    the CPU: positions in images are computed of them."""
    num_pictures: int = 0
    added_tokens: int = 0
    """Number of tokens at the end that belong to an added image, which no record has."""

    @property
    def num_tokens(self) -> int:
        return super().num_tokens - self.added_tokens

    @property
    def num_images(self) -> int:
        return self.num_pictures

    def parts(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, others = super().parts()
        images = others.pop("image_inputs")
        return tensors | {f"{_IMAGES}{name}": tensor for name, tensor in images.items()}, others

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], others: Mapping[str, Any]) -> Self:
        images = {name.removeprefix(_IMAGES): t for name, t in tensors.items() if name.startswith(_IMAGES)}
        fields = {name: t for name, t in tensors.items() if not name.startswith(_IMAGES)}
        return super().of(fields, {**others, "image_inputs": images})


@dataclass(frozen=True)
class PictureSplit(ChatImage):
    labels: tuple[int, ...]
    size: tuple[int, int]
    """(width, height) when planned."""

    def count(self, tally: Tally) -> None:
        super().count(tally)
        tally.text_targets += sum(label >= 0 for label in self.labels)

    def load(self, processor: Any, key: tuple[object, ...] | None) -> LoadedPicture:
        image = processor.read_image(self.content or self.path)
        if image.size != self.size:  # a file that was replaced between two readings
            problem = f"image {self.path} has {image.size} pixels, {self.size} when planned"
            raise UnreadableImage(problem, path=self.path)
        return LoadedPicture(self.ids, self.labels, processor.pictures.inputs(image))


@dataclass(frozen=True)
class LoadedPicture:
    """The tokens of one image, and the model's inputs for it."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]
    inputs: Inputs

    def place(self, builder: ModelBuilder, position: int) -> int:
        builder.add_tokens(self.ids, self.labels, position)
        builder.inputs.append(self.inputs)
        return position + len(self.ids)


class ModelBuilder(PackedBuilder):
    def __init__(self, processor: Any) -> None:
        super().__init__(processor)
        self.pictures = processor.pictures
        self.inputs: list[Inputs] = []
        self.adds_plain = self.pictures is not None
        """Whether a batch without any image gets one that no record has."""

    def batch(self, num_sequences: int, sample_ids: tuple[str, ...], skipped: tuple[dict[str, str], ...]) -> ModelBatch:
        number, before, pictures = len(self.inputs), self.num_tokens, self.pictures
        if self.adds_plain and not number:
            self.add_document([pictures.plain])
        packed = super().batch(num_sequences, sample_ids, skipped)
        fields: dict[str, Any] = {f.name: getattr(packed, f.name) for f in dataclasses.fields(packed)}
        if pictures is not None:
            inputs = join(self.inputs, by_sample=pictures.by_sample)
            image = torch.isin(packed.text_ids, torch.tensor(pictures.token_ids))
            whole = {name: tensor for name, tensor in inputs.items() if not tensor.is_floating_point()}
            fields["image_inputs"] = inputs
            fields["host"] = {"text_ids": packed.text_ids, "token_types": image.long(), **whole}
        return ModelBatch(**fields, num_pictures=number, added_tokens=self.num_tokens - before)


def join(inputs: Sequence[Inputs], *, by_sample: bool) -> dict[str, Tensor]:
    """Join the inputs of several images, filled up with zeros where shapes differ, as processors do. ``by_sample``:
    ``[1, images, ...]``, one row for a sample; else ``[images, ...]``.
    """
    tensors = {}
    for name in inputs[0] if inputs else ():
        parts = [each[name] for each in inputs]
        along = 1 if by_sample and parts[0].ndim > 1 and len(parts[0]) == 1 else 0
        largest = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
        pieces = []
        for part in parts:
            shape = [size if dim == along else largest[dim] for dim, size in enumerate(part.shape)]
            missing = [right - size for size, right in zip(part.shape, shape, strict=True)]
            pieces.append(F.pad(part, [n for size in reversed(missing) for n in (0, size)]) if any(missing) else part)
        tensors[name] = torch.cat(pieces, along)
    return tensors


def rows_of(values: Tensor, lengths: Sequence[int], *, fill: int = 0) -> Tensor:
    """``[T]`` -> ``[D, L]``: a row for each document, filled up at its end."""
    return pad_sequence(values.split(list(lengths)), batch_first=True, padding_value=fill)


def slots_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    """``[T]``: where each token is among the ``D * L`` of ``rows_of``."""
    longest = max(lengths)
    rows = [torch.arange(length) + number * longest for number, length in enumerate(lengths)]
    return to_device(torch.cat(rows), device)
