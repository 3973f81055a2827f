"""The backend interface: the only thing the loop, the hooks and the checkpoint saver know of an engine.

A new engine subclasses ``Backend``, registers itself in ``BACKENDS``, and must match ``single`` (one process, plain
PyTorch: the oracle) in ``tests/backends``.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unigen_ds.core.errors import ConfigError
from unigen_ds.core.optim import PRECISIONS, OptimizerConfig, ParamGroup
from unigen_ds.core.outputs import StateFiles
from unigen_ds.core.progress import Geometry
from unigen_ds.core.shards import Shard, ShardReader

__all__ = ["PRECISIONS", "Backend", "OptimizerConfig", "ParamGroup", "StepResult"]


@dataclass(frozen=True)
class StepResult:
    """What ``Backend.step`` did; equal on all ranks."""

    grad_norm: Tensor | float
    """Global L2 norm of the gradients before clipping."""
    applied: bool
    """False when a gradient was not finite: then no weight and no moment changed."""


class Backend(abc.ABC):
    """One engine holding one model. Methods are collective (all ranks call them, in the same order) unless noted."""

    @abc.abstractmethod
    def prepare(
        self,
        model: nn.Module,
        param_groups: Sequence[ParamGroup],
        optimizer_cfg: OptimizerConfig,
        *,
        geometry: Geometry,
    ) -> None:
        """Shard the model, then build the optimizer. Called once, by ``build``.

        Parameter names stay the model's; initial weights do not depend on the world size. Tensors on the meta
        device get memory, of which a rank touches its shard alone, and no values: ``load_tensors`` must follow.
        """

    _cfg: OptimizerConfig

    def check(self, *, geometry: Geometry, optimizer_cfg: OptimizerConfig) -> None:
        """Refuse settings that cannot work, before any process group is joined; ``topology`` is known afterwards.

        Raises ``ConfigError``. Not collective. Called first of all; ``dp_size`` is then what the launcher announced.
        """
        self._cfg = optimizer_cfg
        no_bf16 = torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)
        if optimizer_cfg.precision == "bf16" and no_bf16:
            raise ConfigError(
                f"precision is 'bf16', which {torch.cuda.get_device_name()} cannot compute",
                allowed="bf16 on a device of compute capability 8.0 or more",
                remedy="optim_wrapper.precision='fp16', or 'fp32'",
            )

    @property
    @abc.abstractmethod
    def model(self) -> nn.Module:
        """What the loop calls with a ``PackedBatch``."""

    @property
    @abc.abstractmethod
    def device(self) -> torch.device: ...

    @property
    def lighter(self) -> str | None:
        """The ``--backend`` that holds less of this model on each device; None where there is none."""
        return None

    @property
    def for_more_processes(self) -> str | None:
        """The ``--backend`` to choose when more processes are started; None: this one."""
        return None

    @property
    def dp_rank(self) -> int:
        """This process's place among the data-parallel ranks."""
        return 0

    @property
    def dp_size(self) -> int:
        return 1

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

    def master_data(self) -> list[Tensor]:
        """The data of ``master_shards``, in their order: what an average follows in every update. Not collective."""
        return [shard.data for shard in self.master_shards()]

    @abc.abstractmethod
    def write_master(self, shards: Sequence[Shard]) -> None:
        """Copy ``shards`` (as cut by ``master_shards``) into the masters; low-precision copies agree afterwards."""

    @abc.abstractmethod
    def swapped(self, shards: Sequence[Shard]) -> AbstractContextManager[None]:
        """The model computes with ``shards`` inside the context; the masters are restored bit by bit, always."""

    @abc.abstractmethod
    def state_files(self) -> StateFiles:
        """The files of the engine's native layout that this rank writes. Touches no disk.

        The saver writes them, without collectives, before the next update: they refer to the engine's own memory.
        """

    @abc.abstractmethod
    def buffers(self) -> Mapping[str, Tensor]:
        """Persistent buffers by name; whole on every rank. Not collective."""

    @abc.abstractmethod
    def load_tensors(self, reader: ShardReader, *, weights_only: bool = False, keep: Collection[str] = ()) -> None:
        """Take masters, frozen parameters, buffers and, unless ``weights_only``, moments and Adam step from any layout.

        What ``keep`` names stays as it is. Raises ``CheckpointError`` naming every other tensor that is missing or has
        another number of elements.
        """

    @abc.abstractmethod
    def full_state_dict(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Stream (name, CPU tensor) on rank 0, one parameter at a time; other ranks get nothing.

        The names are those of the model's ``state_dict``: a tied parameter comes under each of its names.
        """

    def close(self) -> None:  # noqa: B027 - an engine without resources has nothing to do
        """Release resources. Not collective: safe after an error."""
