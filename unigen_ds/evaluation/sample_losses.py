"""What each sample adds to ``val/loss`` and its parts, for the interval of a comparison and for perplexity.

In: the batches of an evaluation, one sample a sequence, and what the model returned for them. A few numbers are kept
for each sample, and nothing is computed again. A model whose ``LossTerms.each`` lacks a term has no such values; the
reason is recorded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from unigen_ds.core.batch import Batch, LossTerms
from unigen_ds.core.errors import DataError
from unigen_ds.evaluation.metrics.base import draws
from unigen_ds.evaluation.provenance import NO_DRAWS
from unigen_ds.evaluation.validation import Key, Validation
from unigen_ds.system import dist

TEXT = "text"
"""The loss term of texts, of which perplexity is computed."""
_NUMBERS = re.compile(r"(:\d+){2,3}$")
"""Of a sample id after its source: record, pass, and the piece of a record that is split."""
COUNT, SEED = 1000, 0
"""Of the bootstrap draws."""
_Row = tuple[str, dict[Key, tuple[float, float]]]
"""A sample's id; sum of the losses and number of the targets by term, source and group."""


class SampleLosses:
    """A ``Watch`` of ``Validation.losses``: what each sample adds, with and without the weights of ``ce_reweight``.

    ``missing``: why samples have no values of their own, else ''.
    """

    def __init__(self, validation: Validation) -> None:
        self._validation = validation
        self._rows: list[_Row] = []
        self._texts: list[tuple[float, int, str]] = []
        """The sum of the losses of each text without weights, the number of its targets, and its id."""
        self.missing = self._no_texts = ""

    def __call__(self, batch: Batch, terms: LossTerms) -> None:
        """Add a batch with one sample a sequence; ``batch`` on the CPU."""
        targets, ids = _samples_of_targets(batch), batch.sample_ids
        each = {term: one.detach().double().cpu() for term, one in terms.each.items() if term in targets}
        if TEXT in each:
            sample, weight = targets[TEXT]
            sums, numbers = _sums(sample, each[TEXT] / weight, len(ids)), sample.bincount(minlength=len(ids)).tolist()
            self._texts += [one for one in zip(sums, numbers, ids, strict=True) if one[1]]
        else:
            self._no_texts = f"{type(batch).__name__} and the model's LossTerms.each have no loss of each text target"
        if without := ", ".join(term for term in terms.sums if term not in each):
            self.missing = f"of {without} there is no value of each target (LossTerms.each, Batch.target_positions)"
            return
        groups = self._validation.groups(batch)
        rows: list[dict[Key, tuple[float, float]]] = [{} for _ in ids]
        for term in terms.sums:
            sample, weight = targets[term]
            labels, names = groups.get(term, (sample, ()))
            parts: dict[Key, Tensor] = {(term,): torch.ones_like(sample, dtype=torch.bool)}
            parts |= {(term, name): labels == number for number, name in enumerate(names)}
            for key, part in parts.items():
                sums, counts = (_sums(sample[part], one[part], len(rows)) for one in (each[term], weight))
                for row, total, count in zip(rows, sums, counts, strict=True):
                    if count:
                        row[key] = (total, count)
        for sample_id, row in zip(ids, rows, strict=True):
            source = _NUMBERS.sub("", sample_id)
            self._rows.append((sample_id, row | {(*key, source): value for key, value in row.items() if len(key) == 1}))

    def texts(self) -> tuple[Sequence[float], Sequence[int], Sequence[str]]:
        """Sums, numbers of targets and sample ids of this rank's texts, as ``Perplexity.update`` has them.

        Raises ``DataError`` where the model does not return what is needed.
        """
        if self._no_texts:
            remedy = "return them in eval mode (docs/evaluation.md), or leave out Perplexity"
            raise DataError(self._no_texts, remedy=remedy)
        sums, numbers, keys = zip(*self._texts, strict=True) if self._texts else ((), (), ())
        return sums, numbers, keys

    def resampled(self, *, count: int = COUNT) -> tuple[dict[str, list[float]], str]:
        """Name -> the values of ``count`` draws over the samples of all ranks, as ``Metric.resampled`` draws them; and
        how they were drawn, or why there are none. The same on all ranks. Collective.
        """
        per_rank = dist.gather_to_main((self._rows, self.missing))

        def values() -> tuple[dict[str, list[float]], str]:
            missing = next((why for _, why in per_rank or () if why), "")
            if missing:
                return {}, f"{NO_DRAWS}{missing}"
            rows = sorted((row for part, _ in per_rank or () for row in part), key=lambda row: row[0])
            return _replicates(self._validation, rows, count), f"{count} draws, seed {SEED}"

        return dist.on_main(values)


def _samples_of_targets(batch: Batch) -> Mapping[str, tuple[Tensor, Tensor]]:
    """Term -> (number of the sample of each target, its weight in the number of targets)."""
    ends = torch.tensor(batch.sample_ends, dtype=torch.int64)
    return {
        term: (torch.searchsorted(ends, index, right=True), weight.double())
        for term, (index, weight) in batch.target_positions().items()
    }


def _sums(sample: Tensor, values: Tensor, number: int) -> list[float]:
    """Return the sum of the values of each of ``number`` samples."""
    sums: list[float] = torch.zeros(number, dtype=torch.float64).index_add_(0, sample, values).tolist()
    return sums


def _replicates(validation: Validation, rows: Sequence[_Row], count: int) -> dict[str, list[float]]:
    keys = sorted({key for _, row in rows for key in row})
    table = np.array([[row.get(key, (0.0, 0.0)) for key in keys] for _, row in rows]).reshape(len(rows), -1)
    replicates: dict[str, list[float]] = {}
    for number, chosen in enumerate(draws(len(rows), count=count, seed=SEED) if rows else ()):
        totals = (np.bincount(chosen, minlength=len(rows)) @ table).reshape(len(keys), 2)
        sums, numbers = ({key: float(total[k]) for key, total in zip(keys, totals, strict=True)} for k in (0, 1))
        values = validation.values(sums, numbers)
        for name in {*replicates, *values}:  # a draw may have no target of a part
            replicates.setdefault(name, [np.nan] * number).append(values.get(name, np.nan))
    return replicates
