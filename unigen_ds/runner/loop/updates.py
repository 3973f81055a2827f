"""Updates with their global counts: what the loop iterates over.

In: micro-batches of this rank. Out: per update the micro-batches, the number of targets of each loss term, and tokens,
samples and skipped samples, over all ranks and iterations. The counts come from labels on the CPU and are summed over
gloo while the previous update is computed, so the loop waits for neither device nor network. The same sum contains
whether this process asks the run to stop, so all ranks stop after the same update.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from unigen_ds.core.batch import Batch, check_counts
from unigen_ds.data.batches.loader import MicroBatch
from unigen_ds.system import dist

_TALLIES = ("tokens", "samples", "skipped", "stops")


@dataclass(frozen=True)
class Update:
    """The data of one optimizer step."""

    micro_batches: Sequence[MicroBatch]
    counts: Mapping[str, float]
    """Targets of each loss term, over all ranks and iterations."""
    tokens: int
    samples: int
    skipped: int
    stops: int = 0
    """Processes that had asked for a stop when this update was counted."""
    ahead: _Pending | None = None
    """The next update, which was counted when this one began."""

    def stop_wanted(self) -> bool:
        """Whether any process had asked for a stop when this update began. The same on all ranks. Collective.

        Called after the update: the sum was started before it, so nothing is left to wait for.
        """
        return bool(self.stops or (self.ahead is not None and self.ahead.finished().stops))


def counted(
    loader: Iterator[Sequence[MicroBatch]], *, terms: Collection[str], stop: Callable[[], bool] = lambda: False
) -> Iterator[Update]:
    """Read one update ahead, so that its sums are ready when it begins. Collective.

    ``terms``: those of the family; raises ``ConfigError`` where a batch counts others.
    ``stop``: whether this process asks the run to stop; asked once for each update.
    """
    ahead = _start(next(loader), stop=stop(), declared=terms)
    while True:
        present, ahead = ahead, _start(next(loader), stop=stop(), declared=terms)
        yield present.finished(ahead)


def counted_alone(micro_batches: Sequence[MicroBatch]) -> Update:
    """One update; waits for its sums. Collective."""
    return _start(micro_batches, stop=False).finished()


@dataclass(frozen=True)
class _Pending:
    micro_batches: Sequence[MicroBatch]
    terms: Sequence[str]
    sums: dist.PendingSum

    def finished(self, ahead: _Pending | None = None) -> Update:
        values = self.sums.wait()
        tallies = dict(zip(_TALLIES, map(int, values[len(self.terms) :]), strict=True))
        return Update(self.micro_batches, dict(zip(self.terms, values, strict=False)), ahead=ahead, **tallies)


def _start(micro_batches: Sequence[MicroBatch], *, stop: bool, declared: Collection[str] | None = None) -> _Pending:
    batches: list[Batch] = [micro_batch.batch for micro_batch in micro_batches]
    targets = [batch.target_counts() for batch in batches]
    for each in targets:
        check_counts(each, of=type(batches[0]).__name__, declared=targets[0] if declared is None else declared)
    terms = sorted(targets[0])
    local = [sum(t[term] for t in targets) for term in terms]
    local += [float(sum(b.num_tokens for b in batches)), float(sum(b.num_samples for b in batches))]
    local += [float(sum(len(b.skipped) for b in batches)), float(stop)]
    return _Pending(micro_batches, terms, dist.PendingSum(local))
