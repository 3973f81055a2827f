"""A family of a user's own without texts, images and tokens: a regression with two loss terms and BatchNorm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unigen_ds import (
    DATASETS,
    FAMILIES,
    MODELS,
    Batch,
    Family,
    LossTerms,
    Sample,
    ScannedDataset,
    Split,
    Tally,
    UnreadableImage,
    generator,
)


@dataclass(frozen=True)
class Point(Split):
    """Its own split: a row of numbers, its value and, where it is known, its class."""

    x: tuple[float, ...]
    y: float
    label: int | None
    units: int = 1

    @property
    def num_tokens(self) -> int:
        return self.units

    def count(self, tally: Tally) -> None:
        tally.other_targets += 1 + (self.label is not None)

    def load(self, processor: PointProcessor, key: tuple[object, ...] | None) -> LoadedPoint:
        x = torch.tensor(self.x)
        if key is not None:
            x = x + processor.jitter * torch.randn(len(x), generator=generator(*key, "jitter"))
        if self.y > 50:
            raise UnreadableImage("an outlier")
        return LoadedPoint(x, self)


@dataclass(frozen=True)
class LoadedPoint:
    x: Tensor
    point: Point

    def place(self, builder: PointBuilder, position: int) -> int:
        builder.rows.append((self.x, self.point))
        return position


@dataclass(frozen=True, kw_only=True)
class PointBatch(Batch):
    """[N, features], [N], [N] (-1: no class), [N] 0 for padding."""

    x: Tensor
    y: Tensor
    label: Tensor
    weight: Tensor

    @property
    def num_tokens(self) -> int:
        return len(self.x)

    def target_counts(self) -> dict[str, float]:
        return {"value": float(self.weight.sum()), "class": float((self.label >= 0).sum())}


class PointBuilder:
    def __init__(self, num_features: int) -> None:
        self.num_features, self.num_tokens = num_features, 0
        self.rows: list[tuple[Tensor, Point | None]] = []

    def add_document(self, loaded: Sequence[Any]) -> None:
        for each in loaded:
            each.place(self, 0)
        self.num_tokens = len(self.rows)

    def add_padding(self, num_tokens: int) -> None:
        self.rows += [(torch.zeros(self.num_features), None)] * num_tokens
        self.num_tokens = len(self.rows)

    def batch(self, num_sequences: int, sample_ids: tuple[str, ...], skipped: tuple[dict[str, str], ...]) -> PointBatch:
        points = [point for _, point in self.rows]
        return PointBatch(
            x=torch.stack([x for x, _ in self.rows]),
            y=torch.tensor([point.y if point else 0.0 for point in points]),
            label=torch.tensor([-1 if point is None or point.label is None else point.label for point in points]),
            weight=torch.tensor([float(point is not None) for point in points]),
            num_sequences=num_sequences,
            num_samples=len(sample_ids),
            sample_ids=sample_ids,
            skipped=skipped,
        )


class PointProcessor:
    def __init__(self, *, jitter: float = 0.0, num_features: int, tokenizer: None, seed: int) -> None:
        self.jitter, self.num_features, self.seed = jitter, num_features, seed
        self.dropout: dict[str, float] = {}

    def builder(self) -> PointBuilder:
        return PointBuilder(self.num_features)


@DATASETS.register_module(force=True)
class Waves(ScannedDataset):
    """Points of a curve; the class of every third is unknown."""

    def __init__(self, processor: PointProcessor, *, number: int = 40, outlier: bool = False, units: int = 1) -> None:
        self.processor, self.number, self.outlier, self.units = processor, number, outlier, units
        self.name = "waves"

    def __len__(self) -> int:
        return self.number

    def sample(self, index: int, *, pass_number: int = 0) -> Sample:
        x = tuple(math.sin(index * (k + 1)) for k in range(self.processor.num_features))
        y = 99.0 if self.outlier and index == 7 else sum(x)
        return Sample((Point(x, y, None if index % 3 == 0 else int(y > 0), self.units),))


@MODELS.register_module(force=True)
class Regressor(nn.Module):
    """``forward(PointBatch) -> LossTerms`` with the terms ``value`` and ``class``."""

    def __init__(self, *, num_features: int, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(num_features, width), nn.BatchNorm1d(width), nn.ReLU())
        self.heads = nn.Linear(width, 3)

    def forward(self, batch: PointBatch) -> LossTerms:
        out = self.heads(self.body(batch.x))
        value = ((out[:, 0] - batch.y).square() * batch.weight).sum()
        kind = F.cross_entropy(out[:, 1:], batch.label, ignore_index=-1, reduction="sum")
        return LossTerms({"value": value, "class": kind})


@FAMILIES.register_module(force=True)
class Regression(Family):
    model = Regressor
    terms = ("value", "class")
    needs_tokenizer = False

    def processor_arguments(self) -> Any:
        return PointProcessor

    def processor(self, spec: Any, given: Any, *, tokenizer: None, seed: int) -> Any:
        given = {**given, "num_features": spec["num_features"]}
        return super().processor(spec, given, tokenizer=tokenizer, seed=seed)
