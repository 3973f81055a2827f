"""The data of the last update, used once more: from memory right after it, read again after a resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from unigen_ds.backends.base import Backend
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.core.progress import Geometry
from unigen_ds.data.batches.loader import UpdateLoader
from unigen_ds.data.order.order import Cursor
from unigen_ds.evaluation.validation import evaluating
from unigen_ds.runner.loop.updates import Update, counted_alone
from unigen_ds.system import dist
from unigen_ds.system.seeding import rng_state, set_rng_state


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
    def stored(cls, manifest: Manifest | None, cursor: Cursor) -> LastUpdate:
        """That of a checkpoint; empty where it has none, or where the run continues at another position of the data."""
        state = manifest.loader.get("last") if manifest else None
        if state is None or cursor.state_dict() != manifest.loader["cursor"]:  # type: ignore[union-attr]
            return cls()
        return cls(Cursor.from_state_dict(state["cursor"]), int(state["sequences"]))

    def without_data(self) -> LastUpdate:
        """The same without its data, whose memory is freed."""
        return replace(self, update=None)

    def read(self, geometry: Geometry, loader_at: Callable[[Geometry, Cursor], UpdateLoader]) -> Update | None:
        """Its data, under any geometry that splits it into whole iterations. Draws no random number. Collective."""
        if self.update is not None or self.cursor is None:
            return self.update
        iterations, rest = divmod(self.sequences, geometry.sequences_per_iteration)
        if rest:
            return None
        kept = rng_state()  # a loader draws a seed when it begins
        loader = loader_at(Geometry(geometry.batch_size, iterations, geometry.dp_size), self.cursor)
        try:
            return counted_alone(next(iter(loader)))
        finally:
            loader.close()
            set_rng_state(kept)


def losses(backend: Backend, update: Update) -> dict[str, float]:
    """The mean of each loss term over an update's targets, over all ranks; no gradients, no dropout. Collective."""
    sums = dict.fromkeys(sorted(update.counts), 0.0)
    with evaluating(backend):
        for micro_batch in update.micro_batches:
            for name, value in backend.model(micro_batch.batch.to(backend.device)).sums.items():
                sums[name] += float(value)
    totals = dict(zip(sums, dist.sum_floats(list(sums.values())), strict=True))
    return {name: total / update.counts[name] for name, total in totals.items() if update.counts[name]}
