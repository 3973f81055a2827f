"""The base of all engines: the interface that the loop, the hooks and the checkpoint saver use.

A new engine lists its state as flat shards (``master_shards``, ``frozen_shards``, ``moments``, ``buffers``) and
refreshes its low-precision copies; loading, averaging and swapping are written once, here. So any layout loads into any
engine at any process count. ``single`` (one process, plain PyTorch) is the reference that every engine must match.
"""

from __future__ import annotations

import abc
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.core.progress import Geometry
from unigen_ds.core.shards import (
    BUFFER,
    EMA,
    EXP_AVG_SQ,
    LOSS_SCALE,
    MASTER,
    STEP,
    Misfit,
    Shard,
    ShardReader,
    misfit,
    refuse_misfit,
)
from unigen_ds.optim.optimizer import OptimizerConfig, ParamGroup, computes_bf16
from unigen_ds.system import dist
from unigen_ds.system.log import logger
from unigen_ds.system.outputs import StateFiles

_NOT_MOMENTS = {MASTER, BUFFER, EMA, STEP, LOSS_SCALE}


@dataclass(frozen=True)
class StepResult:
    """The result of ``Backend.step``, equal on all ranks."""

    grad_norm: Tensor | float
    """Global L2 norm of the gradients before clipping."""
    applied: bool
    """False when a gradient was not finite: then no weight and no moment changed."""
    loss_scale: float | None = None
    """Factor by which the loss of this update was multiplied, in fp16."""
    scale_fell: bool = False
    """Whether the gradient overflowed in fp16 and the next loss scale is smaller."""


