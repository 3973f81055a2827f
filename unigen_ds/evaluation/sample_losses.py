"""What each sample adds to ``val/loss`` and its parts, so that a comparison of two checkpoints has an interval.

In: the batches of an evaluation, one sample a sequence, and what the model returned for them. Out: the values of
bootstrap samples, as ``Metric.resampled`` draws them. A few numbers are kept for each sample, and nothing is computed
again. A model whose ``LossTerms.each`` lacks a term has no such values; the reason is recorded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from unigen_ds.core import dist
from unigen_ds.core.batch import Batch, LossTerms
from unigen_ds.evaluation.comparison import NO_DRAWS
from unigen_ds.evaluation.metrics.base import draws
from unigen_ds.evaluation.validation import Key, Validation

_NUMBERS = re.compile(r"(:\d+){2,3}$")
"""Of a sample id after its source: record, pass, and the piece of a record that is split."""
COUNT, SEED = 1000, 0
"""Of the bootstrap draws."""
_Row = tuple[str, dict[Key, tuple[float, float]]]
"""A sample's id; sum of the losses and number of the targets by term, source and group."""


class SampleLosses:
    """A ``Watch`` of ``Validation.losses``. ``missing``: why samples have no values of their own, else ''."""

    def __init__(self, validation: Validation) -> None:
        self._validation = validation
        self._rows: list[_Row] = []
        self.missing = ""

    def __call__(self, batch: Batch, terms: LossTerms) -> None:
        """Add a batch with one sample a sequence; ``batch`` on the CPU."""
        samples = _samples_of_targets(batch)
        without = [term for term in terms.sums if term not in samples or term not in terms.each]
        if without:
            of = ", ".join(without)
            self.missing = f"of {of} there is no value of each target (LossTerms.each, Batch.target_positions)"
            return
        groups = self._validation.groups(batch)
        found: list[dict[Key, tuple[float, float]]] = [{} for _ in batch.sample_ids]
        for term in terms.sums:
            each, (sample, weight) = terms.each[term].detach().double().cpu(), samples[term]
            parts: list[tuple[Key, Tensor]] = [((term,), torch.ones_like(sample, dtype=torch.bool))]
            if term in groups:
                labels, names = groups[term]
                parts += [((term, name), labels == number) for number, name in enumerate(names)]
            for key, chosen in parts:
                sums, numbers = (
                    torch.zeros(len(found), dtype=torch.float64).index_add_(0, sample[chosen], one[chosen])
                    for one in (each, weight)
                )
                for row, total, number in zip(found, sums.tolist(), numbers.tolist(), strict=True):
                    if number:
                        row[key] = (total, number)
        for sample_id, row in zip(batch.sample_ids, found, strict=True):
            source = _NUMBERS.sub("", sample_id)
            by_source: dict[Key, tuple[float, float]] = {
                (*key, source): value for key, value in row.items() if len(key) == 1
            }
            self._rows.append((sample_id, {**row, **by_source}))

    def resampled(self, *, count: int = COUNT) -> tuple[dict[str, list[float]], str]:
        """Name -> the values of ``count`` draws over the samples of all ranks; and how they were drawn, or why there
        are none. The same on all ranks. Collective.
        """
        gathered = dist.gather_to_main((self._rows, self.missing))

        def made() -> tuple[dict[str, list[float]], str]:
            missing = next((why for _, why in gathered or () if why), "")
            if missing:
                return {}, f"{NO_DRAWS}{missing}"
            rows = sorted((row for part, _ in gathered or () for row in part), key=lambda row: row[0])
            return _drawn(self._validation, rows, count), f"{count} draws, seed {SEED}"

        return dist.on_main(made)


def _samples_of_targets(batch: Batch) -> Mapping[str, tuple[Tensor, Tensor]]:
    """Term -> (number of the sample of each target, its weight in the number of targets)."""
    ends = torch.tensor(batch.sample_ends, dtype=torch.int64)
    return {
        term: (torch.searchsorted(ends, index, right=True), weight.double())
        for term, (index, weight) in batch.target_positions().items()
    }


def _drawn(validation: Validation, rows: Sequence[_Row], count: int) -> dict[str, list[float]]:
    keys = sorted({key for _, row in rows for key in row})
    table = np.array([[row.get(key, (0.0, 0.0)) for key in keys] for _, row in rows]).reshape(len(rows), -1)
    found: dict[str, list[float]] = {}
    for number, chosen in enumerate(draws(len(rows), count=count, seed=SEED) if rows else ()):
        totals = (np.bincount(chosen, minlength=len(rows)) @ table).reshape(len(keys), 2)
        sums, numbers = ({key: float(total[k]) for key, total in zip(keys, totals, strict=True)} for k in (0, 1))
        values = validation.values(sums, numbers)
        for name in {*found, *values}:  # a draw may have no target of a part
            found.setdefault(name, [np.nan] * number).append(values.get(name, np.nan))
    return found
