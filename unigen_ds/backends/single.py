"""One process, plain PyTorch: no sharding, no communication. The reference that every other engine must match."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unigen_ds.backends.memory import allocate
from unigen_ds.backends.torch_optimizer import TorchOptimizerBackend
from unigen_ds.config.registry import BACKENDS
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.json_values import STAMP
from unigen_ds.core.shards import OPTIMIZER_FILE, Shard, shard_key
from unigen_ds.optim.optimizer import COMPUTE_DTYPE, ParamGroup
from unigen_ds.system.dist import env_world_size
from unigen_ds.system.outputs import Entry, StateFiles, safetensors_output


@BACKENDS.register_module(name="single")
class SingleBackend(TorchOptimizerBackend):
    """fp32 masters; with ``bf16`` or ``fp16`` the model holds rounded copies and gradients are summed in fp32."""

    lighter = "deepspeed:zero2_offload"
    for_more_processes = "deepspeed:zero2"

    def __init__(self) -> None:
        if env_world_size() > 1:
            raise ConfigError(
                f"backend 'single' was started with {env_world_size()} processes",
                remedy="one process (tools/resume.py: --world-size 1), or --backend fsdp or deepspeed:zero2 for several"
                " (they shard), --backend fsdp:NO_SHARD (plain data parallel)",
            )
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def prepare(self, model: nn.Module, param_groups: Sequence[ParamGroup]) -> None:
        allocate(model, lambda tensor: torch.empty_like(tensor, device=self._device))
        self._parameters = dict(model.to(self._device).named_parameters())
        self._low_precision = self._cfg.precision != "fp32"
        masters: dict[str, nn.Parameter] = {}
        for name, parameter in self._parameters.items():
            masters[name] = parameter
            if self._low_precision and parameter.dtype == torch.float32:  # else it is held in low precision alone
                masters[name] = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
                parameter.data = parameter.data.to(COMPUTE_DTYPE[self._cfg.precision])
        self._own(model, masters, param_groups)
        self.log_summary("single")

    def topology(self) -> dict[str, Any]:
        return {"engine": "single", "dp_size": 1, "precision": self._cfg.precision}

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        yield

    def backward(self, loss: Tensor) -> None:
        (loss * self._scale.scale if self._scale else loss).backward()
        for name in self._trainable if self._low_precision else ():  # add this micro-batch's to the fp32 sums
            parameter, master = self._parameters[name], self._masters[name]
            if parameter.grad is not None:
                gradient = parameter.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None

    def _update(self) -> None:
        super()._update()
        self.refresh_copies()

    @torch.no_grad()
    def refresh_copies(self) -> None:
        if self._low_precision:
            copies = [p.data for p in self._parameters.values()]
            torch._foreach_copy_(copies, [self._masters[name].data for name in self._parameters])

    def _shards(self, tensors: Mapping[str, Tensor]) -> list[Shard]:
        return [Shard(name, tuple(t.shape), 0, t.detach().view(-1)) for name, t in tensors.items()]

    def state_files(self) -> StateFiles:
        """``model.safetensors`` under the model's own names (any tool reads it) and ``optimizer.safetensors``."""
        weights = self._without_base({**self._masters, **self.buffers()})
        state = [
            Entry.of(shard_key(kind, name, 0), value.reshape(-1))
            for (kind, name), value in self._optimizer_tensors().items()
        ]
        metadata = {"format": "pt", STAMP: self.stamp}
        files = [
            safetensors_output("model.safetensors", [Entry.of(*item) for item in weights.items()], metadata),
            safetensors_output(OPTIMIZER_FILE, state, metadata),
        ]
        return StateFiles("safetensors", files)
