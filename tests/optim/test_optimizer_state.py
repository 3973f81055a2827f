"""What an optimizer of a user's own may keep, and that it is what it declares: found before a run starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from tests import needs
from unigen_ds.core.errors import ConfigError
from unigen_ds.optim.optimizer import OptimizerConfig, element_wise
from unigen_ds.optim.optimizer_state import state_of


class Plain(torch.optim.Optimizer):
    """SGD, which a test changes in one point."""

    element_wise: Any = True

    def __init__(self, params: Any, *, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, p.grad, self.state[p], group)

    def update(self, p: Parameter, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(group["lr"] * grad)


def kept(**methods: Any) -> Any:
    """What is found of ``Plain`` with other attributes and methods."""
    return state_of(OptimizerConfig(type=type("Changed", (Plain,), methods)))


def keeping(value: Any, *, kind: str = "kept") -> Any:
    def update(self: Plain, p: Parameter, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state[kind] = value(p)
        p.sub_(group["lr"] * grad)

    return update


def test_state_is_found_by_name():
    def update(self: Plain, p: Parameter, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        state["a"] = state["b"] = grad.clone()
        state["nothing"] = None

    found = kept(update=update)
    assert found.kinds == {"a", "b", "step"}
    made = found.make_step(5.0, torch.zeros(2), {})
    assert made == 5 and type(made) is int
    assert kept().kinds == frozenset()


@pytest.mark.parametrize(
    ("example", "wanted"),
    [
        (lambda p: 2.0, 7.0),
        (lambda p: torch.zeros((), dtype=torch.int64), torch.tensor(7)),
        (lambda p: torch.zeros(1), torch.tensor([7.0])),
    ],
)
def test_a_step_count_keeps_its_form(example, wanted):
    made = kept(update=keeping(example, kind="step")).make_step(7.0, torch.zeros(2), {})
    assert type(made) is type(wanted)
    assert made == wanted
    if isinstance(wanted, torch.Tensor):
        assert made.dtype == wanted.dtype and made.shape == wanted.shape


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_torchs_own_are_known(name):
    state = state_of(OptimizerConfig(type=name))
    step = state.make_step(3.0, torch.zeros(2), {})
    assert state.kinds is None and isinstance(step, torch.Tensor) and step.dtype == torch.float32


@needs.MUON
def test_muon_keeps_one_moment():
    assert state_of(OptimizerConfig(type="Muon")).kinds == {"momentum_buffer"}
    assert not element_wise("Muon") and element_wise("AdamW")


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        (lambda p: p.sum(0).detach(), "kept", r"keeps 'kept' for a parameter of shape \(4, 6\): a \(6,\) tensor"),
        (lambda p: p.detach().bfloat16(), "kept", "torch.bfloat16"),
        (lambda p: 3.0, "kept", "keeps 'kept' .*: 3.0"),
        (lambda p: {"a": p}, "kept", "keeps 'kept'"),
        (lambda p: p.detach().clone(), "step", "keeps 'step'"),
        (lambda p: True, "step", "keeps 'step' .*: True"),
    ],
)
def test_state_that_no_checkpoint_would_hold_is_refused(value, kind, words):
    with pytest.raises(ConfigError, match=words) as caught:
        kept(update=keeping(value, kind=kind))
    assert "fp32 tensors of the parameter's shape, and 'step'" in str(caught.value)


def test_state_in_the_groups_or_of_the_constructor_is_refused():
    def counts(self: Plain, p: Parameter, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        group["count"] = group.get("count", 0) + 1

    with pytest.raises(ConfigError, match="changes count of its parameter groups"):
        kept(update=counts)

    class Early(Plain):
        def __init__(self, params: Any, **settings: Any) -> None:
            super().__init__(params, **settings)
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["sum"] = torch.zeros_like(p)

    with pytest.raises(ConfigError, match="makes state in its constructor"):
        state_of(OptimizerConfig(type=Early))


def by_norm(self: Plain, p: Parameter, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    p.sub_(group["lr"] * grad / grad.norm())


def test_a_wrong_declaration_is_refused():
    with pytest.raises(ConfigError, match=r"declares element_wise = True, but a matrix .* element_wise = False"):
        kept(update=by_norm)
    assert kept(update=by_norm, element_wise=False).kinds == frozenset()


def test_matrices_must_not_depend_on_each_other():
    def step(self: Plain, closure: None = None) -> None:
        norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).sum()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad / norm)

    with pytest.raises(ConfigError, match="updates a matrix otherwise where there is a second one"):
        kept(step=step, element_wise=False)


@pytest.mark.parametrize("declared", [None, "yes", 1])
def test_an_optimizer_must_declare_itself(declared):
    with pytest.raises(ConfigError, match=r"Changed does not declare element_wise .*add the class attribute"):
        kept(element_wise=declared)


def test_an_optimizer_that_fails_is_named():
    def update(self: Plain, *arguments: Any) -> None:
        raise RuntimeError("no kernel")

    with pytest.raises(ConfigError, match=r"Changed fails on parameters of shape .*: no kernel"):
        kept(update=update)


@pytest.fixture
def draws() -> Iterator[None]:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.usefixtures("draws")
def test_the_random_numbers_of_a_run_stay_the_same():
    def update(self: Plain, p: Parameter, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(group["lr"] * grad * (1 + 1e-7 * torch.rand_like(p)))

    kept(update=update)
