"""Safetensors files as named flat shards: the ``single`` engine's layout and every engine's EMA.

Two kinds of key: ``kind|name|flat_start`` (``core/shards.py``), and plain tensor names, which are whole master weights
or, where the name is no parameter's, buffers. Only the bytes asked for are read; nothing is unpickled.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from unigen_ds.core.errors import CheckpointError
from unigen_ds.core.shards import BUFFER, MASTER, parse_shard_key


@dataclass(frozen=True)
class _Piece:
    path: Path
    key: str
    start: int
    stop: int
    shape: tuple[int, ...]


class SafetensorsReader:
    """A ``ShardReader`` over the ``*.safetensors`` of a directory (not of its sub-directories).

    Args:
        directory: where they lie.
        parameters: names of the model's parameters; a plain tensor name that is not among them is a buffer's.
        files: names of the files that count, as the manifest lists them; None: all.
    """

    def __init__(
        self, directory: Path, *, parameters: Iterable[str] | None = None, files: Iterable[str] | None = None
    ) -> None:
        self._pieces: dict[tuple[str, str], list[_Piece]] = defaultdict(list)
        known = None if parameters is None else set(parameters)
        names = [path.name for path in directory.glob("*.safetensors")] if files is None else files
        paths = sorted(directory / name for name in names if name.endswith(".safetensors"))
        if not paths:
            raise CheckpointError(f"{directory} holds no .safetensors file")
        for path in paths:
            try:
                self._index(path, known)
            except CheckpointError:
                raise
            except Exception as error:
                raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
        for (kind, name), pieces in self._pieces.items():
            pieces.sort(key=lambda piece: piece.start)
            for one, other in zip(pieces, pieces[1:], strict=False):
                if other.start < one.stop:
                    raise CheckpointError(f"{kind} of {name} is in {one.path} and, in part again, in {other.path}")

    def _index(self, path: Path, known: set[str] | None) -> None:
        with safe_open(path, framework="pt") as stream:
            for key in stream.keys():  # noqa: SIM118 - a safetensors handle, not a dict
                shape = tuple(stream.get_slice(key).get_shape())
                if "|" in key:
                    kind, name, start = parse_shard_key(key)
                else:
                    kind, name, start = MASTER if known is None or key in known else BUFFER, key, 0
                piece = _Piece(path, key, start, start + math.prod(shape), shape)
                self._pieces[kind, name].append(piece)

    def kinds(self) -> list[str]:
        return sorted({kind for kind, _ in self._pieces})

    def names(self, kind: str) -> list[str]:
        return sorted(name for k, name in self._pieces if k == kind)

    def numel(self, kind: str, name: str) -> int:
        return self._found(kind, name)[-1].stop

    def _found(self, kind: str, name: str) -> list[_Piece]:
        if (kind, name) not in self._pieces:
            raise CheckpointError(f"the checkpoint has no {kind} of {name}")
        return self._pieces[kind, name]

    def read(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        parts, at = [], start
        for piece in self._found(kind, name):
            if piece.stop <= at or piece.start >= stop:
                continue
            if piece.start > at:
                break
            end = min(stop, piece.stop)
            parts.append(_read_piece(piece, at - piece.start, end - piece.start))
            at = end
        if at < stop:
            raise CheckpointError(f"the checkpoint has no elements {at}..{stop} of {kind} {name}")
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0)


def _read_piece(piece: _Piece, start: int, stop: int) -> Tensor:
    """Flat elements of one entry: whole rows of the first dimension are read, then cut."""
    with safe_open(piece.path, framework="pt") as stream:
        view = stream.get_slice(piece.key)
        if not piece.shape:
            return stream.get_tensor(piece.key).reshape(-1)[start:stop]
        row = max(1, math.prod(piece.shape[1:]))
        first, last = start // row, -(-stop // row)
        return view[first:last].reshape(-1)[start - first * row : stop - first * row]
