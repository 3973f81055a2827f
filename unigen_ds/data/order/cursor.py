"""Where a run is in the order of its data, as a checkpoint keeps it: the position of the next sequence, and the phases
of the data.

Both are plain values with their form in a checkpoint; ``stream.py`` has what they mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from unigen_ds.core.errors import CheckpointError
from unigen_ds.data.order.order import GlobalOrder, Weight

_LISTS = {"extra", "drawn", "blocks"}
"""Of a cursor; left out of a checkpoint where they are empty."""


@dataclass(frozen=True)
class Cursor:
    """The position of the next sequence. The same on all ranks; independent of the geometry."""

    epoch: int = 0
    window: int = 0
    """Window of the epoch; 0 where nothing is packed."""
    row: int = 0
    """Sequence of the window (unpacked: of the epoch)."""
    sequences: int = 0
    """Sequences before it since the start of the run, over all epochs."""
    extra: tuple[int, ...] = field(default=(), repr=False)
    """Additional draws of each mandatory group before its window."""
    drawn: tuple[int, ...] = field(default=(), repr=False)
    """``Mixture.state`` at its window or row: only where the weights have a long period."""
    blocks: tuple[int, ...] = field(default=(), repr=False)
    """Of each streamed source where the block of its next draw begins, at the window or row: ``ShardWalk.state``."""

    def state_dict(self) -> dict[str, Any]:
        return {name: list(value) if name in _LISTS else value for name, value in asdict(self).items() if value != ()}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Cursor:
        names = {one.name for one in fields(cls)} - _LISTS
        if not names <= set(state):
            raise CheckpointError(f"a data cursor without {', '.join(sorted(names - set(state)))}")
        values: dict[str, Any] = {name: int(state[name]) for name in names}
        values |= {name: tuple(map(int, state[name])) for name in _LISTS & set(state)}
        return cls(**values)


@dataclass(frozen=True)
class Phase:
    """Epochs over the same data. A run has one phase until its data is changed; the last one has no end."""

    first_epoch: int
    first_pass: int
    """Pass number that every source begins the phase with: higher than any before, so no sample id comes twice."""
    first_sequence: int | None
    """Sequences of the run before it; None: only planning can count them (data appended in the middle of an epoch)."""
    sizes: tuple[int, ...]
    """Units of each source that are used: records, or pieces of them."""
    weights: tuple[Weight, ...] | None
    rows_per_epoch: int | None
    """Unpacked: rows of each of its epochs. Packed: None, they follow from the plan."""
    mandatory: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    """Numbers of the sources of each mandatory group."""

    def order(self, *, seed: int) -> GlobalOrder:
        """That of its epochs."""
        return GlobalOrder(
            self.sizes,
            self.weights,
            seed=seed,
            first_epoch=self.first_epoch,
            first_pass=self.first_pass,
            mandatory=self.mandatory,
            rows_per_epoch=self.rows_per_epoch,
        )

    def state_dict(self) -> dict[str, Any]:
        state = {**asdict(self), "sizes": list(self.sizes), "mandatory": [list(group) for group in self.mandatory]}
        state["weights"] = None if self.weights is None else list(self.weights)
        return {name: value for name, value in state.items() if name != "mandatory" or value}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Phase:
        names = {one.name for one in fields(cls)}
        state = {"mandatory": (), **state}
        if names != set(state):
            raise CheckpointError(
                f"a phase of the data with {', '.join(sorted(state))}", allowed=", ".join(sorted(names))
            )
        weights = None if state["weights"] is None else tuple(state["weights"])
        mandatory = tuple(map(tuple, state["mandatory"]))
        return cls(**{**state, "sizes": tuple(state["sizes"]), "weights": weights, "mandatory": mandatory})
