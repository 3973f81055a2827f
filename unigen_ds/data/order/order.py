"""(seed, epoch, mixture weights) -> the global order of draws, without a list of indices.

In: the sizes of the sources. Out: for any range of positions of any epoch, the source and the record drawn there.
A shuffle is a keyed bijection (a Feistel network, applied again until the result is in the range), so a position is
looked up in O(1) memory and on its own. The trade-off: about 0.15 microseconds a position instead of one array read,
against 8 GB for a list of a billion indices.

In a weighted order the share of each source is right at every position, over all epochs (``mixture.py``). ``Cursor``
is where a run is in the order of its data, as a checkpoint keeps it (``stream.py`` has what it means).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, fields
from fractions import Fraction
from functools import cached_property
from itertools import cycle, islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from unigen_ds.core.errors import CheckpointError
from unigen_ds.core.json_values import json_values
from unigen_ds.data.order.mixture import Mixture, exact
from unigen_ds.data.samples.sample import Array
from unigen_ds.system.seeding import derive_seed

Weight = float | str
"""A number, or the text of an exact fraction."""
Columns = tuple[Array, Array, Array]
_EXTRA_PERIOD = 1024
"""Draws after which the additional draws of a mandatory group of several sources repeat."""
_ROUNDS = 8
_GOLDEN, _MIX_1, _MIX_2 = map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))  # splitmix64


def permute_many(indices: Array, size: int, key: int) -> Array:
    """The position of each index in the shuffle of ``range(size)`` keyed by the 64-bit ``key``: a bijection."""
    assert indices.size == 0 or (indices.min() >= 0 and indices.max() < size), size
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))  # the smallest even width: at most 4 x size
    low = np.uint64((1 << int(half)) - 1)
    keys = mix_many(np.uint64(key) + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * _GOLDEN)
    result = indices.astype(np.uint64)
    todo = np.arange(result.size)
    while todo.size:
        value = result[todo]
        left, right = value >> half, value & low
        for k in keys:
            left, right = right, left ^ (mix_many(right + k) & low)
        value = (left << half) | right
        result[todo] = value
        todo = todo[value >= np.uint64(size)]
    return result.astype(np.int64)


def mix_many(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 of each element: a bijection whose bits look random."""
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))


class Draw(NamedTuple):
    """One record, drawn. ``pass_number`` counts the earlier passes over the source."""

    source: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nothing here needs
    pass_number: int
    piece: int = -1
    """Which piece of a record that is split (``overflow.py``); -1: the record."""

    def __repr__(self) -> str:
        piece = f", piece={self.piece}" if self.piece >= 0 else ""
        return f"Draw(source={self.source}, index={self.index}, pass_number={self.pass_number}{piece})"

    def sample_id(self, names: Sequence[str]) -> str:
        """``source:index:pass``, of a piece ``...:piece``: of the ledger, and the key of all that is random in it."""
        piece = f":{self.piece}" if self.piece >= 0 else ""
        return f"{names[self.source]}:{self.index}:{self.pass_number}{piece}"


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """Integers in proportion to ``weights`` that add up to ``total`` (largest remainders), each at least one."""
    exact = [total * w / sum(weights) for w in weights]
    counts = [max(1, int(e)) for e in exact]
    by_remainder = sorted(range(len(exact)), key=lambda k: (int(exact[k]) - exact[k], k))
    for k in islice(cycle(by_remainder), max(0, total - sum(counts))):
        counts[k] += 1
    while sum(counts) > total:  # shares below one were raised to one: the largest is reduced
        counts[max(range(len(counts)), key=lambda k: counts[k])] -= 1
    return counts


def _tuples(value: Any) -> Any:
    return tuple(_tuples(one) for one in value) if isinstance(value, list | tuple) else value


