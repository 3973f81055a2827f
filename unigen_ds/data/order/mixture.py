"""Weights -> which source each draw is of: within one draw of the requested share at every position, without an end.

In: exact weights. Out: for any range of positions the source of each draw, and how many draws of it came before.
Position p counts over all epochs. After p draws source k was drawn x_k times, with ``|x_k - w_k p| <= 1 - 1/(2n - 2)``
for all k and p: Tijdeman's solution of the chairman assignment problem (Discrete Mathematics 32, 1980). Draw j of
source k may come from position ``(j + 1/(2n - 2)) / w_k`` on and must come before ``(j + 1 - 1/(2n - 2)) / w_k``; of
those that may come, the one that must come first is drawn.

The sequence repeats with the common denominator of the weights, its period, which may be long (weights in proportion to
the sizes of large sources). It is followed from the nearest position whose state is known, in about 1 microsecond a
draw; checkpoints store the one that a resume needs.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right, insort
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

_SIMPLE = 2**20
"""Denominators up to which a float is read as the fraction that it is the nearest float of: 1/3, not 0.333..."""
_ANCHORS = 1024
"""Draws between positions whose state is kept."""

Array = NDArray[np.int64]


def exact(weight: float | str | Fraction) -> Fraction:
    """The number that is meant: 0.35 is 7/20, and the float nearest to a third is 1/3."""
    if not isinstance(weight, float):
        return Fraction(weight)
    simple = Fraction(weight).limit_denominator(_SIMPLE)
    return simple if float(simple) == weight else Fraction(str(weight))


class Mixture:
    """The endless order of the sources. ``weights``: positive, relative."""

    def __init__(self, weights: Sequence[Fraction]) -> None:
        total = sum(weights, Fraction(0))
        shares = [weight / total for weight in weights]
        self.period = math.lcm(*(share.denominator for share in shares))
        self.parts = tuple(int(share * self.period) for share in shares)
        """Draws of each source in a period."""
        self._states: dict[int, tuple[int, ...]] = {0: (0,) * len(shares)}
        self._known = [0]

    def draws(self, start: int, stop: int) -> tuple[Array, Array]:
        """Of the positions ``start .. stop``: the source of each, and how many draws of it came before."""
        rounds, first = divmod(start, self.period)
        anchor = self._before(first)
        before = self._states[anchor]
        sources = np.asarray(self._follow(anchor, first + stop - start), dtype=np.int64)
        numbers = np.empty_like(sources)
        for source, (drawn, part) in enumerate(zip(before, self.parts, strict=True)):
            here = np.flatnonzero(sources == source)
            numbers[here] = rounds * part + drawn + np.arange(len(here))
        return sources[first - anchor :], numbers[first - anchor :]

    def counts(self, position: int) -> tuple[int, ...]:
        """Draws of each source before ``position``."""
        rounds, within = divmod(position, self.period)
        anchor = self._before(within)
        passed = np.asarray(self._follow(anchor, within), dtype=np.int64)
        drawn = np.bincount(passed, minlength=len(self.parts)).tolist()
        columns = zip(self.parts, self._states[anchor], drawn, strict=True)
        return tuple(rounds * part + before + number for part, before, number in columns)

    def state(self, position: int) -> tuple[int, ...]:
        """What ``remember`` needs to find ``position`` at once; empty where nothing is needed."""
        state = self._states[self._before(position % self.period)]
        return state if any(state) else ()

    def remember(self, position: int, state: Sequence[int]) -> bool:
        """Take over what ``state`` returned for ``position``. False: it is not a state of this mixture."""
        anchor = position % self.period
        anchor -= anchor % _ANCHORS
        near = (abs(n * self.period - part * anchor) <= self.period for n, part in zip(state, self.parts, strict=False))
        if len(state) != len(self.parts) or sum(state) != anchor or not all(near):
            return False
        self._keep(anchor, tuple(state))
        return True

    def _before(self, position: int) -> int:
        """The last position up to ``position``, a multiple of ``_ANCHORS``, now with a known state."""
        anchor = position - position % _ANCHORS
        known = self._known[bisect_right(self._known, anchor) - 1]
        for position in range(known, anchor, _ANCHORS):
            self._follow(position, position + _ANCHORS)
        return anchor

    def _follow(self, anchor: int, stop: int) -> list[int]:
        """The sources of the draws ``anchor .. stop``; the states on the way are kept."""
        found: list[int] = []
        while anchor < stop:
            number = min(_ANCHORS, stop - anchor)
            part = follow(self.parts, self._states[anchor], number, position=anchor)
            found += part
            if number == _ANCHORS:
                drawn = np.bincount(part, minlength=len(self.parts)).tolist()
                self._keep(anchor + number, tuple(map(sum, zip(self._states[anchor], drawn, strict=True))))
            anchor += number
        return found

    def _keep(self, position: int, state: tuple[int, ...]) -> None:
        if position not in self._states:
            insort(self._known, position)
        self._states[position] = state


def follow(parts: Sequence[int], counts: Sequence[int], number: int, *, position: int = 0) -> list[int]:
    """The sources of the next ``number`` draws after ``position``, where each was drawn ``counts`` times before."""
    period, others = sum(parts), max(2 * len(parts) - 2, 1)
    units = [others * part for part in parts]
    drawn, found = list(counts), []

    def first_step(k: int) -> int:  # at which the next draw of source k may be
        return -(-(drawn[k] * others + 1) * period // units[k])

    waiting = [(first_step(k), k) for k in range(len(parts))]
    heapq.heapify(waiting)
    ready: list[tuple[int, int]] = []
    for step in range(position + 1, position + number + 1):
        while waiting and waiting[0][0] <= step:
            _, k = heapq.heappop(waiting)
            deadline = ((drawn[k] + 1) * others - 1) * period // units[k]
            heapq.heappush(ready, (deadline, k))
        _, k = heapq.heappop(ready)
        found.append(k)
        drawn[k] += 1
        heapq.heappush(waiting, (first_step(k), k))
    return found
