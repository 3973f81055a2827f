"""Reading a checkpoint's tensors into shards, and what of it does not fit the model, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from unigen_ds.core.shards import Shard, ShardReader


def read_into(reader: ShardReader, kind: str, shard: Shard) -> None:
    """Fill a shard from a checkpoint, whatever ranges that holds."""
    if shard.data.numel():
        shard.data.copy_(reader.read(kind, shard.name, shard.flat_start, shard.flat_stop))


def misfits(reader: ShardReader, kind: str, sizes: Mapping[str, int]) -> list[str]:
    """Why tensors of a kind cannot be taken from the checkpoint: missing, unexpected or reshaped, by name."""
    present: Iterable[str] = set(reader.names(kind))
    found = [f"{name}: missing" for name in sizes if name not in present]
    found += [f"{name}: not in the model" for name in sorted(set(present) - set(sizes))]
    for name in sorted(set(present) & set(sizes)):
        stored = reader.numel(kind, name)
        if stored != sizes[name]:
            found.append(f"{name}: {stored} elements stored, {sizes[name]} needed")
    return found


def moment_misfits(reader: ShardReader, kind: str, sizes: Mapping[str, int]) -> list[str]:
    """As ``misfits``, for the optimizer's state; what the model does not train is passed over."""
    present = set(reader.names(kind))
    found = [f"{name}: no {kind}" for name in sizes if name not in present]
    for name in (name for name in sizes if name in present):
        stored = reader.numel(kind, name)
        if stored != sizes[name]:
            found.append(f"{name}: {stored} elements of {kind} stored, {sizes[name]} needed")
    return found
