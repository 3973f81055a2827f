"""The optimizer settings of a config, as every engine accepts them: groups by name, one config, one torch optimizer.

In layer 1, because an engine builds its optimizer after it has sharded the model, and layer 2 imports only ``core``.

An optimizer is a subclass of ``torch.optim.Optimizer`` in the registry ``OPTIMIZERS``. It declares ``element_wise``:
True where the update of an element depends on nothing but this element's gradient and state, so that it can be
computed on shards; False where it needs whole matrices (Muon). Such an optimizer trains matrices alone, and torch's
AdamW everything else (``JoinedOptimizer``). What its state may be: ``optim/optimizer_state.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from unigen_ds.config.registry import OPTIMIZERS, check_arguments, find
from unigen_ds.core.errors import ConfigError, suggestion

COMPUTE_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = tuple(COMPUTE_DTYPE)
AUTO = "auto"
WHERE = "optim_wrapper.optimizer"
OptimizerKind = str | type[torch.optim.Optimizer]
"""A name in ``OPTIMIZERS``, or a class."""
_OF_GROUPS = ("lr", "weight_decay")
"""Settings of the optimizer that each parameter group has."""


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
    """Of fp16: ``scale``, the first one, and ``growth_interval``, where they are set (``core/loss_scale.py``)."""
    fused: bool = False
    """The run's choice where ``arguments`` make none: torch's fused kernel, if the engine steps tensor by tensor."""
    adamw: Mapping[str, Any] = field(default_factory=dict)
    """The same as ``arguments``, of AdamW for the groups with ``by_adamw``."""

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


def settled_precision(given: str, stored: str | None = None) -> str:
    """``given``; for ``'auto'`` that of the checkpoint (``stored``), else ``bf16``; ``fp16`` on a device without it.

    A device counts as one with bf16 where it does not merely emulate it; a CPU computes bf16 always, and fp16 not under
    every engine.
    """
    if given != AUTO:
        return given
    wanted = stored if stored in PRECISIONS else "bf16"
    return "fp16" if wanted == "bf16" and not computes_bf16() else wanted


def computes_bf16() -> bool:
    """Whether this process's device computes bf16 by itself."""
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)


TORCHS: dict[str, bool] = {"AdamW": True, "Adam": True, "SGD": True, "Muon": False}
"""Optimizers of torch, which declare nothing themselves: whether they are element-wise. Muon: from torch 2.9 on."""
for _name in TORCHS:
    if hasattr(torch.optim, _name):
        OPTIMIZERS.register_module(module=getattr(torch.optim, _name))


def is_torchs(cls: type) -> bool:
    """Whether a class is torch's own."""
    return cls.__module__.startswith("torch.optim")


def optimizer_class(kind: OptimizerKind) -> type[torch.optim.Optimizer]:
    """The class of a name in ``OPTIMIZERS``, or ``kind`` itself. Raises ``ConfigError`` naming the suggestion."""
    names = OPTIMIZERS.module_dict
    if not isinstance(kind, type) and kind not in names:
        raise ConfigError(f"optimizer.type is {kind!r}", allowed=", ".join(names), remedy=suggestion(str(kind), names))
    return find(OPTIMIZERS, {"type": kind}, where=WHERE)


def element_wise(kind: OptimizerKind) -> bool:
    """Whether an optimizer works on shards. Raises ``ConfigError`` where a class does not declare it."""
    cls = optimizer_class(kind)
    declared = TORCHS.get(cls.__name__) if is_torchs(cls) else getattr(cls, "element_wise", None)
    if not isinstance(declared, bool):
        raise ConfigError(
            f"optimizer {cls.__name__} does not declare element_wise (it is {declared!r})",
            allowed="element_wise = True, where an element's update depends on its own gradient and state alone; False,"
            " where it needs whole matrices",
            remedy=f"add the class attribute to {cls.__name__}",
        )
    return declared


