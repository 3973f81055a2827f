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
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from operator import itemgetter

import numpy as np

from unigen_ds.data.samples.sample import Array

_SIMPLE = 2**20
"""Denominators up to which a float is read as the fraction that it is the nearest float of: 1/3, not 0.333..."""
_ANCHORS = 1024
"""Draws between positions whose state is kept."""

State = tuple[int, tuple[int, ...]]
"""A position, and how many draws of each source came before it."""


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
        self._states: list[State] = [(0, (0,) * len(shares))]
        """Those that are known."""

    def draws(self, start: int, stop: int) -> tuple[Array, Array]:
        """Return the source of each position of ``start .. stop``, and how many draws of that source came before."""
        rounds, first = divmod(start, self.period)
        anchor, before = self._before(first)
        number = first + stop - start - anchor
        sources = np.asarray(follow(self.parts, before, number, position=anchor), dtype=np.int64)
        numbers = np.empty_like(sources)
        for source, (count, part) in enumerate(zip(before, self.parts, strict=True)):
            here = np.flatnonzero(sources == source)
            numbers[here] = rounds * part + count + np.arange(len(here))
        return sources[first - anchor :], numbers[first - anchor :]

    def counts(self, position: int) -> tuple[int, ...]:
        """Draws of each source before ``position``."""
        rounds, within = divmod(position, self.period)
        state = self._before(within)
        _, draws = self._after(state, within - state[0])
        return tuple(rounds * part + number for part, number in zip(self.parts, draws, strict=True))

    def state(self, position: int) -> tuple[int, ...]:
        """What ``remember`` needs to find ``position`` at once; empty where nothing is needed."""
        _, draws = self._before(position % self.period)
        return draws if any(draws) else ()

    def remember(self, position: int, state: Sequence[int]) -> bool:
        """Take over what ``state`` returned for ``position``. False: it is not a state of this mixture."""
        anchor = position % self.period
        anchor -= anchor % _ANCHORS
        near = (abs(n * self.period - part * anchor) <= self.period for n, part in zip(state, self.parts, strict=False))
        if len(state) != len(self.parts) or sum(state) != anchor or not all(near):
            return False
        self._states = sorted([*(one for one in self._states if one[0] != anchor), (anchor, tuple(state))])
        return True

    def _before(self, position: int) -> State:
        """The state at the last multiple of ``_ANCHORS`` up to ``position``; those on the way to it are kept."""
        anchor = position - position % _ANCHORS
        at = bisect_right(self._states, anchor, key=itemgetter(0))
        while (state := self._states[at - 1])[0] < anchor:
            self._states.insert(at, self._after(state, _ANCHORS))
            at += 1
        return state

    def _after(self, state: State, number: int) -> State:
        """The state ``number`` draws later."""
        sources = np.asarray(follow(self.parts, state[1], number, position=state[0]), dtype=np.int64)
        draws = np.bincount(sources, minlength=len(self.parts)).tolist()
        return state[0] + number, tuple(map(sum, zip(state[1], draws, strict=True)))


def follow(parts: Sequence[int], counts: Sequence[int], number: int, *, position: int = 0) -> list[int]:
    """The sources of the next ``number`` draws after ``position``, where each was drawn ``counts`` times before."""
    period, others = sum(parts), max(2 * len(parts) - 2, 1)
    units = [others * part for part in parts]
    draws, sources = list(counts), []

    def first_step(k: int) -> int:  # at which the next draw of source k may be
        return -(-(draws[k] * others + 1) * period // units[k])

    waiting = [(first_step(k), k) for k in range(len(parts))]
    heapq.heapify(waiting)
    ready: list[tuple[int, int]] = []
    for step in range(position + 1, position + number + 1):
        while waiting and waiting[0][0] <= step:
            _, k = heapq.heappop(waiting)
            deadline = ((draws[k] + 1) * others - 1) * period // units[k]
            heapq.heappush(ready, (deadline, k))
        _, k = heapq.heappop(ready)
        sources.append(k)
        draws[k] += 1
        heapq.heappush(waiting, (first_step(k), k))
    return sources
