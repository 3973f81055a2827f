"""What all engines share: loading, averaging and swapping, written once in terms of named flat shards.

An engine says where its state lies (``master_shards``, ``frozen_shards``, ``moments``, ``buffers``) and how its
low-precision copies are refreshed; everything else follows. So any layout loads into any engine at any process count.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from unigen_ds.backends.base import Backend
from unigen_ds.core import dist
from unigen_ds.core.errors import CheckpointError
from unigen_ds.core.log import logger
from unigen_ds.core.shards import BUFFER, EMA, LOSS_SCALE, MASTER, STEP, Shard, ShardReader

_NOT_MOMENTS = {MASTER, BUFFER, EMA, STEP, LOSS_SCALE}


class ShardedBackend(Backend):
    """Base of the engines here. Nothing in it communicates except through ``refresh_copies``."""

    @abc.abstractmethod
    def frozen_shards(self) -> Sequence[Shard]:
        """Local pieces of parameters that are not trained, in whatever dtype the engine holds them."""

    @abc.abstractmethod
    def moments(self, kind: str) -> Sequence[Shard]:
        """The optimizer's state ``kind`` (``exp_avg``, ...) on the shards of ``master_shards``; made if absent."""

    @abc.abstractmethod
    def set_steps(self, steps: Mapping[str, float]) -> None:
        """Set the optimizer's step count of each trainable parameter (bias correction depends on it)."""

    @abc.abstractmethod
    def refresh_copies(self) -> None:
        """Make low-precision and gathered copies agree with the masters. Collective."""

    def load_loss_scale(self, scale: float, good_updates: int) -> None:
        """Restore dynamic loss scaling."""

    def log_summary(self, engine: str, *, units: Sequence[str] = ()) -> None:
        """At the start: how many parameters, the bytes of masters that every rank holds, and the sharding units.
        Collective.
        """
        trainable, frozen = sum(self.trainable_sizes().values()), sum(self.frozen_sizes().values())
        mine = sum(shard.data.nbytes for shard in self.master_shards())
        held = dist.sum_floats([mine if rank == self.dp_rank else 0 for rank in range(self.dp_size)])
        logger().info(
            "%s over %d process(es), %s: %.2f M trainable and %.2f M frozen parameters. Bytes of fp32 masters (and as"
            " many for each Adam moment): %s.",
            engine,
            self.dp_size,
            self.topology()["precision"],
            trainable / 1e6,
            frozen / 1e6,
            shares(held, whole=4 * trainable),
        )
        if units:
            logger().info("Sharding units (%d): %s.", len(units), ", ".join(runs_of_names(units)))

    @torch.no_grad()
    def write_master(self, shards: Sequence[Shard]) -> None:
        for mine, given in zip(self.master_shards(), shards, strict=True):
            mine.data.copy_(given.data)
        self.refresh_copies()

    @contextmanager
    def swapped(self, shards: Sequence[Shard]) -> Iterator[None]:
        kept = [shard.data.clone() for shard in self.master_shards()]
        try:
            self.write_master(shards)
            yield
        finally:
            with torch.no_grad():
                for shard, data in zip(self.master_shards(), kept, strict=True):
                    shard.data.copy_(data)
            self.refresh_copies()

    @torch.no_grad()
    def load_tensors(self, reader: ShardReader, *, weights_only: bool = False, keep: Collection[str] = ()) -> None:
        kinds = set(reader.kinds())
        moments = [] if weights_only else sorted(kinds - _NOT_MOMENTS)
        shards = [shard for shard in (*self.master_shards(), *self.frozen_shards()) if shard.name not in keep]
        buffers = {name: buffer for name, buffer in self.buffers().items() if name not in keep}
        trainable = self.trainable_sizes()
        sizes = {name: numel for name, numel in {**trainable, **self.frozen_sizes()}.items() if name not in keep}
        problems = misfits(reader, MASTER, sizes)
        problems += misfits(reader, BUFFER, {name: b.numel() for name, b in buffers.items()})
        for kind in moments:
            problems += _moment_misfits(reader, kind, trainable)
        if not weights_only and STEP in kinds:
            problems += _moment_misfits(reader, STEP, dict.fromkeys(trainable, 1))
        if problems:
            raise CheckpointError(
                f"the checkpoint does not fit the model: {'; '.join(problems)} ({len(problems)} in all)"
            )
        for shard in shards:
            read_into(reader, MASTER, shard)
        for name, buffer in buffers.items():
            buffer.view(-1).copy_(reader.read(BUFFER, name, 0, buffer.numel()))
        self.refresh_copies()
        if weights_only:
            return
        for kind in moments:
            for shard in self.moments(kind):
                read_into(reader, kind, shard)
        if STEP in kinds:
            self.set_steps({name: float(reader.read(STEP, name, 0, 1)) for name in trainable})
        if LOSS_SCALE in kinds:
            scale, good = reader.read(LOSS_SCALE, LOSS_SCALE, 0, 2).tolist()
            self.load_loss_scale(scale, int(good))

    @abc.abstractmethod
    def trainable_sizes(self) -> Mapping[str, int]:
        """Elements of every trainable parameter of the whole model, by name; the same on all ranks."""

    @abc.abstractmethod
    def frozen_sizes(self) -> Mapping[str, int]:
        """The same for parameters that are not trained."""


def shares(held: Sequence[float], *, whole: float) -> str:
    """The bytes of every rank; ranks in a row that hold the same are named once: ``ranks 0-3: 1,024 (25.0 %)``."""
    found: list[str] = []
    for first in (i for i, value in enumerate(held) if i == 0 or held[i - 1] != value):
        last = next((i - 1 for i in range(first, len(held)) if held[i] != held[first]), len(held) - 1)
        ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
        found.append(f"{ranks}: {held[first]:,.0f} ({100 * held[first] / max(whole, 1):.1f} %)")
    return ", ".join(found)


def runs_of_names(names: Iterable[str]) -> list[str]:
    """Names that differ in one number alone, as one: ``layers.0``, ``layers.1``, ``layers.2`` -> ``layers.0-2``."""
    found: list[tuple[str, int | None, int | None, str]] = []
    for name in names:
        before, number, after = _LAST_NUMBER.fullmatch(name).groups()  # type: ignore[union-attr]
        at = int(number) if number else None
        if found and at is not None and found[-1][0] == before and found[-1][2] == at - 1 and found[-1][3] == after:
            found[-1] = (before, found[-1][1], at, after)
        else:
            found.append((before, at, at, after))
    return [
        before + ("" if first is None else str(first) if first == last else f"{first}-{last}") + after
        for before, first, last, after in found
    ]


_LAST_NUMBER = re.compile(r"(.*?)(?:(?<=\.)(\d+)(?=\.|$))?((?:\.\D[^.]*)*)")


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


def _moment_misfits(reader: ShardReader, kind: str, sizes: Mapping[str, int]) -> list[str]:
    """As ``misfits``, for the optimizer's state; what the model does not train is passed over."""
    present = set(reader.names(kind))
    found = [f"{name}: no {kind}" for name in sizes if name not in present]
    for name in (name for name in sizes if name in present):
        stored = reader.numel(kind, name)
        if stored != sizes[name]:
            found.append(f"{name}: {stored} elements of {kind} stored, {sizes[name]} needed")
    return found
