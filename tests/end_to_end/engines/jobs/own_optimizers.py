"""Optimizers of a user's own, loaded through ``custom_imports``; and a hook that gives every engine equal gradients."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from unigen_ds.config.registry import HOOKS, OPTIMIZERS
from unigen_ds.hooks.base import Hook, Run


class _WithVelocity(torch.optim.Optimizer):
    def __init__(
        self, params: Iterable[Any], *, lr: float = 1e-3, weight_decay: float = 0.05, beta: float = 0.8
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "beta": beta})


@OPTIMIZERS.register_module()
class NormalizedMomentum(_WithVelocity):
    """Not element-wise: the update of a matrix is divided by its norm. The rate falls with a count of its own."""

    element_wise = False

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "velocity": p.grad.clone()}
                state["step"] += 1
                state["velocity"].lerp_(p.grad, 1 - group["beta"])
                rate = group["lr"] / state["step"] ** 0.5
                p.sub_(rate * state["velocity"] / torch.linalg.matrix_norm(state["velocity"]))


@HOOKS.register_module()
class EqualGradientsHook(Hook):
    """Before each step of a torch optimizer: gradients that depend on names and the number of the update alone."""

    def before_train(self, run: Run) -> None:
        backend: Any = run.backend
        step = backend.step

        @torch.no_grad()
        def new_step() -> Any:
            backend._gradients()  # none is absent
            for shard in backend.master_shards():
                whole = gradient(shard.name, shard.numel, run.progress.updates)
                grad = backend._masters[shard.name].grad
                local = getattr(grad, "_local_tensor", grad)
                local.copy_(whole[shard.flat_start : shard.flat_stop].view(local.shape))
            return step()

        backend.step = new_step


def gradient(name: str, numel: int, update: int) -> Tensor:
    """Normal numbers, other ones for each name and update."""
    seed = zlib.crc32(f"{name}/{update}".encode())
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))
