"""The losses of an update for each source of the training data, as they are in a line of ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unigen_ds.core.batch import Batch, to_device
from unigen_ds.system import dist


class SourceLosses:
    """The mean over the targets of each source in the update, of all ranks. The losses of the sources, weighted by
    their targets, are the loss of the term. Of one source it does nothing: its losses are those of the update."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = tuple(names)
        self._parts: dict[str, tuple[Tensor, Tensor]] = {}
        """Term -> by source, the sum of the losses on the device, and of the weights of the targets on the CPU."""

    def begin(self) -> None:
        """The next update."""
        self._parts = {}

    def add(self, batch: Batch, each: Mapping[str, Tensor]) -> None:
        """A micro-batch of this rank. ``batch`` on the CPU; ``each``: as of ``LossTerms``, detached."""
        if len(self._names) < 2 or not each or not batch.sample_ends:
            return
        ends, sources = torch.tensor(batch.sample_ends), torch.tensor(batch.sample_sources)
        for term, (index, weight) in batch.target_positions().items():
            if term in each:
                labels = sources[torch.searchsorted(ends, index, right=True)]
                values, none = each[term].double(), torch.zeros(len(self._names), dtype=torch.float64)
                sums, weights = self._parts.get(term, (torch.zeros_like(none, device=values.device), none))
                sums = sums.index_add(0, to_device(labels, values.device), values)
                self._parts[term] = sums, weights.index_add(0, labels, weight.double())

    def means(self, terms: Sequence[str]) -> dict[str, float]:
        """``loss/<term>/<source>``, where a source has targets. Collective: ``terms`` are the same on all ranks."""
        if len(self._names) < 2:
            return {}
        none = torch.zeros(len(self._names))
        local = [part.tolist() for term in terms for part in self._parts.get(term, (none, none))]
        totals = dist.sum_floats([value for part in local for value in part])
        means: dict[str, float] = {}
        number = len(self._names)
        for term in terms:
            sums, weights, totals = totals[:number], totals[number : 2 * number], totals[2 * number :]
            parts = zip(self._names, sums, weights, strict=True)
            means |= {f"loss/{term}/{name}": total / weight for name, total, weight in parts if weight}
        return means
