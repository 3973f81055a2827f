"""``optim_wrapper`` of a config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from unigen_ds.config.registry import argument_problems
from unigen_ds.config.section import AS_LIST, Section, argument_defaults
from unigen_ds.config.values import Choices, Number, Rule
from unigen_ds.core.errors import ConfigError, raise_any
from unigen_ds.optim.optimizer import (
    GROWTH_INTERVAL,
    INIT_SCALE,
    WHERE,
    default_weight_decay,
    element_wise,
    is_torchs,
    optimizer_class,
)

type_ = type
_Kind = str | type[Any]
"""``Optimizer`` has a field of that name."""
Finite = Annotated[Number, Field(ge=0, allow_inf_nan=False)]
Scale = Annotated[Number, Rule(lambda scale: scale >= 1 and math.frexp(scale)[0] == 0.5), Choices("a power of 2")]


class ClipGrad(Section):
    """Bound of the global gradient norm."""

    max_norm: Number | None = Field(default=None, gt=0)
    """a positive number, or None: no clipping."""


class LossScaling(Section):
    """The loss scale of fp16. mmengine's ``'dynamic'``, or a number, which is ``init_scale``."""

    init_scale: Scale | None = Field(
        default=None, description=f"the first scale; None: {INIT_SCALE:g}, or what a DeepSpeed config has"
    )
    growth_interval: int | None = Field(
        default=None, ge=1, description=f"good updates in a row that double it; None: {GROWTH_INTERVAL}, or the same"
    )

    @model_validator(mode="before")
    @classmethod
    def _written_short(cls, value: Any) -> Any:
        if value == "dynamic":
            return {}
        return {"init_scale": value} if isinstance(value, (int, float)) and not isinstance(value, bool) else value

    @property
    def arguments(self) -> dict[str, Any]:
        """What is set, as of ``LossScale``."""
        values = {"scale": self.init_scale, "growth_interval": self.growth_interval}
        return {key: value for key, value in values.items() if value is not None}


class Group(Section):
    """Parameters with a learning rate or a weight decay of their own."""

    pattern: str = Field(min_length=1)
    """Part of a parameter's name, or a regular expression."""
    name: str | None = None
    """Name of the group in logs and checkpoints; None: the pattern."""
    lr: Finite | None = None
    """Learning rate; 0 freezes; None: the optimizer's."""
    lr_mult: Finite | None = None
    """The same as a multiple of the optimizer's; one of the two."""
    weight_decay: Finite | None = None
    """None: the optimizer's."""

    @model_validator(mode="after")
    def _one_rate(self) -> Group:
        if self.lr is not None and self.lr_mult is not None:
            problem = f"paramwise_cfg.groups: {self.pattern!r} has lr and lr_mult"
            raise ConfigError(problem, allowed="one of the two")
        return self


class CustomKey(Section):
    """mmengine's entry of ``custom_keys``."""

    lr_mult: Finite = 1.0
    """Multiplies the learning rate."""
    decay_mult: Finite = 1.0
    """Multiplies the weight decay."""


class Paramwise(Section):
    """Learning rates and weight decay by parameter name."""

    groups: Annotated[tuple[Group, ...], AS_LIST] = ()
    """List of `dict(pattern, name, lr or lr_mult, weight_decay)`: `pattern` is part of a parameter's name or a regular
    expression; the first that matches wins; `lr=0` freezes; a pattern that matches nothing is an error."""
    custom_keys: Mapping[str, CustomKey] = Field(default={})
    """Mmengine's form, instead of `groups`: `dict(NAME=dict(lr_mult=0.1, decay_mult=0.0))`. `NAME` is part of a
    parameter's name; of several the longest wins, of equally long ones the first in the alphabet; the multipliers of
    norms and biases do not apply to what it matches."""
    norm_decay_mult: Finite = 1.0
    """Multiplies the weight decay of norms."""
    bias_decay_mult: Finite = 1.0
    """Multiplies that of biases."""

    @model_validator(mode="after")
    def _one_form(self) -> Paramwise:
        if self.groups and self.custom_keys:
            problem = "optim_wrapper.paramwise_cfg has groups and custom_keys"
            raise ConfigError(problem, allowed="one of the two")
        return self


class WithArguments(Section, extra="allow"):
    """A section that has the arguments of an optimizer's class beside its fields."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of the class, without the fields."""
        return dict(self.__pydantic_extra__ or {})


class AdamWPart(WithArguments):
    """AdamW beside an optimizer of whole matrices, with its own arguments beside the fields here."""

    lr: Finite
    """Learning rate of what AdamW trains."""
    weight_decay: Finite | None = None
    """None: AdamW's default."""
    patterns: Annotated[tuple[str, ...], AS_LIST] = ()
    """Parts of names, or regular expressions, of further matrices that AdamW trains."""

    @property
    def decay(self) -> float:
        return default_weight_decay("AdamW") if self.weight_decay is None else self.weight_decay


