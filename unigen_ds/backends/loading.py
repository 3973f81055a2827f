"""Reading a checkpoint's tensors into shards, and what of it does not fit the model, by name."""

from __future__ import annotations

from collections.abc import Mapping

from unigen_ds.core.fitting import Misfit, Shape, misfit
from unigen_ds.core.shards import Shard, ShardReader


def read_into(reader: ShardReader, kind: str, shard: Shard) -> None:
    """Fill a shard from a checkpoint, whatever ranges the checkpoint is stored in."""
    if shard.data.numel():
        shard.data.copy_(reader.read(kind, shard.name, shard.flat_start, shard.flat_stop))


def tensor_misfit(reader: ShardReader, kind: str, sizes: Mapping[str, int]) -> Misfit:
    """What of the tensors of a kind differs from those of ``sizes``, by name and number of elements."""
    return misfit({name: (reader.numel(kind, name),) for name in sorted(reader.names(kind))}, _shapes(sizes))


def state_misfit(reader: ShardReader, kind: str, sizes: Mapping[str, int]) -> Misfit:
    """The same of the optimizer's state; that of parameters which are not trained is ignored."""
    present = set(reader.names(kind)) & set(sizes)
    return misfit({name: (reader.numel(kind, name),) for name in present}, _shapes(sizes))


def _shapes(sizes: Mapping[str, int]) -> dict[str, Shape]:
    return {name: (numel,) for name, numel in sizes.items()}
