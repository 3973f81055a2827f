"""The common part of ``single`` and ``fsdp``: a torch optimizer whose parameters are the masters, one by one."""

from __future__ import annotations

import abc
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from unigen_ds.backends.base import Backend, StepResult
from unigen_ds.core.shards import LOSS_SCALE, STEP, Shard, copies_in_one_buffer, persistent_buffers
from unigen_ds.optim.optimizer import (
    LossScale,
    ParamGroup,
    build_torch_optimizer,
    check_state,
    initialize_state,
    step_count,
)


def local_part(tensor: Tensor) -> Tensor:
    """This process's part of a DTensor; a plain tensor is whole."""
    return getattr(tensor, "_local_tensor", tensor)


def whole(tensor: Tensor) -> Tensor:
    """All of a DTensor, gathered; a plain tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class TorchOptimizerBackend(Backend):
    """A subclass calls ``_own`` in ``prepare``; the masters may be plain tensors or DTensors."""

    _device: torch.device

    def _own(self, model: Any, masters: dict[str, nn.Parameter], groups: Sequence[ParamGroup]) -> None:
        self._model, self._masters, cfg = model, masters, self._cfg
        self._trainable = [name for name, p in masters.items() if p.requires_grad]
        self._scale: LossScale | None = LossScale(**cfg.loss_scale) if cfg.precision == "fp16" else None
        self._master_data: list[Tensor] | None = None
        self._state_checked = False
        kernels = {key for key, value in cfg.arguments.items() if value is not None}
        if cfg.type == "AdamW" and not {"fused", "foreach", "capturable", "differentiable"} & kernels:
            cfg = replace(cfg, arguments={**cfg.arguments, "fused": True})
        self._optimizer = build_torch_optimizer(cfg, [(g, [masters[name] for name in g.parameters]) for g in groups])

    @property
    def model(self) -> nn.Module:
        return self._model

    @property
    def device(self) -> torch.device:
        return self._device

    def master_data(self) -> list[Tensor]:
        """Collected once: the masters keep their memory, and every step changes them in place."""
        if self._master_data is None:
            self._master_data = super().master_data()
        return self._master_data

    def _gradients(self) -> list[Tensor]:
        """Those of all trained masters, as the sharding engines see them: an absent gradient is a zero gradient."""
        grads = []
        for name in self._trainable:
            master = self._masters[name]
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            grads.append(master.grad)
        return grads

    def _update(self) -> None:
        self._optimizer.step()

    def step(self) -> StepResult:
        grads = self._gradients()
        local = [local_part(grad) for grad in grads]
        if self._scale:
            torch._foreach_mul_(local, self.dp_size / self._scale.scale)
        norm = whole(get_total_norm(grads))
        applied = bool(torch.isfinite(norm))
        if applied:
            if self._cfg.max_norm is not None:
                factor = torch.clamp(self._cfg.max_norm / (norm + 1e-6), max=1.0)
                torch._foreach_mul_(local, factor.to(local[0].device))
            self._update()
        self._optimizer.zero_grad(set_to_none=True)
        if applied and not self._state_checked:
            check_state(self._optimizer)
            self._join_state()
            self._state_checked = True
        if self._scale is None:
            return StepResult(grad_norm=norm, applied=applied)
        scale = self._scale.scale
        self._scale.record(applied=applied)
        return StepResult(norm, applied, loss_scale=scale, scale_fell=self._scale.scale < scale)

    @torch.no_grad()
    def _join_state(self) -> None:
        """Make the tensors of each kind of state views of one buffer: an asynchronous save copies it in one piece."""
        kinds: dict[Any, list[Tensor]] = defaultdict(list)
        for (kind, _), tensor in self._optimizer_tensors().items():
            local = local_part(tensor)
            kinds[kind, local.dtype, local.device].append(local)
        for tensors in kinds.values():
            for tensor, copy in zip(tensors, copies_in_one_buffer(tensors), strict=True):
                tensor.data = copy

    def _without_base(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors.items() if name not in self.left_out}

    def set_hparams(self, per_group: Sequence[Mapping[str, Any]]) -> None:
        for group, hparams in zip(self._optimizer.param_groups, per_group, strict=True):
            group.update({key: value for key, value in hparams.items() if key != "name"})

    def buffers(self) -> Mapping[str, Tensor]:
        return persistent_buffers(self._model)

    def trainable_sizes(self) -> dict[str, int]:
        return {name: self._masters[name].numel() for name in self._trainable}

    def frozen_sizes(self) -> dict[str, int]:
        return {name: p.numel() for name, p in self._masters.items() if not p.requires_grad}

    def make_state(self) -> None:
        if not self._optimizer.state:
            initialize_state(self._optimizer, self._update)

    def kept_for(self, kind: str) -> Collection[str]:
        state = self._optimizer.state
        return [name for name in self._trainable if state.get(self._masters[name], {}).get(kind) is not None]

    @abc.abstractmethod
    def _shards(self, tensors: Mapping[str, Tensor]) -> list[Shard]:
        """This process's parts of tensors that are split as the parameters of their names are."""

    def _parameters_of(self, *, trained: bool) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self._masters.items() if p.requires_grad == trained}

    def master_shards(self) -> list[Shard]:
        return self._shards(self._parameters_of(trained=True))

    def frozen_shards(self) -> list[Shard]:
        return self._shards(self._parameters_of(trained=False))

    def moments(self, kind: str) -> list[Shard]:
        return self._shards({name: self._optimizer.state[self._masters[name]][kind] for name in self.kept_for(kind)})

    def set_steps(self, steps: Mapping[str, float]) -> None:
        for name, step in steps.items():
            state = self._optimizer.state[self._masters[name]]
            state[STEP] = step_count(state[STEP], step)

    def load_loss_scale(self, scale: float, good_updates: int) -> None:
        if self._scale:
            self._scale.scale, self._scale.good_updates = scale, good_updates

    def trained_tensors(self) -> list[Tensor]:
        masters = [self._masters[name] for name in self._trainable]
        return [local_part(tensor) for tensor in (*masters, *self._optimizer_tensors().values())]

    def _optimizer_tensors(self) -> dict[tuple[str, str], Tensor]:
        """(kind, name) -> tensor of everything the optimizer and the loss scale keep."""
        state = {
            (kind, name): value if isinstance(value, Tensor) else torch.tensor(float(value))
            for name in self._trainable
            for kind, value in self._optimizer.state.get(self._masters[name], {}).items()
            if isinstance(value, Tensor) or (kind == STEP and value is not None)
        }
        if self._scale:
            pair = [self._scale.scale, float(self._scale.good_updates)]
            state[LOSS_SCALE, LOSS_SCALE] = torch.tensor(pair, dtype=torch.float64)
        return state
