"""The torch optimizer of a config, and what ``OptimizerConfig`` refuses."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from tests.support import needs
from unigen_ds.core.errors import ConfigError
from unigen_ds.optim.optimizer import OptimizerConfig, ParamGroup, build_torch_optimizer


def groups() -> list[tuple[ParamGroup, list[Parameter]]]:
    a, b = Parameter(torch.tensor([1.0, -2.0])), Parameter(torch.tensor([3.0]))
    return [(ParamGroup("default", 1e-2, 0.1, ("a",)), [a]), (ParamGroup("frozen", 0.0, 0.0, ("b",)), [b])]


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_steps_as_the_plain_optimizer_and_leaves_a_frozen_group(name: str) -> None:
    pairs = groups()
    optimizer = build_torch_optimizer(OptimizerConfig(type=name), pairs)
    (a,), (b,) = (parameters for _, parameters in pairs)
    twin = Parameter(a.detach().clone())
    plain = getattr(torch.optim, name)([twin], lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        for parameter in (a, b, twin):
            parameter.grad = parameter.detach() ** 2 + 1
        optimizer.step()
        plain.step()
    assert torch.equal(a, twin) and not torch.equal(a, torch.tensor([1.0, -2.0]))
    assert torch.equal(b, torch.tensor([3.0]))


@pytest.mark.parametrize(
    ("cfg", "words"),
    [
        (dict(type="AdmW"), "did you mean 'AdamW'"),
        (dict(type="Lion"), "valid: Adam, AdamW"),
        (dict(arguments=dict(beta=(0.9, 0.95))), "unexpected keyword argument 'beta'"),
        (dict(arguments=dict(betas=(0.9, 1.5))), "cannot be built: Invalid beta"),
        (dict(type="SGD", arguments=dict(nesterov=True)), "Nesterov"),
    ],
)
def test_bad_optimizer(cfg: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_torch_optimizer(OptimizerConfig(**cfg), groups())


# ---- whole matrices, and AdamW for the rest -------------------------------------------------------------------------


@needs.MUON
def test_two_optimizers_step_as_each_alone() -> None:
    torch.manual_seed(0)
    matrix, vector = Parameter(torch.randn(3, 5)), Parameter(torch.randn(4))
    twins = [Parameter(p.detach().clone()) for p in (matrix, vector)]
    groups = [
        (ParamGroup("default.adamw", 1e-3, 0.05, ("b",), by_adamw=True), [vector]),
        (ParamGroup("default", 2e-2, 0.1, ("a",)), [matrix]),
    ]
    config = OptimizerConfig(type="Muon", arguments={"momentum": 0.9}, adamw={"betas": (0.8, 0.9)})
    both = build_torch_optimizer(config, groups)
    alone = [
        torch.optim.Muon([twins[0]], lr=2e-2, weight_decay=0.1, momentum=0.9),
        torch.optim.AdamW([twins[1]], lr=1e-3, weight_decay=0.05, betas=(0.8, 0.9)),
    ]
    assert [group["name"] for group in both.param_groups] == ["default.adamw", "default"]
    for number in range(4):
        if number == 2:  # as a schedule does it
            both.param_groups[0]["lr"], both.param_groups[1]["lr"] = 5e-4, 1e-2
            alone[1].param_groups[0]["lr"], alone[0].param_groups[0]["lr"] = 5e-4, 1e-2
        for mine, twin in zip((matrix, vector), twins, strict=True):
            mine.grad = torch.sin(mine.detach() * (number + 2))
            twin.grad = mine.grad.clone()
        for optimizer in (both, *alone):
            optimizer.step()
    assert torch.equal(matrix, twins[0]) and torch.equal(vector, twins[1])
    assert set(both.state[matrix]) == {"momentum_buffer"} and "exp_avg" in both.state[vector]


def test_weight_decay_that_an_optimizer_does_not_have_is_refused() -> None:
    class NoDecay(torch.optim.Optimizer):
        element_wise = True

        def __init__(self, params, *, lr: float = 0.1) -> None:
            super().__init__(params, {"lr": lr})

    with pytest.raises(ConfigError, match="NoDecay has no weight_decay, and a group sets one"):
        build_torch_optimizer(OptimizerConfig(type=NoDecay), groups())
