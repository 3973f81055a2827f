"""A named flat range of a tensor: what backends, EMA and checkpoint layouts exchange; and the tensors of a module.

ZeRO-1/2 may split a tensor anywhere and FSDP2's ``Shard(0)`` is one flat range, so one type serves every engine.
On disk a shard is one safetensors entry ``kind|name|flat_start`` (``shard_key``), 1-D.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

MASTER, BUFFER, EMA, STEP, LOSS_SCALE = "master", "buffer", "ema", "step", "loss_scale"
EXP_AVG, EXP_AVG_SQ = "exp_avg", "exp_avg_sq"
"""Kinds of state; every kind but the first five is an optimizer's own name for a moment. ``master``: every parameter,
frozen ones too. ``step``: one element per parameter. ``loss_scale``: one entry, scale and number of good updates."""

STAMP = "unigen_ds_save"
"""In each file of a checkpoint: key or kind of the text that names the save that wrote it (``Manifest.stamp``)."""
OPTIMIZER_FILE = "optimizer.safetensors"
"""Of the layout ``safetensors``: all state of the engine but the weights."""


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
    """The safetensors key of a shard."""
    return f"{kind}|{name}|{flat_start}"


def parse_shard_key(key: str) -> tuple[str, str, int]:
    """``(kind, name, flat_start)`` of a key made by ``shard_key``."""
    kind, name, start = key.split("|")
    return kind, name, int(start)


class ShardReader(Protocol):
    """Reads named flat ranges out of a checkpoint, whatever layout it has. No collective; safe on every rank."""

    def kinds(self) -> Iterable[str]:
        """The kinds of state the checkpoint holds."""
        ...

    def names(self, kind: str) -> Iterable[str]:
        """Names of the tensors of a kind."""
        ...

    def numel(self, kind: str, name: str) -> int:
        """Elements of the whole tensor. Raises ``CheckpointError`` when it is absent."""
        ...

    def read(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        """Elements ``start .. stop`` as a 1-D CPU tensor in the stored dtype; reads only these bytes."""
        ...


def tied_names(model: nn.Module) -> dict[str, str]:
    """Of parameters that several modules share: each further name, and the first, under which they are kept."""
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