class Backend(abc.ABC):
    """One engine with one model. Methods are collective (all ranks call them, in the same order) unless noted."""

    @abc.abstractmethod
    def prepare(self, model: nn.Module, param_groups: Sequence[ParamGroup]) -> None:
        """Shard the model, then build the optimizer, with what ``check`` got. Called once, by ``build``.

        Parameter names stay the model's; initial weights do not depend on the world size. Tensors on the meta
        device get memory, each rank for its own shard, but no values: ``load_tensors`` must follow.
        """

    _cfg: OptimizerConfig
    _geometry: Geometry
    left_out: Collection[str] = frozenset()
    """Frozen parameters and buffers of an adapters' base, which ``state_files`` leaves out. Set before ``prepare``."""
    for_more_processes: str | None = None
    """The ``--backend`` to choose when more processes are started; None: this one."""
    stamp = ""
    """The name of the present save, which ``state_files`` puts into every file. The saver sets it."""

    def check(self, *, geometry: Geometry, optimizer_cfg: OptimizerConfig) -> None:
        """Refuse settings that cannot work, before any process group is joined; ``topology`` is known afterwards.

        Raises ``ConfigError``. Not collective. Called first of all; ``dp_size`` is then what the launcher announced.
        Called again where a resume with ``precision='auto'`` has the checkpoint's precision.
        """
        self._cfg, self._geometry = optimizer_cfg, geometry
        if optimizer_cfg.precision == "bf16" and not computes_bf16():
            raise ConfigError(
                f"precision is 'bf16', which {torch.cuda.get_device_name()} cannot compute",
                allowed="bf16 on a device of compute capability 8.0 or more",
                remedy="optim_wrapper.precision='fp16', 'fp32', or 'auto'",
            )

    @property
    @abc.abstractmethod
    def model(self) -> nn.Module:
        """The module that the loop calls with a ``PackedBatch``."""

    @property
    @abc.abstractmethod
    def device(self) -> torch.device: ...

    @property
    def lighter(self) -> str | None:
        """The ``--backend`` that needs less memory for this model on each device; None where there is none."""
        return None

    @property
    def gathers_in_forward(self) -> bool:
        """Whether a forward pass is collective, because each process holds a part of the weights. Not collective."""
        return True

    @property
    def dp_rank(self) -> int:
        return dist.rank()

    @property
    def dp_size(self) -> int:
        return dist.world_size()

    def unlike_ranks(self) -> Sequence[int]:
        """Ranks that may need more memory than rank 0, after ``prepare``. Not collective."""
        return ()

    @abc.abstractmethod
    def topology(self) -> dict[str, Any]:
        """Engine, sharding, offload, process count, precision: plain values for the manifest. Not collective."""

    @abc.abstractmethod
    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        """Context of one micro-batch. One update = n entries, ``last`` once, in the final one."""

    @abc.abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Add this micro-batch's gradient. After the last: grad = sum over ranks and micro-batches of the losses."""

    @abc.abstractmethod
    def step(self) -> StepResult:
        """Clip by the global norm, update, zero the gradients. Non-finite gradients leave everything unchanged."""

    @abc.abstractmethod
    def set_hparams(self, per_group: Sequence[Mapping[str, Any]]) -> None:
        """Set ``lr`` (and other optimizer options) of each group, in the order of ``param_groups``. Not collective."""

    @abc.abstractmethod
    def master_shards(self) -> Sequence[Shard]:
        """Every local fp32 master shard of a trainable parameter, padding stripped. Not collective."""

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The model's parameters, as they are registered between updates. Not collective."""
        return dict(self.model.named_parameters(remove_duplicate=False))

    def master_data(self) -> list[Tensor]:
        """The data of ``master_shards``, in their order: what an average follows in every update. Not collective."""
        return [shard.data for shard in self.master_shards()]

    @abc.abstractmethod
    def frozen_shards(self) -> Sequence[Shard]:
        """Local pieces of parameters that are not trained, in whatever dtype the engine holds them."""

    @abc.abstractmethod
    def make_state(self) -> None:
        """Let the optimizer make its state where it has none, to be loaded; weights may be anything afterwards."""

    @abc.abstractmethod
    def moments(self, kind: str) -> Sequence[Shard]:
        """The optimizer's state ``kind`` (``exp_avg``, ...) on the ``master_shards`` of ``kept_for(kind)``."""

    def kept_for(self, kind: str) -> Collection[str]:
        """Trainable parameters for which the optimizer keeps the state ``kind``, after ``make_state``: all of them,
        unless several optimizers share the parameters. Not collective.
        """
        return self.trainable_sizes().keys()

    def trained_tensors(self) -> list[Tensor]:
        """This rank's trained weights and what the optimizer keeps by now, in as few pieces as there are in memory. Not
        collective.
        """
        return self.master_data()

    @abc.abstractmethod
    def set_steps(self, steps: Mapping[str, float]) -> None:
        """Set the optimizer's step count of each parameter of ``kept_for('step')`` (bias correction depends on it)."""

    @abc.abstractmethod
    def refresh_copies(self) -> None:
        """Make low-precision and gathered copies agree with the masters. Collective."""

    def load_loss_scale(self, scale: float, good_updates: int) -> None:  # noqa: B027 - few engines scale the loss
        """Restore dynamic loss scaling."""

    @abc.abstractmethod
    def trainable_sizes(self) -> Mapping[str, int]:
        """Elements of every trainable parameter of the whole model, by name; the same on all ranks."""

    @abc.abstractmethod
    def frozen_sizes(self) -> Mapping[str, int]:
        """Elements of every parameter that is not trained, by name; the same on all ranks."""

    @torch.no_grad()
    def _write_masters(self, values: Iterable[Tensor]) -> None:
        """Copy data, in the order of ``master_shards``, into the masters; low-precision copies agree afterwards."""
        for shard, data in zip(self.master_shards(), values, strict=True):
            shard.data.copy_(data)
        self.refresh_copies()

    @contextmanager
    def swapped(self, shards: Sequence[Shard]) -> Iterator[None]:
        """The model computes with ``shards`` inside the context; the masters are restored bit by bit, always."""
        copies = [shard.data.clone() for shard in self.master_shards()]
        try:
            self._write_masters(shard.data for shard in shards)
            yield
        finally:
            self._write_masters(copies)

    @abc.abstractmethod
    def state_files(self) -> StateFiles:
        """The files of the engine's native layout that this rank writes. Touches no disk: the saver writes them,
        without collectives, before the next update, as they refer to the engine's own memory.
        """

    @abc.abstractmethod
    def buffers(self) -> Mapping[str, Tensor]:
        """Persistent buffers by name; whole on every rank. Not collective."""

    @torch.no_grad()
    def load_tensors(self, reader: ShardReader, *, weights_only: bool = False, keep: Collection[str] = ()) -> None:
        """Read masters, frozen parameters, buffers and, unless ``weights_only``, moments and Adam step from any layout,
        but not what ``keep`` names. Raises ``CheckpointError`` naming every tensor that is missing or of another size.
        """
        kinds = set(reader.kinds())
        moments = [] if weights_only else sorted(kinds - _NOT_MOMENTS)
        counts = not weights_only and STEP in kinds
        if moments or counts:
            self.make_state()
        shards = [shard for shard in (*self.master_shards(), *self.frozen_shards()) if shard.name not in keep]
        buffers = {name: buffer for name, buffer in self.buffers().items() if name not in keep}
        trainable = self.trainable_sizes()
        sizes = {name: numel for name, numel in {**trainable, **self.frozen_sizes()}.items() if name not in keep}
        step_names = self.kept_for(STEP) if counts else ()
        state = {kind: {name: trainable[name] for name in self.kept_for(kind)} for kind in moments}
        state |= {STEP: dict.fromkeys(step_names, 1)} if counts else {}

        def differences(kind: str, own: Mapping[str, int], names: Iterable[str]) -> Misfit:
            shapes = {name: (reader.numel(kind, name),) for name in sorted(names)}
            return misfit(shapes, {name: (numel,) for name, numel in own.items()})

        refuse_misfit(
            "the checkpoint",
            differences(MASTER, sizes, reader.names(MASTER)),
            differences(BUFFER, {name: buffer.numel() for name, buffer in buffers.items()}, reader.names(BUFFER)),
            # of the optimizer: state of parameters that are not trained is ignored
            **{kind: differences(kind, own, set(reader.names(kind)) & set(own)) for kind, own in state.items()},
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
        if counts:
            self.set_steps({name: float(reader.read(STEP, name, 0, 1)) for name in step_names})
        if LOSS_SCALE in kinds:
            scale, good = reader.read(LOSS_SCALE, LOSS_SCALE, 0, 2).tolist()
            self.load_loss_scale(scale, int(good))

    def log_summary(self, engine: str, *, units: Sequence[str] = ()) -> None:
        """Log the engine, each rank's bytes of masters, and the sharding units. Collective."""
        trainable = sum(self.trainable_sizes().values())
        mine = sum(shard.data.nbytes for shard in self.master_shards())
        sizes = dist.sum_floats([mine if rank == self.dp_rank else 0 for rank in range(self.dp_size)])
        entries = []
        for size, group in itertools.groupby(range(len(sizes)), key=sizes.__getitem__):  # equal neighbours: one entry
            first, *others = group
            ranks = f"ranks {first}-{others[-1]}" if others else f"rank {first}"
            entries.append(f"{ranks}: {size:,.0f} ({100 * size / max(4 * trainable, 1):.1f} %)")
        logger().info(
            f"Engine: {engine} over {self.dp_size} process(es), {self.topology()['precision']}. Bytes of fp32 masters"
            f" (and as many for each Adam moment): {', '.join(entries)}."
        )
        if units:
            kinds = Counter(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in units)
            names = [name if number == 1 else f"{name} ({number})" for name, number in kinds.items()]
            logger().info("Sharding units (%d): %s.", len(units), ", ".join(names))

    def close(self) -> None:  # noqa: B027 - an engine without resources has nothing to do
        """Release resources. Not collective: safe after an error."""


def read_into(reader: ShardReader, kind: str, shard: Shard) -> None:
    """Fill a shard from any ranges of a checkpoint. Raises ``CheckpointError`` for a negative average of squares."""
    if shard.data.numel():
        values = reader.read(kind, shard.name, shard.flat_start, shard.flat_stop)
        if kind.endswith(EXP_AVG_SQ) and bool((values < 0).any() | values.isnan().any()):
            problem = f"the checkpoint's {kind} of {shard.name} has negative values or NaN, which no optimizer writes"
            raise CheckpointError(problem, remedy="resume from another checkpoint; --load-from loads weights alone")
        shard.data.copy_(values)
