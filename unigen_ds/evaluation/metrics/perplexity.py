"""Perplexity from sums of losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from unigen_ds.core.errors import DataError
from unigen_ds.core.registry import METRICS
from unigen_ds.evaluation.metrics.base import Metric


@METRICS.register_module()
class Perplexity(Metric):
    """exp of the mean loss of a target token over all samples (Jelinek et al., 1977); every token counts the same.

    A prediction is the sum of the cross entropies of a sample's target tokens in nats, its reference their number.
    """

    name = "perplexity"
    predicts = "loss"
    compares = "targets"

    def __init__(self) -> None:
        super().__init__()

    def rows(self, predictions: Sequence[Any], references: Sequence[Any], keys: Sequence[str]) -> Sequence[Any]:
        found = []
        for loss, targets, key in zip(predictions, references, keys, strict=True):
            total, number = float(loss), int(targets)
            if not math.isfinite(total) or number < 0:
                raise DataError(
                    f"sample {key!r}: the loss is {total} over {number} targets", allowed="a finite sum, and a count"
                )
            found.append([total, float(number)])
        return found

    def values(self, table: np.ndarray) -> dict[str, float]:
        loss, targets = table.sum(0)
        if targets == 0:
            raise DataError("perplexity: no sample has a target token")
        return {self.name: float(np.exp(loss / targets))}
