"""The order of a streamed source: draw number -> pass, shard and position, without knowing how many records there are.

In: the number of shards, and a function that returns how many units (records, or pieces of them) a shard has, which is
asked only when the shard is reached. Out: for any draw number the unit drawn there. A pass is every unit once: the
shards in a random order, some at a time (a block), whose units are shuffled together. Both shuffles are keyed
bijections (``order.py``) of (seed, source, pass, block), so a position is (pass, block, position in the block), exact
whatever ran before; what a cursor keeps of it is where its block began.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from unigen_ds.core.errors import DataError
from unigen_ds.data.datasets.streamed import SPAN
from unigen_ds.data.order.order import permute, permute_many
from unigen_ds.system.seeding import derive_seed

Array = NDArray[np.int64]
Start = tuple[int, int, int]
"""Where a block begins: draws of the source before it, its pass, and its number in the pass."""


class ShardWalk:
    """The endless order of one source.

    Args:
        num_shards: of a pass.
        units: of a shard; it may take long, where the shard must be fetched.
        prepare: is called with shards that come next.
        mixed: shards of a block.
        seed: of the shuffles.
        source: its number.
        first_pass: number of the first pass.
    """

    def __init__(
        self,
        num_shards: int,
        units: Callable[[int], int],
        *,
        prepare: Callable[[Sequence[int]], None],
        mixed: int,
        seed: int,
        source: int,
        first_pass: int,
    ) -> None:
        self.num_shards, self._units, self._prepare, self.mixed = num_shards, units, prepare, mixed
        self._seed, self._source = seed, source
        self._starts: list[Start] = [(0, first_pass, 0)]

    @property
    def blocks(self) -> int:
        """Of a pass."""
        return -(-self.num_shards // self.mixed)

    def shards(self, pass_number: int, block: int) -> list[int]:
        """Of a block."""
        key = derive_seed(self._seed, "shards", self._source, pass_number)
        last = min((block + 1) * self.mixed, self.num_shards)
        return [permute(position, self.num_shards, key) for position in range(block * self.mixed, last)]

    def draws(self, numbers: Array) -> tuple[Array, Array]:
        """Of each draw number: the unit, as ``shard * SPAN + position``, and its pass."""
        units, passes = np.empty_like(numbers), np.empty_like(numbers)
        left = np.argsort(numbers, kind="stable")
        while left.size:
            (start, pass_number, block), sizes = self._block(int(numbers[left[0]]))
            stop = start + int(sizes.sum())
            inside = int(np.searchsorted(numbers[left], stop))
            here, left = left[:inside], left[inside:]
            key = derive_seed(self._seed, "block", self._source, pass_number, block)
            shuffled = permute_many(numbers[here] - start, stop - start, key)
            ends = np.cumsum(sizes)
            which = np.searchsorted(ends, shuffled, side="right")
            shards = np.asarray(self.shards(pass_number, block), dtype=np.int64)
            units[here] = shards[which] * SPAN + shuffled - (ends - sizes)[which]
            passes[here] = pass_number
        return units, passes

    def state(self, number: int) -> Start:
        """Where the block of a draw number begins, as far as it is known: that of a draw that follows known ones is."""
        return self._starts[self._before(number)]

    def remember(self, state: Start) -> bool:
        """Take over what ``state`` returned. False: it is not a state of this order."""
        start, pass_number, block = state
        first = self._starts[0]
        if start < 0 or not 0 <= block < self.blocks or pass_number < first[1]:
            return False
        at = self._before(start)
        if self._starts[at][0] == start:  # blocks without a unit begin at the same number as the next one
            self._starts[at] = max(self._starts[at], state)
        else:
            insort(self._starts, state)
        return True

    def _before(self, number: int) -> int:
        return bisect_right(self._starts, number, key=lambda start: start[0]) - 1

    def _block(self, number: int) -> tuple[Start, Array]:
        """The block that has a draw number, and the units of each of its shards."""
        at, empty = self._before(number), 0
        while True:
            start, pass_number, block = self._starts[at]
            following = (pass_number, block + 1) if block + 1 < self.blocks else (pass_number + 1, 0)
            self._prepare([*self.shards(pass_number, block), *self.shards(*following)])
            sizes = np.asarray([self._units(shard) for shard in self.shards(pass_number, block)], dtype=np.int64)
            stop = start + int(sizes.sum())
            if stop == start:
                self._starts[at], empty = (start, *following), empty + 1
                if empty > 2 * self.blocks:  # the end of a pass and the beginning of the next one may be empty
                    raise DataError(
                        f"none of {self.num_shards:,} shards has a record that can be used",
                        remedy="a larger seq_length, another overflow, or weaker filters",
                    )
                continue
            empty = 0
            if at + 1 == len(self._starts) or self._starts[at + 1][0] > stop:
                self._starts.insert(at + 1, (stop, *following))
            if number < stop:
                return (start, pass_number, block), sizes
            at = self._before(number)
