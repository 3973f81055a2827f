"""The torch optimizer of a config, and what ``OptimizerConfig`` refuses."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from unigen_ds.core.errors import ConfigError
from unigen_ds.core.optim import PRECISIONS, OptimizerConfig, ParamGroup, build_torch_optimizer


def groups() -> list[tuple[ParamGroup, list[Parameter]]]:
    a, b = Parameter(torch.tensor([1.0, -2.0])), Parameter(torch.tensor([3.0]))
    return [(ParamGroup("default", 1e-2, 0.1, ("a",)), [a]), (ParamGroup("frozen", 0.0, 0.0, ("b",)), [b])]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("AdamW", dict(betas=(0.9, 0.95), eps=1e-6)),
        ("Adam", dict(betas=(0.8, 0.9))),
        ("SGD", dict(momentum=0.9, nesterov=True)),
    ],
)
def test_by_name(name: str, arguments: dict) -> None:
    optimizer = build_torch_optimizer(OptimizerConfig(type=name, arguments=arguments), groups())
    assert type(optimizer) is getattr(torch.optim, name)
    assert [(g["name"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [
        ("default", 1e-2, 0.1),
        ("frozen", 0.0, 0.0),
    ]
    for group in optimizer.param_groups:
        assert {key: group[key] for key in arguments} == arguments


def test_adamw_is_the_default() -> None:
    assert type(build_torch_optimizer(OptimizerConfig(), groups())) is torch.optim.AdamW


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
        (dict(type="Lion"), "Allowed: AdamW, Adam, SGD"),
        (dict(arguments=dict(beta=(0.9, 0.95))), "did you mean 'betas'"),
        (dict(arguments=dict(lr=1e-3)), "hold lr"),
        (dict(arguments=dict(betas=(0.9, 1.5))), "cannot be built: Invalid beta"),
        (dict(type="SGD", arguments=dict(nesterov=True)), "Nesterov"),
    ],
)
def test_bad_optimizer(cfg: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_torch_optimizer(OptimizerConfig(**cfg), groups())


def test_precision() -> None:
    for precision in PRECISIONS:
        assert OptimizerConfig(precision=precision).precision == precision
    with pytest.raises(
        ConfigError, match=r"precision is 'bf61'. Allowed: fp32, bf16, fp16. Remedy: did you mean 'bf16'"
    ):
        OptimizerConfig(precision="bf61")


@pytest.mark.parametrize("max_norm", [0, -1.0, True, "1.0", float("nan")])
def test_bad_max_norm(max_norm) -> None:
    with pytest.raises(ConfigError, match="max_norm"):
        OptimizerConfig(max_norm=max_norm)