class _State:
    """A dataclass that checkpoints keep as plain values, without empty lists: those may be missing."""

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in json_values(asdict(self)).items() if value != []}  # type: ignore[call-overload]

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], **others: Any) -> Self:
        """``others``: what the state does not have. Raises ``CheckpointError`` where more is missing."""
        names = {one.name for one in fields(cls)} - {*others}  # type: ignore[arg-type]
        if missing := sorted(names - {*state, "extra", "drawn", "blocks", "mandatory"}):
            raise CheckpointError(f"the position in the data is stored without {', '.join(missing)}")
        return cls(**{name: _tuples(value) for name, value in state.items() if name in names}, **others)


@dataclass
class GlobalOrder(_State):
    """An endless order over one or several sources; a pure function of (sizes, weights, seed). A run has one until its
    data is changed: then another one follows (a phase), and the last one has no end.

    Without weights every record comes once in each epoch. With weights (positive, relative) each source has an endless
    stream of passes over its records, of which the order draws the next one: a small source repeats only after all
    its records were drawn, and a large one continues in the next epoch where it stopped. Of a mandatory group
    (``stream.py``) ``extra`` draws were added before a position, so its sources are further ahead in their passes.
    """

    sizes: Sequence[int]
    """Units of each source: records, or pieces of them."""
    weights: Sequence[Weight] | None = None
    """Weight of each source; None: every record is used once an epoch."""
    _: KW_ONLY
    seed: int
    first_epoch: int = 0
    first_pass: int = 0
    """Pass number that every source begins with: higher than any before, so no sample id comes twice."""
    first_sequence: int | None = 0
    """Sequences of the run before it; None: only planning can count them (data appended in the middle of an epoch)."""
    rows_per_epoch: int | None = None
    """Unpacked: rows of each of its epochs, in whole iterations. Fewer than there are samples leave out the last ones
    of an epoch; a weighted order draws them in the next one. Packed: None, they follow from the plan."""
    mandatory: Sequence[Sequence[int]] = ()
    """Numbers of the sources of each mandatory group."""

    def __post_init__(self) -> None:
        assert self.sizes and min(self.sizes) > 0, f"no source is empty: {self.sizes}"  # check_overflow
        assert self.weights is None or len(self.weights) == len(self.sizes), (self.weights, self.sizes)
        assert not self.mandatory or self.weights is not None, "mandatory groups have weights"
        self.walks: dict[int, Any] = {}
        """The order (``ShardWalk``) of the records of each streamed source."""
        self.sizes = tuple(int(size) for size in self.sizes)
        self.epoch_size = self.stride = sum(self.sizes)
        self.counts = self.sizes
        """Draws of each source in an epoch; with weights that of some epochs is one more or one less."""
        if self.weights is not None:
            self.weights = tuple(w if isinstance(w, str) else float(w) for w in self.weights)
            self.stride = min(self.epoch_size, self.rows_per_epoch or self.epoch_size)
            """Draws of an epoch that are made: the next epoch of a weighted order begins after them."""
            self.counts = tuple(shares(self.epoch_size, [float(exact(w)) for w in self.weights]))

    def state_dict(self) -> dict[str, Any]:
        """Without the seed, which a run has once."""
        return {name: value for name, value in super().state_dict().items() if name != "seed"}

    @cached_property
    def mixture(self) -> Mixture | None:
        """Which source each draw is of; None: that is part of each epoch's shuffle."""
        return None if self.weights is None else Mixture([exact(weight) for weight in self.weights])

    @cached_property
    def _extra(self) -> tuple[Mixture, ...]:
        """Which source of a mandatory group each of its additional draws is of."""
        assert self.weights is not None or not self.mandatory
        weights = [float(exact(weight)) for weight in self.weights or ()]
        of_groups = [[weights[k] for k in group] for group in self.mandatory]
        parts = [shares(max(_EXTRA_PERIOD, len(group)), group) for group in of_groups]
        return tuple(Mixture([Fraction(part) for part in group]) for group in parts)

    def passes_before(self, epoch: int, *, extra: int = 0) -> int:
        """A pass that no draw before ``epoch`` has reached, with ``extra`` additional ones of any mandatory group."""
        epochs = epoch - self.first_epoch
        draws = [epochs * count for count in self.counts]
        if self.mixture is not None:
            positions, period = epochs * self.stride, self.mixture.period
            draws = [positions * part // period + bool(epochs) + extra for part in self.mixture.parts]
        return self.first_pass + max(-(-number // size) for number, size in zip(draws, self.sizes, strict=True))

    def draws(self, epoch: int, start: int, stop: int) -> list[Draw]:
        columns = self.columns(epoch, start, stop)
        return [Draw(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]

    def columns(self, epoch: int, start: int, stop: int, *, extra: Sequence[int] = ()) -> Columns:
        """``draws`` as three arrays: source, index, pass_number. ``extra``: additional draws of each group before."""
        assert epoch >= self.first_epoch, (epoch, self.first_epoch)
        assert 0 <= start <= stop <= self.epoch_size, (start, stop, self.epoch_size)
        if self.mixture is not None:
            first = self.position(epoch, 0)
            sources, numbers = self.mixture.draws(first + start, first + stop)
            return self._draw(sources, numbers + self.ahead(extra)[sources])
        positions = np.arange(start, stop, dtype=np.int64)
        shuffled = permute_many(positions, self.epoch_size, derive_seed(self.seed, "epoch", epoch))
        counts = np.asarray(self.counts, dtype=np.int64)
        bounds = np.cumsum(counts)
        sources = np.searchsorted(bounds, shuffled, side="right")
        before = (epoch - self.first_epoch) * counts[sources]
        return self._draw(sources, before + shuffled - (bounds - counts)[sources])

    def additional(self, epoch: int, stop: int, group: int, number: int, *, extra: Sequence[int]) -> Columns:
        """The next ``number`` draws of a mandatory group, in addition to all up to position ``stop`` of ``epoch``."""
        assert self.mixture is not None
        members, numbers = self._extra[group].draws(extra[group], extra[group] + number)
        sources = np.asarray(self.mandatory[group], dtype=np.int64)[members]
        counts = np.asarray(self.mixture.counts(self.position(epoch, stop)), dtype=np.int64)
        return self._draw(sources, numbers + counts[sources])

    def position(self, epoch: int, offset: int) -> int:
        """The number of draws of the order, additional ones left out, before an offset of an epoch."""
        return (epoch - self.first_epoch) * self.stride + offset

    def ahead(self, extra: Sequence[int]) -> Array:
        """Additional draws of each source [sources], where ``extra`` were drawn of each group."""
        ahead = np.zeros(len(self.sizes), dtype=np.int64)
        for group, mixture, number in zip(self.mandatory, self._extra, extra, strict=False):
            ahead[list(group)] = mixture.counts(number)
        return ahead

    def _draw(self, sources: Array, numbers: Array) -> Columns:
        """Source, index and pass of draw ``numbers`` of ``sources``."""
        records, passes = np.empty_like(numbers), np.empty_like(numbers)
        for k in np.unique(sources).tolist():
            here = np.flatnonzero(sources == k)
            if k in self.walks:
                records[here], passes[here] = self.walks[k].draws(numbers[here])
                continue
            rounds, offsets = np.divmod(numbers[here], self.sizes[k])
            passes[here] = self.first_pass + rounds
            for number in np.unique(rounds).tolist():
                of_pass = rounds == number
                key = derive_seed(self.seed, "source", k, self.first_pass + number)
                records[here[of_pass]] = permute_many(offsets[of_pass], self.sizes[k], key)
        return sources, records, passes


@dataclass(frozen=True)
class Cursor(_State):
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
    """``Mixture.state`` at its window or row: only of weights with a period of more than 1,024 draws."""
    blocks: tuple[int, ...] = field(default=(), repr=False)
    """Where the block of each streamed source's next draw begins, at the window or row: ``ShardWalk.state``."""
