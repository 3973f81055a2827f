"""One process, plain PyTorch: no sharding, no communication. The oracle that every other engine must match."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from unigen_ds.backends.base import StepResult
from unigen_ds.backends.sharded import ShardedBackend
from unigen_ds.core.dist import env_world_size
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.loss_scale import LossScale
from unigen_ds.core.optim import COMPUTE_DTYPE, OptimizerConfig, ParamGroup, build_torch_optimizer
from unigen_ds.core.progress import Geometry
from unigen_ds.core.registry import BACKENDS
from unigen_ds.core.shards import LOSS_SCALE, Shard, shard_key


@BACKENDS.register_module(name="single")
class SingleBackend(ShardedBackend):
    """fp32 masters; with ``bf16`` or ``fp16`` the model holds rounded copies and gradients are summed in fp32."""

    def __init__(self) -> None:
        if env_world_size() > 1:
            raise ConfigError(
                f"backend 'single' was started with {env_world_size()} processes",
                remedy="start one process, or choose a backend that shards",
            )
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def prepare(
        self,
        model: nn.Module,
        param_groups: Sequence[ParamGroup],
        optimizer_cfg: OptimizerConfig,
        *,
        geometry: Geometry,
    ) -> None:
        self._model, self._cfg = model.to(self._device), optimizer_cfg
        self._parameters = dict(model.named_parameters())
        self._trainable = [name for name, p in self._parameters.items() if p.requires_grad]
        self._low_precision = optimizer_cfg.precision != "fp32"
        self._scale = LossScale() if optimizer_cfg.precision == "fp16" else None
        self._masters: dict[str, nn.Parameter] = {}
        for name, parameter in self._parameters.items():
            self._masters[name] = parameter
            if self._low_precision:
                self._masters[name] = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
                parameter.data = parameter.data.to(COMPUTE_DTYPE[optimizer_cfg.precision])
        grouped = [(group, [self._masters[name] for name in group.parameters]) for group in param_groups]
        self._optimizer = build_torch_optimizer(optimizer_cfg, grouped)

    @property
    def model(self) -> nn.Module:
        return self._model

    @property
    def device(self) -> torch.device:
        return self._device

    def topology(self) -> dict[str, Any]:
        return {"engine": "single", "dp_size": 1, "precision": self._cfg.precision}

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        yield

    def backward(self, loss: Tensor) -> None:
        (loss * self._scale.scale if self._scale else loss).backward()
        if self._low_precision:
            for name in self._trainable:
                self._collect(self._parameters[name], self._masters[name])

    @staticmethod
    def _collect(parameter: nn.Parameter, master: nn.Parameter) -> None:
        """Add this micro-batch's gradient to the fp32 sum."""
        if parameter.grad is not None:
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    def step(self) -> StepResult:
        masters = [self._masters[name] for name in self._trainable]
        for master in masters:
            if master.grad is None:  # as the sharding engines see it: an absent gradient is a zero gradient
                master.grad = torch.zeros_like(master)
        grads = [master.grad for master in masters if master.grad is not None]
        if self._scale:
            torch._foreach_mul_(grads, 1.0 / self._scale.scale)
        norm = get_total_norm(grads)
        applied = bool(torch.isfinite(norm))
        if applied:
            if self._cfg.max_norm is not None:
                clip_grads_with_norm_(masters, self._cfg.max_norm, norm)
            self._optimizer.step()
            self.refresh_copies()
        if self._scale:
            self._scale.record(applied=applied)
        self._optimizer.zero_grad(set_to_none=True)
        return StepResult(grad_norm=norm, applied=applied)

    def set_hparams(self, per_group: Sequence[Mapping[str, Any]]) -> None:
        for group, hparams in zip(self._optimizer.param_groups, per_group, strict=True):
            group.update({key: value for key, value in hparams.items() if key != "name"})

    @torch.no_grad()
    def refresh_copies(self) -> None:
        if self._low_precision:
            copies = [p.data for p in self._parameters.values()]
            torch._foreach_copy_(copies, [self._masters[name].data for name in self._parameters])

    def _shards(self, tensors: Mapping[str, Tensor]) -> list[Shard]:
        return [Shard(name, tuple(t.shape), 0, t.detach().view(-1)) for name, t in tensors.items()]

    def master_shards(self) -> list[Shard]:
        return self._shards({name: self._masters[name] for name in self._trainable})

    def frozen_shards(self) -> list[Shard]:
        return self._shards({name: p for name, p in self._masters.items() if not p.requires_grad})

    def buffers(self) -> Mapping[str, Tensor]:
        persistent = self._model.state_dict(keep_vars=True)
        return {name: b for name, b in self._model.named_buffers() if name in persistent}

    def trainable_sizes(self) -> dict[str, int]:
        return {name: self._masters[name].numel() for name in self._trainable}

    def frozen_sizes(self) -> dict[str, int]:
        return {name: p.numel() for name, p in self._masters.items() if not p.requires_grad}

    def moments(self, kind: str) -> list[Shard]:
        for name in self._trainable:
            master = self._masters[name]
            self._optimizer.state[master].setdefault(kind, torch.zeros_like(master))
        return self._shards({name: self._optimizer.state[self._masters[name]][kind] for name in self._trainable})

    def set_steps(self, steps: Mapping[str, float]) -> None:
        for name, step in steps.items():
            self._optimizer.state[self._masters[name]]["step"] = torch.tensor(step)

    def load_loss_scale(self, scale: float, good_updates: int) -> None:
        if self._scale:
            self._scale.scale, self._scale.good_updates = scale, good_updates

    def save_shards(self, directory: Path) -> dict[str, Any]:
        """``model.safetensors`` under the model's own names (any tool reads it) and ``optimizer.safetensors``."""
        tensors = {name: t.detach().cpu().contiguous() for name, t in {**self._masters, **self.buffers()}.items()}
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        state: dict[str, Tensor] = {}
        for name in self._trainable:
            for kind, value in self._optimizer.state.get(self._masters[name], {}).items():
                if isinstance(value, Tensor):
                    state[shard_key(kind, name, 0)] = value.detach().cpu().reshape(-1).contiguous()
        if self._scale:
            scale = [self._scale.scale, float(self._scale.good_updates)]
            state[shard_key(LOSS_SCALE, LOSS_SCALE, 0)] = torch.tensor(scale, dtype=torch.float64)
        save_file(state, directory / "optimizer.safetensors", {"format": "pt"})
        return {"layout": "safetensors"}

    def full_state_dict(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._model.state_dict().items():
            value = self._masters.get(name, tensor).detach()
            yield name, value.to("cpu", dtype if value.is_floating_point() else value.dtype)
