"""Packs the samples of one window into sequences of at most ``seq_length`` tokens and ``max_tiles`` encoded images.

Two limits at once is vector bin packing. Plain best-fit decreasing leaves the short samples for the end, where a
sequence of short samples reaches the image limit half empty (96.7 % full on long-tailed data). So the larger part of
the samples is first spread over as many sequences as the sums require: sequences and samples are sorted, and in each
round every sequence gets one sample, the emptiest the largest, in a few array operations. The smaller part then fills
the gaps by best fit: each sample goes to the fullest sequence that has space for it, a binary search among the tokens
left. About 7 ms a window of 8,192 samples on one core, 99.9 % full on long-tailed data.

Where groups of samples are mandatory, every sequence begins with a sample of each of them. A window that has too few
is not planned: the answer is how many it lacks, and the stream draws more of them (``stream.py``).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Annotated, Protocol

import numpy as np
from annotated_types import Ge

from unigen_ds.config.registry import PACKERS, checked
from unigen_ds.data.order.order import permute_many
from unigen_ds.data.samples.sample import Array

_SHARES = (0.55, 0.4, 0.7, 0.85, 0.2)
"""Shares of the samples that are spread before gaps are filled, tried until a plan is good enough."""
_GOOD = 500
"""A plan is good enough with one sequence in so many more than the sums require."""
_MOST_MISFITS = 64
"""Samples that do not fit the emptiest sequence while the others are spread, at most; then gaps are filled."""
_ID_BITS = 32


class Packer(Protocol):
    """Groups a window of samples into sequences, from lengths alone; with ``plan_with`` it knows mandatory groups."""

    window: int
    """Samples that are planned together."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever ``plan`` may return another plan."""

    def plan(self, lengths: Sequence[int], tiles: Sequence[int], seq_length: int, key: int) -> list[list[int]]:
        """Positions in the window, grouped into sequences; each position once. The order depends on ``key``."""


