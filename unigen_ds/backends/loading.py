"""Reading a checkpoint's tensors into shards, and what of it does not fit the model, by name."""

from __future__ import annotations

from collections.abc import Mapping

from unigen_ds.core.errors import CheckpointError
from unigen_ds.core.fitting import Misfit, Shape, misfit
from unigen_ds.core.shards import EXP_AVG_SQ, Shard, ShardReader


def read_into(reader: ShardReader, kind: str, shard: Shard) -> None:
    """Fill a shard from a checkpoint, whatever ranges the checkpoint is stored in. Raises ``CheckpointError`` where an
    average of squares is negative.
    """
    if shard.data.numel():
        values = reader.read(kind, shard.name, shard.flat_start, shard.flat_stop)
        if kind.endswith(EXP_AVG_SQ) and bool((values < 0).any() | values.isnan().any()):
            problem = f"the checkpoint's {kind} of {shard.name} has negative values or NaN, which no optimizer writes"
            raise CheckpointError(problem, remedy="resume from another checkpoint; --load-from loads weights alone")
        shard.data.copy_(values)


def tensor_misfit(reader: ShardReader, kind: str, sizes: Mapping[str, int]) -> Misfit:
    """What of the tensors of a kind differs from those of ``sizes``, by name and number of elements."""
    return misfit({name: (reader.numel(kind, name),) for name in sorted(reader.names(kind))}, _shapes(sizes))


def state_misfit(reader: ShardReader, kind: str, sizes: Mapping[str, int]) -> Misfit:
    """The same of the optimizer's state; that of parameters which are not trained is ignored."""
    present = set(reader.names(kind)) & set(sizes)
    return misfit({name: (reader.numel(kind, name),) for name in present}, _shapes(sizes))


def _shapes(sizes: Mapping[str, int]) -> dict[str, Shape]:
    return {name: (numel,) for name, numel in sizes.items()}
