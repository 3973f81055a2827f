"""The optimizer settings of a config, as every engine accepts them: groups by name, one config, one torch optimizer.

An optimizer is a subclass of ``torch.optim.Optimizer`` in the registry ``OPTIMIZERS``. It declares ``element_wise``:
True where the update of an element depends on nothing but this element's gradient and state, so that it can be
computed on shards; False where it needs whole matrices (Muon). Such an optimizer trains matrices alone, and torch's
AdamW everything else (``JoinedOptimizer``). A checkpoint stores its state under the names of the parameters: fp32
tensors of a parameter's shape and a count named ``step``, in ``optimizer.state[parameter]`` (``check_state``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unigen_ds.config.registry import OPTIMIZERS, find
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.shards import STEP

COMPUTE_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
AUTO_PRECISION = "auto"
WHERE = "optim_wrapper.optimizer"
OptimizerKind = str | type[torch.optim.Optimizer]
"""A name in ``OPTIMIZERS``, or a class."""


@dataclass(frozen=True)
class ParamGroup:
    """Parameters, by name, that share hyper-parameters."""

    name: str
    lr: float
    weight_decay: float
    parameters: tuple[str, ...]
    by_adamw: bool = False
    """Trained by AdamW, because the config's optimizer trains matrices alone."""


@dataclass(frozen=True)
class OptimizerConfig:
    """What ``optim_wrapper`` sets, apart from groups and accumulation."""

    type: OptimizerKind = "AdamW"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the torch optimizer except ``lr`` and ``weight_decay`` (``betas``, ``eps``, ...)."""
    max_norm: float | None = None
    """Gradient clipping threshold on the global norm; None: no clipping."""
    precision: str = "fp32"
    loss_scale: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of fp16's ``LossScale`` that are set: ``scale``, the first one, and ``growth_interval``."""
    adamw: Mapping[str, Any] = field(default_factory=dict)
    """The same as ``arguments``, of AdamW for the groups with ``by_adamw``."""


INIT_SCALE, GROWTH_INTERVAL = 2.0**16, 1000


@dataclass
class LossScale:
    """Loss scaling of fp16: halved on overflow, doubled after a run of good updates (Micikevicius et al., 2018)."""

    scale: float = INIT_SCALE
    good_updates: int = 0
    growth_interval: int = GROWTH_INTERVAL

    def record(self, *, applied: bool) -> None:
        """Record whether an update was applied; equal on all ranks, so the scale stays equal."""
        if not applied:
            self.scale, self.good_updates = max(self.scale / 2.0, 1.0), 0
            return
        self.good_updates += 1
        if self.good_updates >= self.growth_interval:
            self.scale, self.good_updates = self.scale * 2.0, 0


def settled_precision(precision: str, of_checkpoint: str | None = None) -> str:
    """``precision``; for ``'auto'`` that ``of_checkpoint``, else ``bf16``, or ``fp16`` on a device without
    it, such as one that emulates it. A CPU computes bf16 always, fp16 not under every engine."""
    if precision != AUTO_PRECISION:
        return precision
    choice = of_checkpoint if of_checkpoint in COMPUTE_DTYPE else "bf16"
    return "fp16" if choice == "bf16" and not computes_bf16() else choice


def computes_bf16() -> bool:
    """Whether this process's device computes bf16 by itself."""
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)


TORCHS: dict[str, bool] = {"AdamW": True, "Adam": True, "SGD": True, "Muon": False}
"""Optimizers of torch, which declare nothing themselves: whether they are element-wise. Muon: from torch 2.9 on."""
for _name in TORCHS:
    if hasattr(torch.optim, _name):
        OPTIMIZERS.register_module(module=getattr(torch.optim, _name))


def is_torchs(cls: type) -> bool:
    return cls.__module__.startswith("torch.optim")


def optimizer_class(kind: OptimizerKind) -> type[torch.optim.Optimizer]:
    """The class of a name in ``OPTIMIZERS``, or ``kind`` itself. Raises ``ConfigError`` naming the suggestion."""
    return find(OPTIMIZERS, {"type": kind}, where=WHERE)


def element_wise(kind: OptimizerKind) -> bool:
    """Whether an optimizer works on shards. Raises ``ConfigError`` where a class does not declare it."""
    cls = optimizer_class(kind)
    value = TORCHS.get(cls.__name__) if is_torchs(cls) else getattr(cls, "element_wise", None)
    if not isinstance(value, bool):
        raise ConfigError(
            f"optimizer {cls.__name__} does not declare element_wise (it is {value!r})",
            allowed="element_wise = True, where an element's update depends on its own gradient and state alone; False,"
            " where it needs whole matrices",
            remedy=f"add the class attribute to {cls.__name__}",
        )
    return value


def default_weight_decay(kind: OptimizerKind) -> float:
    """The class's own default, where the config has none: 0.01 for AdamW, 0.1 for Muon, 0 for Adam and SGD."""
    parameter = inspect.signature(optimizer_class(kind)).parameters.get("weight_decay")
    return float(parameter.default) if parameter is not None and isinstance(parameter.default, (int, float)) else 0.0


