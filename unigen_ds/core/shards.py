"""Named tensors: flat ranges of them, what a model has by name, and the one comparison of stored ones with a model's.

ZeRO-1/2 may split a tensor anywhere and FSDP2's ``Shard(0)`` is one flat range, so one type (``Shard``) serves every
engine. On disk a shard is one safetensors entry ``kind|name|flat_start`` (``shard_key``), 1-D. All that loads tensors
differs in what it allows, not in how it compares (``misfit``) or names what differs.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from unigen_ds.core.errors import CheckpointError

Shape = tuple[int, ...]
_T = TypeVar("_T")
_MOST_NAMES = 8
_ALIGNMENT = 16
"""Elements, of fp32 64 bytes: where each tensor begins in a buffer."""

MASTER, BUFFER, EMA, STEP, LOSS_SCALE = "master", "buffer", "ema", "step", "loss_scale"
EXP_AVG, EXP_AVG_SQ = "exp_avg", "exp_avg_sq"
"""Kinds of state; every kind but the first five is an optimizer's own name for a moment. ``master``: every parameter,
frozen ones too. ``step``: one element per parameter. ``loss_scale``: one entry, scale and number of good updates."""

OPTIMIZER_FILE = "optimizer.safetensors"
"""File of the layout ``safetensors`` with all state of the engine but the weights."""


@dataclass(frozen=True)
class Shard:
    """The elements ``flat_start .. flat_start + data.numel()`` of the tensor ``name``, flattened row-major."""

    name: str
    shape: tuple[int, ...]
    flat_start: int
    data: Tensor
    """1-D fp32 view of the engine's own memory: writing to it changes the master weight."""
    primary: bool = True
    """The one replica that is written, so that each element is written exactly once."""

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def flat_stop(self) -> int:
        return self.flat_start + self.data.numel()


def shard_key(kind: str, name: str, flat_start: int) -> str:
    return f"{kind}|{name}|{flat_start}"


def parse_shard_key(key: str) -> tuple[str, str, int]:
    """``(kind, name, flat_start)`` of a key made by ``shard_key``."""
    kind, name, start = key.split("|")
    return kind, name, int(start)


