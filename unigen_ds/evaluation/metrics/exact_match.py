"""The share of exact answers."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from unigen_ds.core.registry import METRICS
from unigen_ds.evaluation.metrics.base import Metric, text_pairs

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@METRICS.register_module()
class ExactMatch(Metric):
    """The share of predictions that equal a reference, 0 to 1.

    Args:
        normalize: ``none`` compares the texts as they are; ``squad`` first removes case, punctuation, English articles
            and repeated spaces, as the official script of SQuAD does (Rajpurkar et al., EMNLP 2016).
    """

    name = "exact_match"

    def __init__(self, *, normalize: Literal["none", "squad"] = "none") -> None:
        super().__init__(normalize=normalize)
        self._squad = normalize == "squad"

    def rows(self, predictions: Sequence[Any], references: Sequence[Any], keys: Sequence[str]) -> Sequence[Any]:
        pairs = text_pairs(predictions, references, keys)
        return [[float(self._normal(one) in map(self._normal, several))] for one, several in pairs]

    def values(self, table: np.ndarray) -> dict[str, float]:
        return {self.name: float(table.mean())}

    def _normal(self, text: str) -> str:
        if not self._squad:
            return text
        return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())
