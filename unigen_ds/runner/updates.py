"""Updates with their global counts: what the loop iterates over.

In: micro-batches of this rank. Out: per update the micro-batches, the number of targets of each loss term, and tokens,
samples and skipped samples, over all ranks and iterations. The counts come from labels on the CPU and are summed over
gloo while the update before is computed, so the loop waits for neither device nor network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from unigen_ds.core import dist
from unigen_ds.core.batch import PackedBatch
from unigen_ds.data.loader import MicroBatch

_TALLIES = ("tokens", "samples", "skipped")


@dataclass(frozen=True)
class Update:
    """The data of one optimizer step."""

    micro_batches: Sequence[MicroBatch]
    counts: Mapping[str, float]
    """Targets of each loss term, over all ranks and iterations."""
    tokens: int
    samples: int
    skipped: int


def counted(loader: Iterator[Sequence[MicroBatch]]) -> Iterator[Update]:
    """Look one update ahead, so that its sums are ready when it is its turn. Collective."""
    ahead = _start(next(loader))
    while True:
        present, ahead = ahead, _start(next(loader))
        yield present.finished()


def counted_alone(micro_batches: Sequence[MicroBatch]) -> Update:
    """One update, its sums waited for. Collective."""
    return _start(micro_batches).finished()


@dataclass(frozen=True)
class _Pending:
    micro_batches: Sequence[MicroBatch]
    terms: Sequence[str]
    sums: dist.PendingSum

    def finished(self) -> Update:
        values = self.sums.wait()
        tallies = dict(zip(_TALLIES, map(int, values[len(self.terms) :]), strict=True))
        return Update(self.micro_batches, dict(zip(self.terms, values, strict=False)), **tallies)


def _start(micro_batches: Sequence[MicroBatch]) -> _Pending:
    batches: list[PackedBatch] = [micro_batch.batch for micro_batch in micro_batches]
    targets = [batch.target_counts() for batch in batches]
    terms = sorted(targets[0])
    local = [sum(t[term] for t in targets) for term in terms]
    local += [float(sum(b.num_tokens for b in batches)), float(sum(b.num_samples for b in batches))]
    local.append(float(sum(len(b.skipped) for b in batches)))
    return _Pending(micro_batches, terms, dist.PendingSum(local))
