"""What an optimizer of a user's own may keep, and how its state is made before a checkpoint is loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from unigen_ds.core.errors import ConfigError
from unigen_ds.optim.optimizer import OptimizerConfig, check_state, element_wise, initialize_state, step_count


class Plain(torch.optim.SGD):
    """SGD, which keeps what a test lets it keep."""

    element_wise: Any = True

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad)
                self.keep(p, self.state[p], group)

    def keep(self, p: Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        state["a"], state["nothing"] = p.grad.clone(), None  # type: ignore[union-attr]


def step_once(keep: Any) -> torch.optim.Optimizer:
    parameter = Parameter(torch.ones(4, 6))
    parameter.grad = torch.ones(4, 6)
    optimizer = type("Changed", (Plain,), {"keep": keep})([parameter])
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("kept", lambda p: p.sum(0).detach(), r"keeps 'kept' for a parameter of shape \(4, 6\)"),
        ("kept", lambda p: p.detach().bfloat16(), "keeps 'kept'"),
        ("kept", lambda p: {"a": p}, "keeps 'kept'"),
        ("step", lambda p: p.detach().clone(), "keeps 'step'"),
        ("step", lambda p: True, "keeps 'step' .*: True"),
        (None, lambda p: 3, "keeps 'count' in its parameter groups"),
    ],
)
def test_state_that_no_checkpoint_would_hold_is_refused(kind, value, words):
    def keep(self: Plain, p: Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.update({kind: value(p)}) if kind else group.update(count=value(p))

    check_state(step_once(Plain.keep))
    with pytest.raises(ConfigError, match=words):
        check_state(step_once(keep))


@pytest.mark.parametrize("value", [None, "yes", 1])
def test_an_optimizer_must_declare_itself(value):
    with pytest.raises(ConfigError, match=r"Changed does not declare element_wise .*add the class attribute"):
        element_wise(OptimizerConfig(type=type("Changed", (Plain,), {"element_wise": value})).type)


def test_state_is_made_with_gradients_and_rates_of_zero():
    parameter = Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=0.5, weight_decay=0.1)
    initialize_state(optimizer, optimizer.step)
    assert torch.equal(parameter, torch.ones(3)) and parameter.grad is None and optimizer.param_groups[0]["lr"] == 0.5
    assert {kind: float(value.sum()) for kind, value in optimizer.state[parameter].items()} == {
        "step": 1.0, "exp_avg": 0.0, "exp_avg_sq": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize("example", [2.0, 1, torch.zeros((), dtype=torch.int64), torch.zeros(1)])
def test_a_step_count_keeps_its_form(example):
    count = step_count(example, 7.0)
    assert type(count) is type(example) and count == 7
    if isinstance(example, torch.Tensor):
        assert count.dtype == example.dtype and count.shape == example.shape
