"""Lengths of one window of samples -> sequences of at most ``seq_length`` tokens and ``max_tiles`` encoded images.

Two limits at once is vector bin packing. Plain best-fit-decreasing leaves the short samples for the end, where a
sequence of short samples hits the image limit half empty (96.7 % on long-tailed data). So the larger half of the
samples is first spread over as many sequences as the sums require (each to the emptiest), and the smaller half then
fills the gaps (each to the fullest that has space for it): 99.8 % on the same data. O(n log seq_length): about 65 ms a
window of 8,192 samples.

How many sequences a window needs is counted without planning it where no image limits it: which of two sequences with
equal space gets a sample then does not matter, so samples of one length are packed together (1 to 10 ms a window).
"""

from __future__ import annotations

import heapq
import math
import multiprocessing
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge
from numpy.typing import NDArray

from unigen_ds.core.cores import num_cores
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.registry import PACKERS, checked
from unigen_ds.data.order import permute_many

_SPREAD = (0.3, 0.5, 0.7)
"""Shares of the samples that are spread before gaps are filled; the plan with the fewest sequences is kept."""


_PARALLEL = 64
"""Windows with images under a limit, from which on several processes count them."""


def check_packer(packer: Any) -> None:
    """Raise ``ConfigError`` where a user's own packer lacks something; an instance may have it and its class not."""
    missing = [name for name in ("plan", "window", "fingerprint") if not hasattr(packer, name)]
    if missing:
        raise ConfigError(
            f"train_dataloader.packing: {type(packer).__name__} has no {', '.join(missing)}",
            allowed="plan(lengths, tiles, seq_length, key); window, the number of samples that are planned together;"
            " fingerprint, a text that changes whenever the plan may change",
            remedy="as WindowPacking has them in unigen_ds/data/packing.py",
        )


