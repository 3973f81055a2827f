"""The state that an optimizer keeps for each parameter, found by training two small matrices with it on the CPU.

A checkpoint stores an optimizer's state under the names of the parameters, so that every engine can continue it. This
works where the state of a parameter is fp32 tensors of its shape and a count named ``step``, made in the first update
and kept in ``optimizer.state[parameter]``. Anything else would be lost on a resume without a message, so it is refused
before a run starts; and so is an optimizer that is not what its ``element_wise`` declares. torch's AdamW, Adam and SGD
are known and not tried.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from unigen_ds.core.errors import ConfigError
from unigen_ds.core.shards import STEP
from unigen_ds.optim.optimizer import OptimizerConfig, construct, element_wise, is_torchs, optimizer_class

_SHAPE, _UPDATES = (4, 6), 2


@dataclass(frozen=True)
class OptimizerState:
    """The state that an optimizer keeps for each parameter that it trains."""

    kinds: frozenset[str] | None
    """Names, ``step`` included; None: not known, any that a checkpoint has."""
    step: int | float | Tensor | None = None
    """An example of its step count; None: as torch's optimizers keep it."""

    def make_step(self, value: float, parameter: Tensor, options: Mapping[str, Any]) -> int | float | Tensor:
        """A step count in the form in which the optimizer keeps it; ``options``: of the parameter's group.

        torch keeps it on the parameter's device where the optimizer is fused or capturable, because its kernels read it
        there, else on the CPU.
        """
        if isinstance(self.step, Tensor):
            return torch.full_like(self.step, value)
        if self.step is not None:
            return type(self.step)(value)
        on_device = options.get("fused") or options.get("capturable")
        return torch.full((), value, dtype=torch.float32, device=parameter.device if on_device else "cpu")


ADAMW = OptimizerState(frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", STEP}))
"""The state of torch's AdamW; the third with ``amsgrad`` alone."""


def state_of(cfg: OptimizerConfig) -> OptimizerState:
    """Return the state of the config's optimizer. Raises ``ConfigError`` where it cannot be stored or continued."""
    cls = optimizer_class(cfg.type)
    if is_torchs(cls) and element_wise(cfg.type):
        return OptimizerState(None)
    with torch.random.fork_rng(devices=[]):  # the draws of a run must not depend on this
        return _tried(cls, cfg)


def _tried(cls: type[torch.optim.Optimizer], cfg: OptimizerConfig) -> OptimizerState:
    numel = _SHAPE[0] * _SHAPE[1]
    weights = [torch.linspace(-1.0, 1.0, numel).view(_SHAPE), torch.linspace(0.5, -2.0, numel).view(_SHAPE)]
    whole, state = _train(cls, cfg, weights)
    if element_wise(cfg.type):
        flat, middle = weights[0].view(-1), 7
        parts, _ = _train(cls, cfg, [flat[:middle], flat[middle:]])
        if not _close(torch.cat(parts), whole[0].view(-1)):
            raise ConfigError(
                f"optimizer {cls.__name__} declares element_wise = True, but a matrix that it trains in two parts"
                " becomes another than the whole one",
                allowed="True only where an element's update depends on its own gradient and state alone",
                remedy=f"set element_wise = False in {cls.__name__}: it is then computed on whole matrices",
            )
    else:
        alone, _ = _train(cls, cfg, weights[:1])
        if not _close(alone[0], whole[0]):
            raise ConfigError(
                f"optimizer {cls.__name__} updates a matrix otherwise where there is a second one",
                allowed="an update that depends on one matrix, its gradient and its state: matrices are computed one by"
                " one, on several processes",
            )
    return state


def _close(a: Tensor, b: Tensor) -> bool:
    """Kernels may round the last elements of a tensor otherwise than the others."""
    return torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def _train(
    cls: type[torch.optim.Optimizer], cfg: OptimizerConfig, weights: Sequence[Tensor]
) -> tuple[list[Tensor], OptimizerState]:
    """A few updates of copies of ``weights``: the results, and what is kept for the first."""
    parameters = [Parameter(weight.clone()) for weight in weights]
    optimizer = construct(cls, [{"params": parameters, "lr": 0.01, "weight_decay": 0.0}], cfg.arguments)
    if optimizer.state:
        raise ConfigError(
            f"optimizer {cls.__name__} makes state in its constructor",
            allowed="state that is made in the first step(): an engine may exchange the parameters before it",
        )
    settings = _settings(optimizer)
    for number in range(1, _UPDATES + 1):
        for parameter in parameters:  # of an element its own value alone: parts have the gradients of the whole
            parameter.grad = torch.sin(17.0 * number * parameter.detach())
        try:
            optimizer.step()
        except Exception as error:
            problem = f"optimizer {cls.__name__} fails on parameters of shape {tuple(weights[0].shape)}: {error}"
            raise ConfigError(problem) from error
    if (now := _settings(optimizer)) != settings:
        changed = sorted(key for key in now if now[key] != settings.get(key))
        raise ConfigError(
            f"optimizer {cls.__name__} changes {', '.join(changed)} of its parameter groups in a step, unsaved",
            allowed="state in self.state[parameter]",
        )
    return [parameter.detach() for parameter in parameters], _kept(cls, parameters[0], optimizer.state[parameters[0]])


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy({key: value for key, value in optimizer.param_groups[0].items() if key != "params"})


def _kept(cls: type, parameter: Tensor, state: Mapping[str, Any]) -> OptimizerState:
    """Raises ``ConfigError`` naming what cannot be stored."""
    kinds: set[str] = set()
    for kind, value in state.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        one = number or (isinstance(value, Tensor) and value.numel() == 1)
        whole = isinstance(value, Tensor) and value.shape == parameter.shape and value.dtype == torch.float32
        if value is not None and not (one if kind == STEP else whole):
            text = f"a {tuple(value.shape)} tensor of {value.dtype}" if isinstance(value, Tensor) else repr(value)
            raise ConfigError(
                f"optimizer {cls.__name__} keeps {kind!r} for a parameter of shape {tuple(parameter.shape)}: {text}",
                allowed=f"fp32 tensors of the parameter's shape, and {STEP!r}, one number: nothing else is saved",
            )
        if value is not None:
            kinds.add(kind)
    return OptimizerState(frozenset(kinds), state.get(STEP))
