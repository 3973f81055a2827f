"""How an update is split: geometries that keep an effective batch, and how its change affects the learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from unigen_ds.backends.base import Backend
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.progress import Geometry
from unigen_ds.core.shards import first_names
from unigen_ds.data.settings import TrainDataloader


def lr_factor(choice: str, *, was: int, now: int) -> float:
    """The factor of the learning rate when the effective batch changes from ``was`` to ``now`` sequences."""
    if choice == "linear":
        return now / was
    return math.sqrt(now / was) if choice == "sqrt" else 1.0


def equal_geometries(total: int, dp_size: int) -> list[Geometry]:
    """Every split of ``total`` sequences over ``dp_size`` ranks, the smallest batch per device (least memory) first."""
    if total % dp_size:
        return []
    share = total // dp_size
    return [Geometry(size, share // size, dp_size) for size in range(1, share + 1) if share % size == 0]


def keep_batch(total: int, dp_size: int, *, most: int) -> Geometry:
    """The split of ``total`` sequences over ``dp_size`` ranks with the largest batch per device up to ``most``."""
    splits = [one for one in equal_geometries(total, dp_size) if one.batch_size <= most]
    if not splits:
        counts = ", ".join(str(number) for number in range(1, total + 1) if total % number == 0)
        raise ConfigError(
            f"on_batch_change is 'keep-batch', and {total} sequences cannot be split over {dp_size} process(es)",
            allowed=f"{counts} processes",
            remedy="start so many (torchrun --nnodes MIN:MAX x --nproc_per_node), or --on-batch-change keep-lr",
        )
    return splits[-1]


def geometries_text(total: int, dp_size: int) -> str:
    """The remedy for a wrong effective batch: the splits that restore it, or the nearest possible batches."""
    if splits := [f"{one.batch_size} x {one.accumulative_counts}" for one in equal_geometries(total, dp_size)]:
        return f"batch_size x accumulative_counts that keep {total} on {dp_size} process(es): {first_names(splits)}"
    below = total // dp_size * dp_size
    nearest = " and ".join(str(value) for value in (below, below + dp_size) if value)
    return (
        f"{total} cannot be split over {dp_size} processes; the nearest effective batches are {nearest}, with"
        " --on-batch-change keep-lr | linear | sqrt"
    )


@dataclass(frozen=True)
class MemoryPlan:
    """One way to need less memory per device at the same effective batch."""

    name: str
    words: str
    geometry: Geometry
    overrides: Mapping[str, Any]
    """Config keys to set, dotted."""
    backend: str | None = None
    """A new ``--backend``, where the plan needs one."""


def memory_plans(
    geometry: Geometry, *, backend: Backend, loader: TrainDataloader, recomputes: bool | None
) -> list[MemoryPlan]:
    """The out-of-memory plans: smaller micro-batches (A), more processes (B), both (C), less kept on each device (D).

    All keep the effective batch. A and B are absent at ``batch_size`` 1, C where B has it. ``recomputes``:
    ``model.activation_checkpointing``; None: the config does not have it.
    """
    plans = []
    size, counts, ranks = geometry.batch_size, geometry.accumulative_counts, geometry.dp_size
    if size > 1:
        finer = _finer(geometry)
        factor = finer.accumulative_counts // counts
        wider = Geometry(size // factor, counts, ranks * factor)
        several = backend.for_more_processes
        plans.append(MemoryPlan("A", "smaller micro-batches, more of them", finer, geometry_keys(finer, loader)))
        plans.append(MemoryPlan("B", "more processes", wider, geometry_keys(wider, loader), several))
        if wider.batch_size > 1:
            both = _finer(wider)
            plans.append(MemoryPlan("C", "both", both, geometry_keys(both, loader), several))
    overrides: dict[str, Any] = {} if recomputes is not False else {"model.activation_checkpointing": True}
    means = ["activation checkpointing"] * bool(overrides)
    means += [f"the backend {backend.lighter}"] * bool(backend.lighter)
    if means:
        plans.append(MemoryPlan("D", " and ".join(means), geometry, overrides, backend.lighter))
    return plans


def _finer(geometry: Geometry) -> Geometry:
    """The micro-batch divided by its smallest factor, and so many times as many of them; it is more than 1."""
    size = geometry.batch_size
    factor = next(f for f in range(2, size + 1) if size % f == 0)
    return replace(geometry, batch_size=size // factor, accumulative_counts=geometry.accumulative_counts * factor)


def geometry_keys(geometry: Geometry, loader: TrainDataloader) -> dict[str, Any]:
    """The keys that set a geometry. With ``global_batch_size`` the size per device may follow from it."""
    keys: dict[str, Any] = {"optim_wrapper.accumulative_counts": geometry.accumulative_counts}
    if loader.global_batch_size is None or loader.batch_size is not None:
        keys["train_dataloader.batch_size"] = geometry.batch_size
    return keys