class Optimizer(WithArguments):
    """An optimizer and its arguments; those of its class beside the fields here."""

    type: _Kind = "AdamW"
    """a registered name, or a class."""
    lr: Finite
    """Learning rate of every group without one of its own; 0 freezes."""
    weight_decay: Finite | None = None
    """None: the default of the optimizer's class."""
    adamw: AdamWPart | None = None
    """Beside an optimizer of whole matrices (`Muon`): `dict(lr=..., weight_decay=..., patterns=[...])` of AdamW for 1-D
    parameters, embeddings, heads, and names with one of `patterns`."""

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, spec: Any) -> Any:
        """A class by its name where it is torch's."""
        kind = spec.get("type") if isinstance(spec, Mapping) else None
        return {**spec, "type": kind.__name__} if isinstance(kind, type_) and is_torchs(kind) else spec

    @model_validator(mode="after")
    def _check_known(self) -> Optimizer:
        try:
            cls, adamw = optimizer_class(self.type), self.adamw
            by_element = element_wise(self.type)
        except ConfigError as error:
            raise error.at("optim_wrapper") from error
        errors = argument_problems(cls, self.arguments, where=WHERE, from_run=("params",))
        if by_element and adamw is not None:
            problem = f"{WHERE}.adamw is set, and {cls.__name__} trains every parameter itself"
            errors.append(ConfigError(problem, allowed="adamw beside an optimizer of whole matrices, such as Muon"))
        if not by_element and adamw is None:
            errors.append(
                ConfigError(
                    f"{WHERE}.adamw is None: {cls.__name__} trains matrices alone",
                    allowed="dict(lr=..., betas=..., weight_decay=...) of AdamW, for the other parameters",
                    remedy=f"add adamw=dict(lr=3e-4) to {WHERE}",
                )
            )
        if adamw is not None:
            errors += argument_problems(optimizer_class("AdamW"), adamw.arguments, where=f"{WHERE}.adamw")
        raise_any(errors)
        return self

    @property
    def decay(self) -> float:
        return default_weight_decay(self.type) if self.weight_decay is None else self.weight_decay

    @classmethod
    def complete(cls, spec: Any) -> Any:
        if not isinstance(spec, Mapping):
            return spec
        values = {"type": "AdamW", **spec}
        try:
            defaults = argument_defaults(optimizer_class(values["type"]))
        except ConfigError:
            return values
        return {**defaults, **{key: value for key, value in values.items() if value is not None}}


class OptimWrapper(Section):
    """The optimizer, and what an update is made of."""

    optimizer: Optimizer
    """`dict(type, lr, weight_decay, ...)`: `AdamW` (default), `Adam`, `SGD` or `Muon` of torch or [one of your
    own](#optimizers), and its other arguments. `lr` is required; `weight_decay` is the class's default when left out.
    `adamw` of `Muon`: `dict(lr, weight_decay, betas, ..., patterns)`. `fused` of `AdamW`: see
    [the optimizer](engines/precision.md#the-optimizer)."""
    accumulative_counts: int = Field(default=1, ge=1)
    """Iterations per update. The loss is a mean over the targets of the whole update, so 8 x 1, 4 x 2 and 2 x 4 are the
    same training."""
    clip_grad: ClipGrad = ClipGrad()
    """`dict(max_norm=1.0)`: bound of the global gradient norm."""
    precision: Literal["fp32", "bf16", "fp16", "auto"] = "fp32"
    """`fp32`, `bf16`, or `fp16` with dynamic loss scaling. Weights, moments and EMA are always fp32. `auto`: `bf16`
    where the device of rank 0 computes it (compute capability 8.0 or more; every CPU), else `fp16`; each checkpoint
    records which, and a resume keeps that where the device computes it."""
    loss_scale: LossScaling = LossScaling()
    """Loss scale of `fp16`: `'dynamic'`; a number, the first scale, which is halved by each overflow and doubled by
    `growth_interval` good updates in a row; or `dict(init_scale, growth_interval)`."""
    paramwise_cfg: Paramwise = Paramwise()
    """Learning rates and weight decay by parameter name."""

    @model_validator(mode="after")
    def _scale_is_used(self) -> OptimWrapper:
        if self.loss_scale.arguments and self.precision in ("fp32", "bf16"):
            raise ConfigError(
                f"optim_wrapper.loss_scale is set and precision is {self.precision!r}", remedy="delete it: fp16 has one"
            )
        return self
