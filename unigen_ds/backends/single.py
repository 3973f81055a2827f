"""One process, plain PyTorch: no sharding, no communication. The oracle that every other engine must match."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from unigen_ds.backends.base import Backend, StepResult
from unigen_ds.core.dist import env_world_size
from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.core.loss_scale import LossScale
from unigen_ds.core.optim import OptimizerConfig, ParamGroup, build_torch_optimizer
from unigen_ds.core.registry import BACKENDS
from unigen_ds.core.shards import BUFFER, EMA, MASTER, STEP, Shard, ShardReader, shard_key

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LOSS_SCALE = "loss_scale"


@BACKENDS.register_module(name="single")
class SingleBackend(Backend):
    """Keeps fp32 weights; ``bf16`` and ``fp16`` compute under autocast, so gradients accumulate in fp32."""

    def __init__(self) -> None:
        if env_world_size() > 1:
            raise ConfigError(
                f"backend 'single' was started with {env_world_size()} processes",
                remedy="start one process, or choose a backend that shards",
            )
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def prepare(self, model: nn.Module, param_groups: Sequence[ParamGroup], optimizer_cfg: OptimizerConfig) -> None:
        self._model = model.to(self._device)
        self._parameters = dict(model.named_parameters())
        grouped = [(group, [self._parameters[name] for name in group.parameters]) for group in param_groups]
        self._trainable = {name: p for name, p in self._parameters.items() if p.requires_grad}
        self._optimizer = build_torch_optimizer(optimizer_cfg, grouped)
        self._cfg = optimizer_cfg
        self._scale = LossScale() if optimizer_cfg.precision == "fp16" else None

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
        dtype = _AUTOCAST.get(self._cfg.precision)
        with torch.autocast(self._device.type, dtype=dtype) if dtype else nullcontext():
            yield

    def backward(self, loss: Tensor) -> None:
        (loss * self._scale.scale if self._scale else loss).backward()

    def step(self) -> StepResult:
        for parameter in self._trainable.values():
            if parameter.grad is None:  # as the sharding engines see it: an absent gradient is a zero gradient
                parameter.grad = torch.zeros_like(parameter)
        grads = [parameter.grad for parameter in self._trainable.values() if parameter.grad is not None]
        if self._scale:
            torch._foreach_mul_(grads, 1.0 / self._scale.scale)
        norm = get_total_norm(grads)
        applied = bool(torch.isfinite(norm))
        if applied:
            if self._cfg.max_norm is not None:
                clip_grads_with_norm_(self._trainable.values(), self._cfg.max_norm, norm)
            self._optimizer.step()
        if self._scale:
            self._scale.record(applied=applied)
        self._optimizer.zero_grad(set_to_none=True)
        return StepResult(grad_norm=norm, applied=applied)

    def set_hparams(self, per_group: Sequence[Mapping[str, Any]]) -> None:
        for group, hparams in zip(self._optimizer.param_groups, per_group, strict=True):
            group.update({key: value for key, value in hparams.items() if key != "name"})

    def master_shards(self) -> list[Shard]:
        return [Shard(name, tuple(p.shape), 0, p.detach().view(-1)) for name, p in self._trainable.items()]

    @torch.no_grad()
    def write_master(self, shards: Sequence[Shard]) -> None:
        for mine, given in zip(self.master_shards(), shards, strict=True):
            mine.data.copy_(given.data)

    @contextmanager
    def swapped(self, shards: Sequence[Shard]) -> Iterator[None]:
        kept = [shard.data.clone() for shard in self.master_shards()]
        try:
            self.write_master(shards)
            yield
        finally:
            for shard, data in zip(self.master_shards(), kept, strict=True):
                shard.data.copy_(data)

    def save_shards(self, directory: Path) -> dict[str, Any]:
        """``model.safetensors`` under the model's own names (any tool reads it) and ``optimizer.safetensors``."""
        tensors = {name: p.detach().cpu().contiguous() for name, p in self._parameters.items()}
        tensors |= {name: b.detach().cpu().contiguous() for name, b in self._model.named_buffers()}
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        state: dict[str, Tensor] = {}
        for name, parameter in self._trainable.items():
            for kind, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    state[shard_key(kind, name, 0)] = value.detach().cpu().reshape(-1).contiguous()
        if self._scale:
            scale = [self._scale.scale, float(self._scale.good_updates)]
            state[shard_key(_LOSS_SCALE, _LOSS_SCALE, 0)] = torch.tensor(scale, dtype=torch.float64)
        save_file(state, directory / "optimizer.safetensors", {"format": "pt"})
        return {"layout": "safetensors"}

    @torch.no_grad()
    def load_tensors(self, reader: ShardReader, *, weights_only: bool = False) -> None:
        kinds: dict[str, dict[str, Tensor]] = {MASTER: {**self._parameters}, BUFFER: dict(self._model.named_buffers())}
        moments = [] if weights_only else sorted(set(reader.kinds()) - {MASTER, BUFFER, _LOSS_SCALE, EMA})
        problems = [problem for kind, tensors in kinds.items() for problem in misfits(reader, kind, tensors)]
        for kind in moments:
            problems += self._other_moments(reader, kind)
        if problems:
            raise CheckpointError(
                f"the checkpoint does not fit the model: {'; '.join(problems)} ({len(problems)} in all)"
            )
        for kind, tensors in kinds.items():
            for name, tensor in tensors.items():
                tensor.view(-1).copy_(reader.read(kind, name, 0, tensor.numel()))
        if weights_only:
            return
        for name, parameter in self._trainable.items():
            self._optimizer.state[parameter] = {kind: self._read_moment(reader, kind, name) for kind in moments}
        if self._scale and _LOSS_SCALE in reader.kinds():
            scale, good = reader.read(_LOSS_SCALE, _LOSS_SCALE, 0, 2).tolist()
            self._scale.scale, self._scale.good_updates = scale, int(good)

    def _other_moments(self, reader: ShardReader, kind: str) -> list[str]:
        present = set(reader.names(kind))
        found = [f"{name}: no {kind}" for name in self._trainable if name not in present]
        for name, parameter in self._trainable.items():
            needed = 1 if kind == STEP else parameter.numel()
            if name in present and (stored := reader.numel(kind, name)) != needed:
                found.append(f"{name}: {stored} elements of {kind} stored, {needed} needed")
        return found

    def _read_moment(self, reader: ShardReader, kind: str, name: str) -> Tensor:
        numel, parameter = reader.numel(kind, name), self._trainable[name]
        value = reader.read(kind, name, 0, numel)
        if kind == STEP:
            return value.reshape(())
        return value.reshape(parameter.shape).to(self._device)

    def full_state_dict(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._model.state_dict().items():
            yield name, tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)


def misfits(reader: ShardReader, kind: str, tensors: Mapping[str, Tensor]) -> list[str]:
    """Why tensors of a kind cannot be taken from the checkpoint: missing, unexpected or reshaped, by name."""
    present = set(reader.names(kind))
    found = [f"{name}: missing" for name in tensors if name not in present]
    found += [f"{name}: not in the model" for name in sorted(present - set(tensors))]
    for name in sorted(present & set(tensors)):
        stored, needed = reader.numel(kind, name), tensors[name].numel()
        if stored != needed:
            found.append(f"{name}: {stored} elements stored, {needed} needed")
    return found
