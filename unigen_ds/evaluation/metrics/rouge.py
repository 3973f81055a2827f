"""ROUGE by rouge-score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from unigen_ds.core.registry import METRICS
from unigen_ds.evaluation.metrics.base import Metric, package, text_pairs

Kind = Literal["rouge1", "rouge2", "rouge3", "rougeL", "rougeLsum"]


@METRICS.register_module()
class ROUGE(Metric):
    """Mean F-measure of ROUGE, 0 to 1 (Lin, 2004), as Google's rouge-score computes it for a sample.

    rougeLsum splits a text at newlines: put one sentence on each line. Of several references the best counts.

    Args:
        kinds: which to compute.
        use_stemmer: compare words without their endings (Porter's stemmer).
    """

    name = "rouge"
    library = "rouge-score"

    def __init__(
        self, *, kinds: Sequence[Kind] = ("rouge1", "rouge2", "rougeL", "rougeLsum"), use_stemmer: bool = False
    ) -> None:
        super().__init__(kinds=list(kinds), use_stemmer=use_stemmer)
        self._kinds = list(kinds)
        self._scorer: Any = None

    def rows(self, predictions: Sequence[Any], references: Sequence[Any], keys: Sequence[str]) -> Sequence[Any]:
        if self._scorer is None:
            scorer = package("rouge_score.rouge_scorer").RougeScorer
            self._scorer = scorer(self._kinds, use_stemmer=self.settings["use_stemmer"], split_summaries=False)
        scores = [self._scorer.score_multi(several, one) for one, several in text_pairs(predictions, references, keys)]
        return [[score[kind].fmeasure for kind in self._kinds] for score in scores]

    def values(self, table: np.ndarray) -> dict[str, float]:
        return {kind: float(table[:, n].mean()) for n, kind in enumerate(self._kinds)}
