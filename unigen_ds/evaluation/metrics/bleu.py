"""BLEU by sacrebleu."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge

from unigen_ds.core.log import logger
from unigen_ds.core.registry import METRICS
from unigen_ds.evaluation.metrics.base import Metric, State, package, text_pairs


@METRICS.register_module()
class BLEU(Metric):
    """BLEU of the corpus, 0 to 100 (Papineni et al., ACL 2002), as sacrebleu computes it (Post, WMT 2018).

    A row is the lengths and the counts of n-grams of one sample; their sums are those of the corpus.

    Args:
        tokenize: tokenizer of sacrebleu.
        lowercase: compare without upper and lower case.
        max_order: longest n-gram.
        smoothing: of sacrebleu, for orders without a match.
    """

    name = "bleu"
    library = "sacrebleu"

    def __init__(
        self,
        *,
        tokenize: Literal["13a", "intl", "zh", "char", "none"] = "13a",
        lowercase: bool = False,
        max_order: Annotated[int, Ge(1)] = 4,
        smoothing: Literal["exp", "floor", "add-k", "none"] = "exp",
    ) -> None:
        super().__init__(tokenize=tokenize, lowercase=lowercase, max_order=max_order, smoothing=smoothing)
        self._max_order, self._smoothing = max_order, smoothing
        self._library: Any = None
        self._warned = False

    def rows(self, predictions: Sequence[Any], references: Sequence[Any], keys: Sequence[str]) -> Sequence[Any]:
        if self._library is None:
            self._library = package("sacrebleu").BLEU(
                tokenize=self.settings["tokenize"],
                lowercase=self.settings["lowercase"],
                max_ngram_order=self._max_order,
                smooth_method="none",  # counts as they are; ``values`` smooths their sums
                effective_order=True,  # of sentences; without it sacrebleu logs a warning for each
            )
        scores = [self._library.sentence_score(*pair) for pair in text_pairs(predictions, references, keys)]
        return [[score.sys_len, score.ref_len, *score.counts, *score.totals] for score in scores]

    def compute(self, merged: State) -> dict[str, float]:
        short = sum(row[0] < self._max_order for row in merged["rows"])
        if short and not self._warned:
            self._warned = True
            logger().warning(
                "BLEU: %d of %d answers have fewer than %d words, so none of their %d-grams can match; where all are so"
                " short, BLEU is 0. Remedy: ExactMatch or ROUGE for short answers, or BLEU(max_order=...).",
                short, len(merged["rows"]), self._max_order, self._max_order,
            )  # fmt: skip
        return super().compute(merged)

    def values(self, table: np.ndarray) -> dict[str, float]:
        sums = [int(one) for one in table.sum(0)]
        score = package("sacrebleu").BLEU.compute_bleu(
            correct=sums[2 : 2 + self._max_order],
            total=sums[2 + self._max_order :],
            sys_len=sums[0],
            ref_len=sums[1],
            smooth_method=self._smoothing,
            max_ngram_order=self._max_order,
        )
        return {self.name: float(score.score)}
