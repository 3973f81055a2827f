"""The optimizer settings of a config, as every engine takes them: groups by name, one config, one torch optimizer.

On floor 1, because an engine builds its optimizer after it has sharded the model, and a wing imports ``core`` alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from unigen_ds.core.errors import ConfigError, suggestion
from unigen_ds.core.registry import check_arguments

COMPUTE_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = tuple(COMPUTE_DTYPE)


@dataclass(frozen=True)
class ParamGroup:
    """Parameters, by name, that share hyper-parameters."""

    name: str
    lr: float
    weight_decay: float
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class OptimizerConfig:
    """What ``optim_wrapper`` asks for, apart from groups and accumulation."""

    type: str = "AdamW"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the torch optimizer except ``lr`` and ``weight_decay`` (``betas``, ``eps``, ...)."""
    max_norm: float | None = None
    """Gradient clipping threshold on the global norm; None: no clipping."""
    precision: str = "fp32"
    fused: bool = False
    """The run's choice where ``arguments`` make none: torch's fused kernel, if the engine steps tensor by tensor."""

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ConfigError(
                f"precision is {self.precision!r}",
                allowed=", ".join(PRECISIONS),
                remedy=suggestion(str(self.precision), PRECISIONS),
            )
        number = isinstance(self.max_norm, (int, float)) and not isinstance(self.max_norm, bool)
        if self.max_norm is not None and not (number and self.max_norm > 0):
            raise ConfigError(f"clip_grad.max_norm is {self.max_norm!r}", allowed="a positive number, or None")


OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "SGD": torch.optim.SGD,
}


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The class of a name in ``OPTIMIZERS``. Raises ``ConfigError`` naming the suggestion."""
    if not isinstance(name, str) or name not in OPTIMIZERS:
        raise ConfigError(
            f"optimizer.type is {name!r}", allowed=", ".join(OPTIMIZERS), remedy=suggestion(str(name), OPTIMIZERS)
        )
    return OPTIMIZERS[name]


def step_tensor(step: float, parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """The step count of a parameter as torch keeps it: on the parameter's device where the optimizer is fused or
    capturable, because its kernels read it there, else on the CPU.
    """
    on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    return torch.full((), step, dtype=torch.float32, device=parameter.device if on_device else "cpu")


def default_weight_decay(name: str) -> float:
    """torch's own default, where the config gives none: 0.01 for AdamW, 0 for Adam and SGD."""
    return float(inspect.signature(optimizer_class(name)).parameters["weight_decay"].default)


def default_fused(name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a new run uses torch's fused kernel: for AdamW, where no argument chooses another implementation."""
    return name == "AdamW" and not {"fused", "foreach", "capturable", "differentiable"} & set(arguments)


def fuses(device: torch.device) -> bool:
    """Whether torch's AdamW has a fused kernel for a device."""
    try:
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1, device=device))], fused=True)
    except RuntimeError:
        return False
    return True


def build_torch_optimizer(
    cfg: OptimizerConfig, groups: Sequence[tuple[ParamGroup, Sequence[torch.nn.Parameter]]]
) -> torch.optim.Optimizer:
    """One torch group for each pair, in order, with its ``name``, ``lr`` and ``weight_decay``.

    The parameters are what the engine updates (a whole tensor, a shard, an fp32 master). Raises ``ConfigError`` for
    an unknown type, an unknown argument, or a value that torch refuses.
    """
    cls = optimizer_class(cfg.type)
    own = {"params", "lr", "weight_decay"} & set(cfg.arguments)
    if own:
        raise ConfigError(f"optimizer arguments hold {', '.join(sorted(own))}", allowed="what no parameter group sets")
    check_arguments(cls, cfg.arguments, where="optim_wrapper.optimizer")
    torch_groups: list[dict[str, Any]] = [
        {"params": list(parameters), "lr": group.lr, "weight_decay": group.weight_decay, "name": group.name}
        for group, parameters in groups
    ]
    try:
        return cls(torch_groups, **cfg.arguments)
    except (TypeError, ValueError, LookupError) as error:
        raise ConfigError(f"optimizer {cfg.type} with {dict(cfg.arguments)} cannot be built: {error}") from error