@PACKERS.register_module()
class BestFitPacking:
    """Packs the global order window by window: large samples are spread, small ones fill gaps by best fit.

    Args:
        window: samples planned together: larger packs tighter and mixes wider; a resume plans one window again.
        max_tiles: condition images (of vision tower or VAE) in one sequence at most; None: no limit.
    """

    @checked()
    def __init__(self, window: Annotated[int, Ge(1)] = 8192, max_tiles: Annotated[int, Ge(1)] | None = None) -> None:
        self.window, self.max_tiles = window, max_tiles

    @property
    def fingerprint(self) -> str:
        return f"FastPacking-1/{self.window}/{self.max_tiles}"  # the algorithm's name in files, whatever the class's

    def plan(self, lengths: Sequence[int], tiles: Sequence[int], seq_length: int, key: int) -> list[list[int]]:
        """As of ``Packer``. A longer sample counts as ``seq_length`` (it is truncated); one with more images than
        ``max_tiles`` gets no other sample with images beside it. Inside a sequence positions ascend.
        """
        samples = _Samples(lengths, tiles, seq_length, self.max_tiles)
        _, sequences = samples.best(samples.least, samples.least + samples.least // _GOOD)
        return _shuffle(sequences, key)

    def plan_with(
        self,
        lengths: Sequence[int],
        tiles: Sequence[int],
        seq_length: int,
        key: int,
        *,
        groups: Sequence[Sequence[int]],
    ) -> tuple[list[list[int]], list[int]]:
        """``plan`` with a sample of each of ``groups`` (positions in the window) in every sequence; or no plan, and how
        many samples more of each group it needs. One sample of each group must fit a sequence, and beside them any
        sample of none (``groups.check_mandatory``).
        """
        samples = _Samples(lengths, tiles, seq_length, self.max_tiles)
        members = [samples.largest_first(np.asarray(group, dtype=np.int64)) for group in groups]
        number = samples.least
        while True:
            missing = [max(number - len(group), 0) for group in members]
            if any(missing):
                return [], missing
            best, sequences = samples.best(number, number, [group[:number] for group in members])
            if best == number:
                return _shuffle(sequences, key), missing
            number = best


class _Samples:
    """The samples of a window, of ``seq_length`` tokens and ``max_tiles`` images at most; None: these do not count."""

    def __init__(self, lengths: Sequence[int], tiles: Sequence[int], seq_length: int, max_tiles: int | None) -> None:
        self.sizes = np.minimum(np.asarray(lengths, dtype=np.int64), seq_length)
        self.images = np.minimum(np.asarray(tiles, dtype=np.int64), max_tiles or 0)
        self.limit, self.seq_length = max_tiles or 1, seq_length
        self.limited = bool(self.images.any())
        by_images = math.ceil(int(self.images.sum()) / self.limit)
        self.least = max(math.ceil(int(self.sizes.sum()) / seq_length), by_images, 1)
        """Sequences that any plan has at least."""

    def best(self, number: int, enough: int, beginnings: Sequence[Array] = ()) -> tuple[int, Array]:
        """``pack`` with the share that needs the fewest sequences; the first that needs ``enough`` is good enough."""
        best, sequences = len(self.sizes) + 1, np.empty(0, dtype=np.int64)
        for share in _SHARES:
            total, attempt = self.pack(number, share, beginnings)
            if total < best:
                best, sequences = total, attempt
            if best <= enough:
                break
        return best, sequences

    def largest_first(self, samples: Array) -> Array:
        """Sorted by both measures together."""
        measure = self.sizes[samples] / self.seq_length
        if self.limited:
            measure += self.images[samples] / self.limit
        return samples[np.argsort(-measure, kind="stable")]

    def pack(self, number: int, share: float, beginnings: Sequence[Array] = ()) -> tuple[int, Array]:
        """``number`` sequences, and more where these do not suffice: how many, and [n] the sequence of each sample.
        ``share``: of the samples, that is spread first. ``beginnings``: samples, one for each sequence, that are in it.
        """
        sequences = np.full(len(self.sizes), -1, dtype=np.int64)
        tokens = np.full(number, self.seq_length, dtype=np.int64)
        images = np.full(number, self.limit, dtype=np.int64)
        for first in beginnings:
            self._put(first, np.argsort(-tokens, kind="stable"), sequences, tokens, images)
        order = self.largest_first(np.flatnonzero(sequences < 0))
        rest = self._spread(order, int(share * len(order)), sequences, tokens, images)
        return self._fill(rest, sequences, tokens, images), sequences

    def _put(self, samples: Array, into: Array, sequences: Array, tokens: Array, images: Array) -> None:
        sequences[samples] = into
        tokens[into] -= self.sizes[samples]
        images[into] -= self.images[samples]

    def _spread(self, order: Array, stop: int, sequences: Array, tokens: Array, images: Array) -> Array:
        """Give each of the first ``stop`` samples to one of the emptiest sequences; returns all that are left."""
        misfits: list[Array] = []
        waiting, rest = order[:stop], order[stop:]
        while len(waiting) and len(misfits) < _MOST_MISFITS:
            into = np.argsort(-tokens, kind="stable")[: len(waiting)]
            samples, waiting = waiting[: len(into)], waiting[len(into) :]
            fits = (self.sizes[samples] <= tokens[into]) & (self.images[samples] <= images[into])
            self._put(samples[fits], into[fits], sequences, tokens, images)
            others = samples[~fits]
            if len(others) == len(samples):
                misfits, others = [*misfits, others[:1]], others[1:]
            waiting = np.concatenate([others, waiting])
        return np.concatenate([*misfits, waiting, rest])

    def _fill(self, samples: Array, sequences: Array, tokens: Array, images: Array) -> int:
        """Give each sample to the fullest sequence that has space for it, or begin one; returns how many there are."""
        total, free_images = len(tokens), images.tolist()
        # tokens left and number of each sequence in one integer; those without images left in a list of their own
        keys = (tokens << _ID_BITS) | np.arange(total, dtype=np.int64)
        none = images == 0 if self.limited else np.zeros(total, dtype=bool)
        open_, text_only = np.sort(keys[~none]).tolist(), np.sort(keys[none]).tolist()
        mask, full = (1 << _ID_BITS) - 1, self.seq_length << _ID_BITS
        numbers: list[int] = []
        for size, count in zip(self.sizes[samples].tolist(), self.images[samples].tolist(), strict=True):
            least = size << _ID_BITS
            position, source = bisect_left(open_, least), open_
            if count:
                while position < len(open_) and free_images[open_[position] & mask] < count:
                    position += 1
            elif text_only:
                other = bisect_left(text_only, least)
                if other < len(text_only) and (position == len(open_) or text_only[other] < open_[position]):
                    position, source = other, text_only
            if position < len(source):
                key = source.pop(position)
            else:
                key, total = full | total, total + 1
                free_images.append(self.limit)
            number = key & mask
            free_images[number] -= count
            insort(text_only if self.limited and not free_images[number] else open_, key - least)
            numbers.append(number)
        sequences[samples] = numbers
        return total


def _shuffle(sequences: Array, key: int) -> list[list[int]]:
    """The samples of each sequence, in ascending order; the sequences in an order that depends on ``key``."""
    order = np.argsort(sequences, kind="stable")
    numbers = np.bincount(sequences)
    stops = np.cumsum(numbers[numbers > 0]).tolist()
    samples = order.tolist()
    groups = [samples[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
    shuffled = permute_many(np.arange(len(groups), dtype=np.int64), len(groups), key) if groups else ()
    return [groups[i] for i in shuffled]
