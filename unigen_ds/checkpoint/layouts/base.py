"""The base of every layout's reader: named flat pieces, each with a function that reads some of its elements."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unigen_ds.core.errors import CheckpointError

Fetch = Callable[[int, int], Tensor]
"""(start, stop) within the piece -> those elements, 1-D, on the CPU."""


@dataclass(frozen=True)
class Piece:
    """Elements ``start .. stop`` of a tensor, somewhere on disk."""

    start: int
    stop: int
    fetch: Fetch
    source: str = ""


class PieceReader:
    """A ``ShardReader`` over pieces. A layout only has to call ``add`` for each piece.

    ``unique``: the layout writes every element once, so an overlap means a mix of two checkpoints and is refused.
    """

    def __init__(self, *, unique: bool = False) -> None:
        self._unique = unique
        self._pieces: dict[tuple[str, str], list[Piece]] = defaultdict(list)
        self.shapes: dict[tuple[str, str], tuple[int, ...]] = {}
        """(kind, name) -> shape, in the order of the files, as far as the files themselves state it."""
        self.stamps: dict[str, Callable[[], str]] = {}
        """File -> what reads the name of the save that wrote it (``Manifest.stamp``), where the file has one."""
        self.tied: Mapping[str, str] = {}
        """Names of the model that share the tensor of another name, as far as the files themselves state it."""

    def add(
        self,
        kind: str,
        name: str,
        start: int,
        numel: int,
        fetch: Fetch,
        *,
        source: str = "",
        shape: Sequence[int] | None = None,
    ) -> None:
        """Add a piece. Replicas of a range may be added more than once, unless ``unique``; the first is read.

        Raises ``CheckpointError`` naming both sources of an overlap where there must be none.
        """
        if shape is not None:
            self.shapes.setdefault((kind, name), tuple(shape))
        if not numel:
            return
        pieces = self._pieces[kind, name]
        at = bisect_right(pieces, start, key=lambda piece: piece.start)
        for other in pieces[max(0, at - 1) : at + 1] if self._unique else ():  # without overlaps, only neighbours can
            if start < other.stop and other.start < start + numel:
                raise CheckpointError(f"{kind} of {name} is in {other.source} and, in part again, in {source}")
        pieces.insert(at, Piece(start, start + numel, fetch, source))

    def kinds(self) -> list[str]:
        return sorted({kind for kind, _ in self._pieces})

    def names(self, kind: str) -> list[str]:
        return sorted(name for k, name in self._pieces if k == kind)

    def numel(self, kind: str, name: str) -> int:
        return max(piece.stop for piece in self._found(kind, name))

    def _found(self, kind: str, name: str) -> list[Piece]:
        if (kind, name) not in self._pieces:
            raise CheckpointError(f"the checkpoint has no {kind} of {name}")
        return self._pieces[kind, name]

    def read(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        parts = list(self.parts(kind, name, start, stop))
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0)

    def parts(self, kind: str, name: str, start: int, stop: int) -> Iterator[Tensor]:
        """Yield the elements that ``read`` returns in the pieces that are on disk, without a copy into one tensor."""
        at = start
        for piece in self._found(kind, name):  # by their start
            if at >= stop or piece.start > at:
                break
            if piece.stop > at:
                end = min(stop, piece.stop)
                yield piece.fetch(at - piece.start, end - piece.start)
                at = end
        if at < stop:
            raise CheckpointError(f"the checkpoint has no elements {at}..{stop} of {kind} {name}")


def slices_of(tensor: Tensor, start: int = 0) -> Fetch:
    """Fetch from a (memory-mapped) flat tensor, beginning at ``start``."""
    flat = tensor.detach().view(-1)
    return lambda first, last: flat[start + first : start + last]
