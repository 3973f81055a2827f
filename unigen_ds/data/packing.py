"""Lengths of one window of samples -> sequences of at most ``seq_length`` tokens and ``max_tiles`` encoded images.

Two limits at once is vector bin packing. Plain best-fit-decreasing leaves the short samples for the end, where a
sequence of short samples hits the image limit half empty (96.7 % on long-tailed data). So the larger half of the
samples is first spread over as many sequences as the sums demand (each to the emptiest), and the smaller half then
fills the gaps (each to the fullest that takes it): 99.8 % on the same data. O(n log seq_length): about 65 ms a
window of 8,192 samples.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from unigen_ds.core.errors import ConfigError
from unigen_ds.core.registry import PACKERS
from unigen_ds.data.order import permute_many

_SPREAD = (0.3, 0.5, 0.7)
"""Shares of the samples that are spread before gaps are filled; the plan with the fewest sequences is kept."""


@PACKERS.register_module()
class WindowPacking:
    """Packs the global order window by window.

    Args:
        window: samples planned together. A larger one packs tighter and mixes wider; a resume re-plans one window.
        max_tiles: condition images (of vision tower or VAE) in one sequence, at most; None: no limit.
    """

    def __init__(self, window: int = 8192, max_tiles: int | None = None) -> None:
        if window < 1 or (max_tiles is not None and max_tiles < 1):
            raise ConfigError(f"packing window {window}, max_tiles {max_tiles}", allowed="positive numbers")
        self.window, self.max_tiles = window, max_tiles

    @property
    def fingerprint(self) -> str:
        """Changes whenever ``plan`` may give another plan."""
        return f"WindowPacking-1/{self.window}/{self.max_tiles}"

    def plan(self, lengths: Sequence[int], tiles: Sequence[int], seq_length: int, key: int) -> list[list[int]]:
        """Positions in the window, grouped into sequences; each position once.

        A longer sample counts as ``seq_length`` (it is truncated); one with more images than ``max_tiles`` gets
        no other sample with images beside it. Inside a sequence positions ascend; the order of the sequences is
        shuffled with ``key``.
        """
        sizes = np.minimum(np.asarray(lengths, dtype=np.int64), seq_length).tolist()
        images = np.asarray(tiles, dtype=np.int64)
        limit = self.max_tiles
        if limit is None:
            limit, images = 1, np.zeros_like(images)
        counts = np.minimum(images, limit).tolist()
        # the largest first, by both measures together
        ranked = sorted(range(len(sizes)), key=lambda i: (-sizes[i] / seq_length - counts[i] / limit, i))
        plans = (_pack(sizes, counts, seq_length, limit, ranked, int(share * len(ranked))) for share in _SPREAD)
        groups = [sorted(group) for group in min(plans, key=len)]
        shuffled = permute_many(np.arange(len(groups), dtype=np.int64), len(groups), key) if groups else ()
        return [groups[i] for i in shuffled]


def _pack(
    sizes: list[int], counts: list[int], seq_length: int, limit: int, ranked: list[int], num_spread: int
) -> list[list[int]]:
    bound = max(math.ceil(sum(sizes) / seq_length), math.ceil(sum(counts) / limit))
    room = _Room(seq_length)
    groups: list[list[int]] = []
    for _ in range(bound):
        room.put(seq_length, limit, len(groups))
        groups.append([])
    for place, i in enumerate(ranked):
        size, count = sizes[i], counts[i]
        tokens = room.emptiest(size, count) if place < num_spread else room.fullest(size, count)
        if tokens < 0:
            tokens, left, group = seq_length, limit, len(groups)
            groups.append([])
        else:
            left, group = room.take(tokens)
        groups[group].append(i)
        room.put(tokens - size, left - count, group)
    return [group for group in groups if group]


class _Room:
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