def adamw_settings(optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
    """``optim_wrapper.optimizer.adamw``: what AdamW does beside an optimizer of whole matrices; else empty.

    Raises ``ConfigError`` where it is missing, or given to an element-wise optimizer.
    """
    kind, given = optimizer.get("type", "AdamW"), optimizer.get("adamw")
    if element_wise(kind):
        if given is not None:
            raise ConfigError(
                f"{WHERE}.adamw is given, and {optimizer_class(kind).__name__} trains every parameter itself",
                allowed="adamw beside an optimizer of whole matrices, such as Muon",
            )
        return {}
    if not isinstance(given, Mapping) or given.get("lr") is None:
        raise ConfigError(
            f"{WHERE}.adamw is {given!r}: {optimizer_class(kind).__name__} trains matrices alone",
            allowed="dict(lr=..., betas=..., weight_decay=...) of AdamW, for 1-D parameters, embeddings and the head",
            remedy=f"add adamw=dict(lr=3e-4) to {WHERE}",
        )
    return given


def step_tensor(step: float, parameter: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
    """The step count of a parameter as torch keeps it: on the parameter's device where the optimizer is fused or
    capturable (``options``: of its group), because its kernels read it there, else on the CPU.
    """
    on_device = options.get("fused") or options.get("capturable")
    return torch.full((), step, dtype=torch.float32, device=parameter.device if on_device else "cpu")


def default_weight_decay(kind: OptimizerKind) -> float:
    """The class's own default, where the config has none: 0.01 for AdamW, 0.1 for Muon, 0 for Adam and SGD."""
    parameter = inspect.signature(optimizer_class(kind)).parameters.get("weight_decay")
    number = parameter is not None and isinstance(parameter.default, (int, float))
    return float(parameter.default) if parameter is not None and number else 0.0


def default_fused(name: OptimizerKind, arguments: Mapping[str, Any]) -> bool:
    """Whether a new run uses torch's fused kernel: for AdamW, where no argument chooses another implementation."""
    given = {key for key, value in arguments.items() if value is not None}
    return name == "AdamW" and not {"fused", "foreach", "capturable", "differentiable"} & given


def fuses(device: torch.device) -> bool:
    """Whether torch's AdamW has a fused kernel for a device."""
    try:
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1, device=device))], fused=True)
    except RuntimeError:
        return False
    return True


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
        """One update of everything."""
        self.matrices.step()
        self.step_rest()

    def step_rest(self) -> None:
        """One update of what AdamW trains."""
        if self.rest is not None:
            self.rest.step()


def build_torch_optimizer(
    cfg: OptimizerConfig, groups: Sequence[tuple[ParamGroup, Sequence[torch.nn.Parameter]]]
) -> torch.optim.Optimizer:
    """One torch group for each pair, in order, with its ``name``, ``lr`` and ``weight_decay``.

    The parameters are what the engine updates (a whole tensor, a shard, an fp32 master). A ``JoinedOptimizer`` where
    the optimizer is not element-wise. Raises ``ConfigError`` for an unknown type, an unknown argument, or a value that
    torch refuses.
    """
    cls = optimizer_class(cfg.type)
    torch_groups: list[dict[str, Any]] = [
        {"params": list(parameters), "lr": group.lr, "weight_decay": group.weight_decay, "name": group.name}
        for group, parameters in groups
    ]
    if element_wise(cfg.type):
        return _build(cls, torch_groups, cfg.arguments, where=WHERE)
    rest = [made for made, (group, _) in zip(torch_groups, groups, strict=True) if group.by_adamw]
    matrices = [made for made, (group, _) in zip(torch_groups, groups, strict=True) if not group.by_adamw]
    return JoinedOptimizer(
        _build(cls, matrices, cfg.arguments, where=WHERE),
        _build(torch.optim.AdamW, rest, cfg.adamw, where=f"{WHERE}.adamw") if rest else None,
        torch_groups,
    )


def construct(
    cls: type[torch.optim.Optimizer], groups: list[dict[str, Any]], arguments: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Call the class. Where its ``lr`` has no default it is that of the first group; every group has its own."""
    lr = inspect.signature(cls).parameters.get("lr")
    needed = {"lr": groups[0]["lr"]} if lr is not None and lr.default is lr.empty else {}
    return cls(groups, **needed, **arguments)


def _build(
    cls: type[torch.optim.Optimizer], groups: list[dict[str, Any]], arguments: Mapping[str, Any], *, where: str
) -> torch.optim.Optimizer:
    own = {"params", *_OF_GROUPS} & set(arguments)
    if own:
        raise ConfigError(f"optimizer arguments hold {', '.join(sorted(own))}", allowed="what no parameter group sets")
    check_arguments(cls, arguments, where=where)
    known = inspect.signature(cls).parameters.values()
    decays = any(p.name == "weight_decay" or p.kind is p.VAR_KEYWORD for p in known)
    if not decays and (decayed := [group["name"] for group in groups if group["weight_decay"]]):
        raise ConfigError(
            f"optimizer {cls.__name__} has no weight_decay, and the group {decayed[0]!r} sets one",
            remedy=f"delete weight_decay, or add it to {cls.__name__}",
        )
    try:
        return construct(cls, groups, arguments)
    except (TypeError, ValueError, LookupError) as error:
        raise ConfigError(f"optimizer {cls.__name__} with {dict(arguments)} cannot be built: {error}") from error
