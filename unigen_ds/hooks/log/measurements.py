"""What a line of ``metrics.jsonl`` contains: losses by term, means of an epoch, memory; and the alarm on
gradient norms. Sums of this rank in, values over all ranks out.

Sums are added up on the device, which nothing waits for, and read where a line is logged.
"""

from __future__ import annotations

import math
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from unigen_ds.core.batch import DEFAULT_WEIGHT
from unigen_ds.hooks.base import UpdateResult
from unigen_ds.system import dist

WINDOW = 100
"""Updates whose median is what is usual."""
FEWEST = 20
"""Updates before the first alarm."""
FACTOR = 10.0


def global_losses(result: UpdateResult) -> dict[str, float | None]:
    """``loss/<term>``: the mean over all targets of the update on all ranks; ``loss``: their weighted sum. Collective.

    A term without targets is None and left out of the total; the total is None when no term has any.
    """
    terms = sorted(result.counts)
    local = [float(result.local_sums[term]) if term in result.local_sums else 0.0 for term in terms]
    losses: dict[str, float | None] = {}
    total: float | None = None
    for term, value in zip(terms, dist.sum_floats(local), strict=True):
        count = result.counts[term]
        losses[f"loss/{term}"] = mean = value / count if count else None
        if mean is not None:
            total = (total or 0.0) + result.loss_weights.get(term, DEFAULT_WEIGHT) * mean
    return {"loss": total, **losses}


class EpochMeans:
    """The losses of a whole epoch, across kills, and its throughput.

    ``state``: the sums that ``settle`` has read and the counts, over all ranks: those of before a resume.
    Without times, so a resumed run has the same state as one that was never killed.
    """

    def __init__(self, state: Mapping[str, dict[str, float]]) -> None:
        self._local: dict[str, Tensor] = {}
        """This rank's sum of each term since the last ``settle``, on the device."""
        self._sums, self._counts = state["sums"], state["counts"]
        self._tokens = 0
        self._since = time.perf_counter()

    def add(self, result: UpdateResult) -> None:
        if result.applied:  # the sums of a skipped update may not be finite
            for name, value in result.local_sums.items():
                self._local[name] = self._local[name] + value if name in self._local else value.double()
            for name, count in result.counts.items():
                self._counts[name] = self._counts.get(name, 0.0) + count
        self._tokens += result.tokens

    def settle(self) -> None:
        """Read the device and sum over ranks. Collective."""
        names = sorted(self._counts)
        local = [float(self._local.get(name, 0.0)) for name in names]
        for name, value in zip(names, dist.sum_floats(local), strict=True):
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._local = {}

    def finish(self, loss_weights: Mapping[str, float]) -> dict[str, float]:
        """Return ``epoch_loss``, ``epoch_loss/<term>`` and ``epoch_tokens_per_second``; the next epoch begins.
        Collective.

        Means over all targets of the epoch; terms without targets are left out. The throughput is that of this process.
        """
        self.settle()
        means = {name: self._sums.get(name, 0.0) / count for name, count in sorted(self._counts.items()) if count}
        values = {f"epoch_loss/{name}": mean for name, mean in means.items()}
        if means:
            values["epoch_loss"] = sum(loss_weights.get(n, DEFAULT_WEIGHT) * mean for n, mean in means.items())
        values["epoch_tokens_per_second"] = self._tokens / (time.perf_counter() - self._since)
        self._sums.clear()
        self._counts.clear()
        self._tokens, self._since = 0, time.perf_counter()
        return values


class GradNormWatch:
    """Compares each norm with the median of the last ``WINDOW`` before it. One warning when the range is left.

    ``norms``: those of before a resume.
    """

    def __init__(self, norms: list[float]) -> None:
        self._norms = norms
        self._outside = False

    def observe(self, norms: Sequence[float], *, last_update: int) -> Iterator[str]:
        """A sentence for each of ``norms``, those of the updates up to ``last_update``, that leaves the range.

        Norms that are not finite are the ``NanGuardHook``'s.
        """
        for update, norm in enumerate(norms, start=last_update - len(norms) + 1):
            if not math.isfinite(norm):
                continue
            usual = statistics.median(self._norms) if len(self._norms) >= FEWEST else norm
            outside = not usual / FACTOR <= norm <= usual * FACTOR
            if outside and not self._outside:
                kind = "exploding" if norm > usual else "vanishing"
                yield (
                    f"update {update}: the gradient norm is {norm:.4g}; usual is {usual / FACTOR:.4g} to"
                    f" {usual * FACTOR:.4g} ({usual:.4g} is the median of the last {len(self._norms)} updates). If it"
                    f" stays there, gradients are {kind}: look at the samples of this update (tools/inspect_data.py)"
                    " and at the learning rate."
                )
            self._outside = outside
            self._norms.append(norm)
            del self._norms[:-WINDOW]


def global_memory() -> dict[str, float]:
    """``memory``: the largest amount so far, MiB, of the process that has most: allocated on its CUDA device, else
    resident in the process. ``memory_reserved``, on CUDA alone: what the allocator has reserved on the device, which is
    what runs out. Collective.
    """
    if torch.cuda.is_available():
        peaks = [torch.cuda.max_memory_allocated() / 2**20, torch.cuda.max_memory_reserved() / 2**20]
    else:
        peaks = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)]
    return dict(zip(("memory", "memory_reserved"), dist.max_floats(peaks), strict=False))
