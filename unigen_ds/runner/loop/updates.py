"""Updates with their global counts: what the loop iterates over; and the last one once more (``LastUpdate``).

In: micro-batches of this rank. Out: per update the micro-batches, the number of targets of each loss term, and tokens,
samples and skipped samples, over all ranks and iterations. The counts come from labels on the CPU and are summed over
gloo while the previous update is computed, so the loop waits for neither device nor network. The same sum contains
what this process asks of all, such as to stop, so all ranks do it after the same update.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from unigen_ds.backends.base import Backend
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.core.batch import Batch, check_counts
from unigen_ds.core.progress import Geometry
from unigen_ds.data.batches.loader import MicroBatch, UpdateLoader
from unigen_ds.data.order.order import Cursor
from unigen_ds.evaluation.validation import evaluating
from unigen_ds.system import dist
from unigen_ds.system.seeding import kept_generators

_TALLIES = ("tokens", "samples", "num_skipped")


@dataclass(frozen=True)
class Update:
    micro_batches: Sequence[MicroBatch]
    counts: Mapping[str, float]
    """Targets of each loss term, over all ranks and iterations."""
    tokens: int
    samples: int
    num_skipped: int
    request_counts: Sequence[float] = ()
    """How many processes had each request when this update was counted."""
    ahead: _Pending | None = None
    """The next update, which was counted when this one began."""

    def requests(self) -> list[bool]:
        """Whether any process had each request when this update began. Call it after the update. Collective."""
        assert self.ahead is not None
        return [number > 0 for number in self.ahead.finish().request_counts]


def count_ahead(
    loader: Iterator[Sequence[MicroBatch]], *, terms: Collection[str], requests: Callable[[], Sequence[bool]]
) -> Iterator[Update]:
    """Read one update ahead, so that its sums are ready when it begins. Collective.

    ``terms``: of the family; others raise ``ConfigError``. ``requests``: those of this process, asked once an update.
    """
    ahead = _start(next(loader), family_terms=terms)
    while True:
        present, ahead = ahead, _start(next(loader), requests(), family_terms=terms)
        yield present.finish(ahead)


@dataclass(frozen=True)
class _Pending:
    micro_batches: Sequence[MicroBatch]
    terms: Sequence[str]
    sums: dist.PendingSum

    def finish(self, ahead: _Pending | None = None) -> Update:
        values = self.sums.wait()
        rest = values[len(self.terms) :]
        tallies, request_counts = dict(zip(_TALLIES, map(int, rest), strict=False)), rest[len(_TALLIES) :]
        counts = dict(zip(self.terms, values, strict=False))
        return Update(self.micro_batches, counts, **tallies, request_counts=request_counts, ahead=ahead)


def _start(
    micro_batches: Sequence[MicroBatch], requests: Sequence[bool] = (), *, family_terms: Collection[str] | None = None
) -> _Pending:
    batches: list[Batch] = [micro_batch.batch for micro_batch in micro_batches]
    targets = [batch.target_counts() for batch in batches]
    for each in targets:
        check_counts(each, of=type(batches[0]).__name__, of_family=targets[0] if family_terms is None else family_terms)
    terms = sorted(targets[0])
    local = [sum(t[term] for t in targets) for term in terms]
    local += [float(sum(b.num_tokens for b in batches)), float(sum(b.num_samples for b in batches))]
    local += [float(sum(len(b.skipped) for b in batches)), *map(float, requests)]
    return _Pending(micro_batches, terms, dist.PendingSum(local))


@dataclass(frozen=True)
class LastUpdate:
    """Where the last update began, how many sequences it had, and its data while that is still in memory."""

    cursor: Cursor | None = None
    sequences: int = 0
    update: Update | None = None

    def state_dict(self) -> dict[str, Any] | None:
        if self.cursor is None:
            return None
        return {"cursor": self.cursor.state_dict(), "sequences": self.sequences}

    @classmethod
    def from_manifest(cls, manifest: Manifest | None, cursor: Cursor) -> LastUpdate:
        """That of a checkpoint; empty where it has none, or where the run continues at another position of the data."""
        state = manifest.loader.get("last") if manifest else None
        if state is None or cursor.state_dict() != manifest.loader["cursor"]:  # type: ignore[union-attr]
            return cls()
        return cls(Cursor.from_state_dict(state["cursor"]), int(state["sequences"]))

    def read(self, geometry: Geometry, loader_at: Callable[[Geometry, Cursor], UpdateLoader]) -> Update | None:
        """Its data, under any geometry that splits it into whole iterations. Draws no random number. Collective."""
        if self.update is not None or self.cursor is None:
            return self.update
        iterations, rest = divmod(self.sequences, geometry.sequences_per_iteration)
        if rest:
            return None
        geometry = replace(geometry, accumulative_counts=iterations)
        # a loader draws a seed when it begins
        with kept_generators(), closing(loader_at(geometry, self.cursor)) as loader:
            return _start(next(iter(loader))).finish()


def losses(backend: Backend, update: Update) -> dict[str, float]:
    """The mean of each loss term over an update's targets, over all ranks; no gradients, no dropout. Collective."""
    sums = dict.fromkeys(sorted(update.counts), 0.0)
    with evaluating(backend):
        for micro_batch in update.micro_batches:
            for name, value in backend.model(micro_batch.batch.to(backend.device)).sums.items():
                sums[name] += float(value)
    totals = dict(zip(sums, dist.sum_floats(list(sums.values())), strict=True))
    return {name: total / update.counts[name] for name, total in totals.items() if update.counts[name]}