class JoinedOptimizer(torch.optim.Optimizer):
    """An optimizer of whole matrices, and AdamW for the rest: the groups of both in the config's order, one state."""

    def __init__(
        self, matrices: torch.optim.Optimizer, rest: torch.optim.Optimizer | None, groups: list[dict[str, Any]]
    ) -> None:
        super().__init__(groups, {})
        self.matrices, self.rest = matrices, rest
        for part in (matrices, rest):
            if part is not None:  # a group is the same dict here and there, and so is a parameter's state
                part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.matrices.step()
        self.step_rest()

    def step_rest(self) -> None:
        if self.rest is not None:
            self.rest.step()


def build_torch_optimizer(
    cfg: OptimizerConfig, groups: Sequence[tuple[ParamGroup, Sequence[torch.nn.Parameter]]]
) -> torch.optim.Optimizer:
    """One torch group for each pair, in order, with its ``name``, ``lr`` and ``weight_decay``, of what the engine
    updates (a whole tensor, a shard, an fp32 master). A ``JoinedOptimizer`` where the optimizer is not element-wise.
    Raises ``ConfigError`` for a value that torch refuses.
    """
    cls = optimizer_class(cfg.type)
    torch_groups: list[dict[str, Any]] = [
        {"params": list(parameters), "lr": group.lr, "weight_decay": group.weight_decay, "name": group.name}
        for group, parameters in groups
    ]
    if element_wise(cfg.type):
        return construct(cls, torch_groups, cfg.arguments)
    rest = [own for own, (group, _) in zip(torch_groups, groups, strict=True) if group.by_adamw]
    matrices = [own for own, (group, _) in zip(torch_groups, groups, strict=True) if not group.by_adamw]
    adamw = construct(torch.optim.AdamW, rest, cfg.adamw) if rest else None
    return JoinedOptimizer(construct(cls, matrices, cfg.arguments), adamw, torch_groups)


def construct(
    cls: type[torch.optim.Optimizer], groups: list[dict[str, Any]], arguments: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Call the class. Where its ``lr`` has no default it is that of the first group; every group has its own."""
    parameters = inspect.signature(cls).parameters
    decays = "weight_decay" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if not decays and any(group.get("weight_decay") for group in groups):
        problem = f"optimizer {cls.__name__} has no weight_decay, and a group sets one"
        raise ConfigError(problem, remedy="delete weight_decay, or add it to the class")
    lr = parameters.get("lr")
    lr_argument = {"lr": groups[0]["lr"]} if lr is not None and lr.default is lr.empty else {}
    try:
        return cls(groups, **lr_argument, **arguments)
    except (TypeError, ValueError, LookupError) as error:
        raise ConfigError(f"optimizer {cls.__name__} with {dict(arguments)} cannot be built: {error}") from error


def check_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``ConfigError`` where an optimizer keeps what no checkpoint stores; called after its first update."""
    if isinstance(optimizer, JoinedOptimizer):
        optimizer = optimizer.matrices
    name, keys = type(optimizer).__name__, {"params", "lr", "weight_decay", "name"}
    if is_torchs(type(optimizer)):
        return
    problems = [
        f"{key!r} in its parameter groups"
        for group in optimizer.param_groups
        for key, value in group.items()
        if key not in keys and (key not in optimizer.defaults or optimizer.defaults[key] is not value)
    ]
    for parameter, state in optimizer.state.items():
        for kind, value in state.items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            one = number or (isinstance(value, Tensor) and value.numel() == 1)
            whole = isinstance(value, Tensor) and (value.shape, value.dtype) == (parameter.shape, torch.float32)
            if value is not None and not (one if kind == STEP else whole):
                problems.append(f"{kind!r} for a parameter of shape {tuple(parameter.shape)}: {str(value)[:80]}")
    if problems:
        raise ConfigError(
            f"optimizer {name} keeps {problems[0]}, which a resume would lose",
            allowed=f"in self.state[parameter] fp32 tensors of the parameter's shape, and {STEP!r}, one number",
        )


@torch.no_grad()
def initialize_state(
    optimizer: torch.optim.Optimizer, step: Callable[[], Any], *, parameters: Sequence[Sequence[Tensor]] | None = None
) -> None:
    """Let an optimizer make its state, which a checkpoint then fills, as it fills the weights: ``step()`` with
    gradients and rates of 0. ``parameters``: of each group, where it has others."""
    groups = optimizer.param_groups
    before = [(group["params"], group["lr"]) for group in groups]
    members = [list(own) for own in parameters or [params for params, _ in before]]
    gradients = [[p.grad for p in own] for own in members]
    try:
        for group, own in zip(groups, members, strict=True):
            group.update(params=own, lr=0.0)
            for p in own:
                p.grad = torch.zeros_like(p)
        step()
    finally:
        for group, own, (params, lr), grads in zip(groups, members, before, gradients, strict=True):
            group.update(params=params, lr=lr)
            for p, gradient in zip(own, grads, strict=True):
                p.grad = gradient


def step_count(example: Any, value: float) -> Any:
    """A step count in the form of ``example``: a number, or a tensor on the device where the optimizer reads it."""
    return torch.full_like(example, value) if isinstance(example, Tensor) else type(example)(value)