@PACKERS.register_module()
class WindowPacking:
    """Packs the global order window by window.

    Args:
        window: samples planned together: larger packs tighter and mixes wider; a resume plans one window again.
        max_tiles: condition images (of vision tower or VAE) in one sequence at most; None: no limit.
    """

    @checked()
    def __init__(self, window: Annotated[int, Ge(1)] = 8192, max_tiles: Annotated[int, Ge(1)] | None = None) -> None:
        self.window, self.max_tiles = window, max_tiles

    @property
    def fingerprint(self) -> str:
        """Changes whenever ``plan`` may return another plan."""
        return f"WindowPacking-1/{self.window}/{self.max_tiles}"

    def plan(self, lengths: Sequence[int], tiles: Sequence[int], seq_length: int, key: int) -> list[list[int]]:
        """Positions in the window, grouped into sequences; each position once.

        A longer sample counts as ``seq_length`` (it is truncated); one with more images than ``max_tiles`` gets
        no other sample with images beside it. Inside a sequence positions ascend; the order of the sequences is
        shuffled with ``key``.
        """
        groups = [sorted(group) for group in self._groups(*self._clipped(lengths, tiles, seq_length), seq_length)]
        shuffled = permute_many(np.arange(len(groups), dtype=np.int64), len(groups), key) if groups else ()
        return [groups[i] for i in shuffled]

    def count(self, lengths: Sequence[int], tiles: Sequence[int], seq_length: int) -> int:
        """The number of sequences that ``plan`` returns."""
        sizes, images, limit = self._clipped(lengths, tiles, seq_length)
        if images.any():
            return len(self._groups(sizes, images, limit, seq_length))
        lower = math.ceil(int(sizes.sum()) / seq_length)
        found = len(sizes)
        for share in _SPREAD:
            found = min(found, _count(sizes, seq_length, lower, int(share * len(sizes))))
            if found == lower:
                break
        return found

    def counts(self, windows: Sequence[tuple[Any, Any]], seq_length: int) -> list[int]:
        """``count`` of each window's (lengths, tiles); in several processes where planning would take long."""
        slow = sum(self.max_tiles is not None and bool(np.any(tiles)) for _, tiles in windows)
        workers = min(num_cores(), 16)
        if slow < _PARALLEL or workers == 1:
            return [self.count(lengths, tiles, seq_length) for lengths, tiles in windows]
        return count_in_processes(self.count, windows, seq_length, workers)

    def _clipped(
        self, lengths: Sequence[int], tiles: Sequence[int], seq_length: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """Tokens and images of each sample, as they count against the limits, and the limit of images."""
        return clipped(lengths, tiles, seq_length, self.max_tiles)

    def _groups(
        self, sizes: NDArray[np.int64], images: NDArray[np.int64], limit: int, seq_length: int
    ) -> list[list[int]]:
        """The first of the plans with the fewest sequences."""
        # the largest first, by both measures together
        ranked = np.argsort(-sizes / seq_length - images / limit, kind="stable").tolist()
        lengths, counts = sizes.tolist(), images.tolist()
        lower = max(math.ceil(sum(lengths) / seq_length), math.ceil(sum(counts) / limit))
        best: list[list[int]] | None = None
        for share in _SPREAD:
            groups = _pack(lengths, counts, seq_length, limit, ranked, int(share * len(ranked)), lower)
            if best is None or len(groups) < len(best):
                best = groups
            if len(best) == lower:  # none has fewer
                break
        assert best is not None
        return best


def clipped(
    lengths: Sequence[int], tiles: Sequence[int], seq_length: int, max_tiles: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Tokens and images of each sample, as they count against the limits, and the limit of images."""
    sizes = np.minimum(np.asarray(lengths, dtype=np.int64), seq_length)
    images = np.asarray(tiles, dtype=np.int64)
    if max_tiles is None:
        return sizes, np.zeros_like(images), 1
    return sizes, np.minimum(images, max_tiles), max_tiles


def count_in_processes(
    count: Callable[..., int], windows: Sequence[tuple[Any, Any]], seq_length: int, workers: int
) -> list[int]:
    """``count`` of each window's (lengths, tiles)."""
    # spawn: as the index; each process counts chunks of windows
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        columns = zip(*windows, strict=True)
        return list(pool.map(count, *columns, repeat(seq_length), chunksize=8))


def _pack(
    sizes: list[int],
    counts: list[int],
    seq_length: int,
    limit: int,
    ranked: list[int],
    num_spread: int,
    bound: int,
) -> list[list[int]]:
    """One plan. ``bound``: sequences to begin with, which no plan can have fewer of."""
    open_sequences = _OpenSequences(seq_length)
    groups: list[list[int]] = []
    for _ in range(bound):
        open_sequences.put(seq_length, limit, len(groups))
        groups.append([])
    for rank, i in enumerate(ranked):
        size, count = sizes[i], counts[i]
        find = open_sequences.emptiest if rank < num_spread else open_sequences.fullest
        tokens = find(size, count)
        if tokens < 0:
            tokens, left, group = seq_length, limit, len(groups)
            groups.append([])
        else:
            left, group = open_sequences.take(tokens)
        groups[group].append(i)
        open_sequences.put(tokens - size, left - count, group)
    return [group for group in groups if group]


def _count(sizes: NDArray[np.int64], seq_length: int, bound: int, num_spread: int) -> int:
    """``len(_pack(...))`` of samples without images: of the open sequences only the tokens left are kept."""
    values, numbers = np.unique(sizes, return_counts=True)
    open_ = _Levels(seq_length, bound)
    for size, number in zip(values[::-1].tolist(), numbers[::-1].tolist(), strict=True):
        spread = min(number, num_spread)
        num_spread -= spread
        if size == 0:
            open_.total = max(open_.total, 1)
            continue
        open_.spread(size, spread)
        open_.fill(size, number - spread)
    return open_.total


class _Levels:
    """How many open sequences have so many tokens left."""

    def __init__(self, seq_length: int, number: int) -> None:
        self._width, self._numbers, self._levels = seq_length, {seq_length: number}, [seq_length] * bool(number)
        self.total = number
        """Sequences: those to begin with, which hold a sample in the end, and those opened since."""

    def spread(self, size: int, number: int) -> None:
        """Put samples of one size each to the emptiest sequence."""
        while number:
            if not self._levels or self._levels[-1] < size:
                self._move(None, self._width, 1)
            level = self._levels[-1]
            moved = min(self._numbers[level], number)
            self._move(level, level - size, moved)
            number -= moved

    def fill(self, size: int, number: int) -> None:
        """Put samples of one size each to the fullest sequence that accepts it."""
        while number:
            index = bisect_left(self._levels, size)
            if index == len(self._levels):
                self._move(None, self._width, 1)
            level = self._levels[index]
            each = min(number, level // size)  # after the first one it is still the fullest that accepts more
            moved = min(self._numbers[level], number // each)
            self._move(level, level - each * size, moved)
            number -= each * moved

    def _move(self, level: int | None, to: int, number: int) -> None:
        """``number`` sequences from one level (None: new ones) to another."""
        if level is None:
            self.total += number
        else:
            self._numbers[level] -= number
            if not self._numbers[level]:
                del self._numbers[level]
                del self._levels[bisect_left(self._levels, level)]
        if to not in self._numbers:
            self._numbers[to] = 0
            insort(self._levels, to)
        self._numbers[to] += number


class _OpenSequences:
    """Open sequences by tokens left. A segment tree over 0 .. seq_length holds the most images left at each."""

    def __init__(self, seq_length: int) -> None:
        self._width = 1 << seq_length.bit_length()
        self._tree = [-1] * (2 * self._width)
        self._heaps: dict[int, list[tuple[int, int]]] = {}

    def put(self, tokens: int, images: int, group: int) -> None:
        heapq.heappush(self._heaps.setdefault(tokens, []), (-images, group))
        self._update(tokens)

    def take(self, tokens: int) -> tuple[int, int]:
        """Remove and return (images left, group): of those with so many tokens left the one with most images left."""
        images, group = heapq.heappop(self._heaps[tokens])
        self._update(tokens)
        return -images, group

    def _update(self, tokens: int) -> None:
        tree, heap = self._tree, self._heaps[tokens]
        node = tokens + self._width
        tree[node] = -heap[0][0] if heap else -1
        node //= 2
        while node:
            best = max(tree[2 * node], tree[2 * node + 1])
            if tree[node] == best:
                return
            tree[node] = best
            node //= 2

    def fullest(self, tokens: int, images: int) -> int:
        """The fewest tokens left that suffice, with images left that suffice too; -1: nowhere."""
        tree, node = self._tree, tokens + self._width
        if tree[node] >= images:
            return tokens
        while node > 1:
            if not node & 1 and tree[node + 1] >= images:
                node += 1
                while node < self._width:
                    node *= 2
                    if tree[node] < images:
                        node += 1
                return node - self._width
            node //= 2
        return -1

    def emptiest(self, tokens: int, images: int) -> int:
        """The most tokens left, with images left that suffice; -1: nowhere."""
        tree, node = self._tree, 1
        if tree[1] < images:
            return -1
        while node < self._width:
            node = 2 * node + 1
            if tree[node] < images:
                node -= 1
        found = node - self._width
        return found if found >= tokens else -1
