"""An element-wise optimizer, a curve and a hook."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from unigen_ds import CURVES, HOOKS, OPTIMIZERS, Curve, Hook, Point, Run, UpdateResult, global_losses


@OPTIMIZERS.register_module()
class SoftSign(torch.optim.Optimizer):
    """Steps of ``lr * mean / (|mean| + 0.01)``, where ``mean`` is that of the last gradients."""

    element_wise = True

    def __init__(self, params: Iterable[Any], *, lr: float, weight_decay: float = 0.0, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "beta": beta})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "mean": torch.zeros_like(p)}
                state["step"] += 1
                state["mean"].lerp_(p.grad, 1 - group["beta"])
                mean = state["mean"] / (1 - group["beta"] ** state["step"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.addcdiv_(mean, mean.abs() + 0.01, value=-group["lr"])


@CURVES.register_module()
@dataclass(frozen=True, kw_only=True)
class InverseSqrtLR(Curve):
    """The rate is multiplied by ``1 / sqrt(1 + steps / flat)``."""

    flat: float = 10.0
    needs_end = False

    @staticmethod
    def evaluate(point: Point, arguments: Mapping[str, Any]) -> float:
        return point.given / math.sqrt(1 + point.since / point.step / arguments["flat"])


@HOOKS.register_module()
class LowestLossHook(Hook):
    """The lowest loss of all updates so far, among the metrics of each checkpoint."""

    name = "lowest_loss"
    kept = ("lowest",)  # its state in checkpoints
    lowest = math.inf

    def after_update(self, run: Run, result: UpdateResult) -> None:
        self.lowest = min(self.lowest, global_losses(result)["loss"] or math.inf)

    def before_save_checkpoint(self, run: Run, metrics: dict[str, float]) -> None:
        metrics["lowest_loss"] = self.lowest