def copies_in_one_buffer(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A copy of each tensor (of one dtype, on one device), as views of one buffer, which an asynchronous save copies in
    one piece.
    """
    sizes = [-(-tensor.numel() // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    parts = tensors[0].new_empty(sum(sizes)).split(sizes) if tensors else ()
    pairs = zip(tensors, parts, strict=True)
    return [part[: tensor.numel()].view(tensor.shape).copy_(tensor) for tensor, part in pairs]


Fetch = Callable[[int, int], Tensor]
"""(start, stop) within the piece -> those elements, 1-D, on the CPU."""


class Piece(NamedTuple):
    """Elements ``start .. stop`` of a tensor, somewhere on disk."""

    start: int
    stop: int
    fetch: Fetch
    source: str = ""


class Pieces(NamedTuple):
    """The pieces of a tensor that many files share: each is made when it is read."""

    spans: Sequence[tuple[int, int]]
    """Start and stop, in order; they may be equal."""
    fetch: Callable[[int], Fetch]
    """Of a piece by its number."""

    def starting_at(self, start: int) -> Iterator[Piece]:
        """Yield the piece with the element ``start``, and those after it."""
        for number in range(max(0, bisect_right(self.spans, (start, math.inf)) - 1), len(self.spans)):
            yield Piece(*self.spans[number], self.fetch(number))


class ShardReader:
    """Reads named flat ranges of a checkpoint of any layout, which only has to call ``add``. No collective. ``unique``:
    the layout writes every element once, so an overlap means a mix of two checkpoints and is refused.
    """

    def __init__(self, *, unique: bool = False) -> None:
        self._unique = unique
        self._pieces: dict[tuple[str, str], list[Piece] | Pieces] = defaultdict(list)
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
        """Add a piece; of replicas of a range the first is read, and with ``unique`` they raise ``CheckpointError``."""
        if shape is not None:
            self.shapes.setdefault((kind, name), tuple(shape))
        if not numel:
            return
        pieces = self._pieces[kind, name]
        assert isinstance(pieces, list), name
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
        """Elements of the whole tensor. Raises ``CheckpointError`` when it is absent."""
        pieces = self._pieces_of(kind, name)
        return max(stop for _, stop in pieces.spans) if isinstance(pieces, Pieces) else max(p.stop for p in pieces)

    def _pieces_of(self, kind: str, name: str) -> list[Piece] | Pieces:
        if (kind, name) not in self._pieces:
            raise CheckpointError(f"the checkpoint has no {kind} of {name}")
        return self._pieces[kind, name]

    def read(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        """Elements ``start .. stop`` as a 1-D CPU tensor in the stored dtype; reads only these bytes."""
        parts = list(self.parts(kind, name, start, stop))
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0)

    def parts(self, kind: str, name: str, start: int, stop: int) -> Iterator[Tensor]:
        """Yield the elements that ``read`` returns in the pieces that are on disk, without a copy into one tensor."""
        at, pieces = start, self._pieces_of(kind, name)
        for piece in pieces.starting_at(start) if isinstance(pieces, Pieces) else pieces:  # by their start
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


def read_flat(file: Any, key: str, shape: Shape, start: int, stop: int) -> Tensor:
    """Elements of an entry of an open safetensors file: whole rows of the first dimension are read, then sliced."""
    if not shape:
        return file.get_tensor(key).reshape(-1)[start:stop]
    row = max(1, math.prod(shape[1:]))
    first, last = start // row, -(-stop // row)
    return file.get_slice(key)[first:last].reshape(-1)[start - first * row : stop - first * row]


# What a model has, and which stored tensors fit it.


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further names of parameters that modules share -> the first name, under which they are kept."""
    first: dict[int, str] = {}
    everywhere = list(model.named_parameters(remove_duplicate=False))
    for name, parameter in everywhere:
        first.setdefault(id(parameter), name)
    return {name: first[id(p)] for name, p in everywhere if first[id(p)] != name}


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a ``state_dict`` has; no hook of an engine is called."""
    persistent = {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in model.named_modules()
        for name in part._buffers
        if name not in part._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in model.named_buffers() if name in persistent}


@dataclass
class Misfit:
    """What differs between stored tensors and a model; empty (False) where all fit."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    reshaped: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)
    """Name -> (stored shape, the model's)."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.reshaped)

    def __str__(self) -> str:
        shapes = [f"{name} {was} for {now}" for name, (was, now) in self.reshaped.items()]
        kinds = {"missing": self.missing, "unexpected": self.unexpected, "reshaped": shapes}
        return "; ".join(f"{kind}: {first_names(names)}" for kind, names in kinds.items() if names)


def misfit(theirs: Mapping[str, Shape], own: Mapping[str, Shape]) -> Misfit:
    """Compare by name. Where only numbers of elements are known, the shape is ``(numel,)`` on both sides."""
    return Misfit(
        missing=[name for name in own if name not in theirs],
        unexpected=[name for name in theirs if name not in own],
        reshaped={n: (theirs[n], own[n]) for n in own if n in theirs and theirs[n] != own[n]},
    )


def refuse_misfit(where: object, *misfits: Misfit, **of_kind: Misfit) -> None:
    """Raise ``CheckpointError`` naming all that differs; ``of_kind``: of the optimizer's state and the like."""
    texts = [str(each) for each in misfits if each]
    texts += [f"of {kind}: {each}" for kind, each in of_kind.items() if each]
    if texts:
        raise CheckpointError(f"{where} does not fit the model: {'; '.join(texts)}")


def by_first_name(tensors: Mapping[str, _T], tied: Mapping[str, str]) -> dict[str, _T]:
    """Tensors with one name each: ``tied`` maps further names to the first. One may be stored under any or all."""
    own = {name: tensor for name, tensor in tensors.items() if name not in tied}
    return {**{tied[name]: tensor for name, tensor in tensors.items() if name in tied}, **own}


def first_names(names: Sequence[str], separator: str = ", ") -> str:
    """The first names, or other texts, and how many more."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return separator.join(names[:_MOST_NAMES]) + more
