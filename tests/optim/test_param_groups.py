"""The learning rate and weight decay of each parameter."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from torch import nn

from tests.support import needs
from unigen_ds.core.errors import ConfigError
from unigen_ds.optim.param_groups import build_param_groups
from unigen_ds.optim.settings import Optimizer, OptimWrapper

OPTIMIZER = dict(type="AdamW", lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.connector = nn.Linear(4, 4)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"proj": nn.Linear(4, 4), "q_norm": nn.LayerNorm(4)}) for _ in range(2)
        )
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def build(paramwise=None, model: nn.Module | None = None, **optimizer):
    model = model or Model()
    wrapper = OptimWrapper.parse(
        {"optimizer": {**OPTIMIZER, **optimizer}, "paramwise_cfg": paramwise}, where="optim_wrapper"
    )
    return build_param_groups(model.named_parameters(), wrapper.optimizer, wrapper.paramwise_cfg)


def names(groups) -> dict[str, tuple[str, ...]]:
    return {group.name: group.parameters for group in groups}


def test_patterns() -> None:
    last = dict(pattern=r"^layers\.1\.", name="last layer", lr_mult=0.5, weight_decay=0.0)
    groups = build(dict(groups=[dict(pattern="connector", lr=5e-3), last]))
    rates = [(g.name, g.lr, g.weight_decay) for g in groups]
    assert rates == [("default", 1e-4, 0.1), ("connector", 5e-3, 0.1), ("last layer", 5e-5, 0.0)]
    assert names(groups)["connector"] == ("connector.weight", "connector.bias")
    assert all(name.startswith("layers.1.") for name in names(groups)["last layer"])
    every = [name for group in groups for name in group.parameters]
    assert sorted(every) == sorted(dict(Model().named_parameters())), "each parameter once"


def test_the_first_match_wins() -> None:
    groups = names(build(dict(groups=[dict(pattern="layers.0", lr=1.0), dict(pattern="layers", lr=2.0)])))
    assert {n.split(".")[1] for n in groups["layers.0"]} == {"0"}
    assert {n.split(".")[1] for n in groups["layers"]} == {"1"}


def test_a_pattern_that_is_no_regular_expression_is_a_part_of_a_name() -> None:
    model = nn.ModuleDict({"a(b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    groups = names(build(dict(groups=[dict(pattern="a(b", lr=1.0)]), model))
    assert groups["a(b"] == ("a(b.weight", "a(b.bias")


@pytest.mark.parametrize("rule", [dict(lr=0.0), dict(lr_mult=0), dict(lr=0, weight_decay=0.3)])
def test_a_learning_rate_of_zero_freezes(rule: dict) -> None:
    """The group remains in the optimizer, without decay: AdamW changes nothing in it, even with a gradient."""
    model = Model()
    groups = build(dict(groups=[dict(pattern="vision", **rule)]), model)
    assert [(g.name, g.lr, g.weight_decay) for g in groups][1] == ("vision", 0.0, 0.0)


def test_only_trainable_and_tied_once() -> None:
    model = Model()
    model.vision.requires_grad_(False)
    twice = [*model.named_parameters(remove_duplicate=False), *model.named_parameters(prefix="again")]
    (group,) = build_param_groups(twice, Optimizer.parse(OPTIMIZER))
    assert "embed.weight" in group.parameters and "head.weight" not in group.parameters
    assert not any(name.startswith(("vision", "again")) for name in group.parameters)
    assert len(group.parameters) == sum(p.requires_grad for p in model.parameters())


PARAMWISE = dict(norm_decay_mult=0.0, bias_decay_mult=0.5, groups=[dict(pattern="connector", lr=5e-3)])
EXPECTED = {
    "default": ("vision.0.weight", "layers.0.proj.weight", "layers.1.proj.weight", "embed.weight"),
    "default.norm": ("vision.1.weight", *(f"layers.{i}.q_norm.{leaf}" for i in (0, 1) for leaf in ("weight", "bias"))),
    # vision.1 is a LayerNorm whose name does not show it: its bias is a bias
    "default.bias": ("vision.0.bias", "vision.1.bias", "layers.0.proj.bias", "layers.1.proj.bias"),
    "connector": ("connector.weight",),
    "connector.bias": ("connector.bias",),
}


class TestDecayMultipliers:
    def test_split_by_name(self) -> None:
        groups = build(PARAMWISE)
        assert names(groups) == EXPECTED
        assert {g.name: (g.lr, g.weight_decay) for g in groups} == {
            "default": (1e-4, 0.1),
            "default.norm": (1e-4, 0.0),
            "default.bias": (1e-4, 0.05),
            "connector": (5e-3, 0.1),
            "connector.bias": (5e-3, 0.05),
        }

    def test_zero3_shapes_change_nothing(self) -> None:
        """Under ZeRO-3 every ``p.shape`` is ``(0,)`` and the true one is ``ds_shape``: no rule may read p.ndim."""
        model = Model()
        for parameter in model.parameters():
            parameter.ds_shape = parameter.shape
            parameter.data = torch.empty(0)
        assert {p.ndim for p in model.parameters()} == {1}
        assert names(build(PARAMWISE, model)) == EXPECTED


class TestErrors:
    def test_a_pattern_that_matches_nothing(self) -> None:
        with pytest.raises(ConfigError, match=r"'conector' matches no parameter.*vision\.0\.weight.*\(15 in all\)"):
            build(dict(groups=[dict(pattern="conector", lr=1.0)]))

    def test_a_pattern_after_a_wider_one(self) -> None:
        with pytest.raises(ConfigError, match=r"earlier pattern matched \(layers\.0.*more specific pattern first"):
            build(dict(groups=[dict(pattern="layers", lr=1.0), dict(pattern="layers.0", lr=2.0)]))

    def test_a_pattern_of_frozen_parameters_warns(self, caplog: pytest.LogCaptureFixture) -> None:
        model = Model()
        model.vision.requires_grad_(False)
        with caplog.at_level(logging.WARNING, logger="unigen_ds"):
            groups = build(dict(groups=[dict(pattern="vision", lr=0.0)]), model)
        assert list(names(groups)) == ["default"] and "has no effect" in caplog.text

    @pytest.mark.parametrize(
        ("paramwise", "words"),
        [
            (dict(norm_decay_mult=-1), "norm_decay_mult is -1"),
            (dict(groups=[dict(pattern="connector", lr=1.0, lr_mult=2.0)]), "lr and lr_mult"),
            (dict(groups=[dict(pattern="connector", name="default", lr=1.0)]), "names that differ"),
            (dict(groups=[dict(pattern="connector", lr=1.0)] * 2), "names that differ"),
        ],
    )
    def test_bad_paramwise_cfg(self, paramwise: dict, words: str) -> None:
        with pytest.raises(ConfigError, match=re.escape(words)):
            build(paramwise)


# ---- mmengine's custom_keys -----------------------------------------------------------------------------------------

CUSTOM_KEYS = [
    {"vision": {"lr_mult": 0.1}, "vision.1": {"lr_mult": 0.5, "decay_mult": 0.0}},
    {"norm": {"decay_mult": 0.0}, "proj": {"lr_mult": 2.0}, "layers.0": {"lr_mult": 0.3}},
    {"layers.0": {"lr_mult": 0.3}, "layers.1": {"lr_mult": 0.4}, "q_norm.w": {"decay_mult": 3.0}},
    {"bias": {"decay_mult": 0.0}, "emb": {"lr_mult": 0.0}, ".weight": {"lr_mult": 7.0}},
    {"weight": {"lr_mult": 0.2}, "gain": {"lr_mult": 0.6}, ".gain": {"lr_mult": 0.7}},
]


class RootModel(Model):
    """With a parameter of its own in addition to its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2, 2))


@pytest.mark.parametrize("custom_keys", CUSTOM_KEYS, ids=lambda keys: "+".join(keys))
def test_custom_keys_are_those_of_mmengines_own_constructor(custom_keys: dict) -> None:
    """Learning rate and weight decay of every parameter, with the multipliers of norms and biases."""
    from mmengine.optim import DefaultOptimWrapperConstructor

    paramwise = {"custom_keys": custom_keys, "norm_decay_mult": 0.5, "bias_decay_mult": 0.25}
    model = RootModel()
    constructor = DefaultOptimWrapperConstructor(
        {"type": "OptimWrapper", "optimizer": {"type": "AdamW", "lr": 1e-2, "weight_decay": 0.1}},
        {**paramwise, "bypass_duplicate": True},
    )
    expected: dict[int, tuple[float, float]] = {}
    for group in constructor(model).optimizer.param_groups:
        expected |= {id(p): (group["lr"], group["weight_decay"] if group["lr"] else 0.0) for p in group["params"]}
    parameters = dict(model.named_parameters())
    keys = sorted(custom_keys, key=len, reverse=True)
    matches = {n for n in parameters if any(key in (n if "." in n else f".{n}") for key in keys)}
    groups = build(paramwise, model, lr=1e-2)
    rates = {n: (group.lr, group.weight_decay) for group in groups for n in group.parameters}
    assert set(rates) == set(parameters) and matches
    different = {n: (rates[n], expected[id(parameters[n])]) for n in matches if rates[n] != expected[id(parameters[n])]}
    assert not different, different


def test_custom_keys_and_groups_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="groups and custom_keys"):
        build(dict(groups=[dict(pattern="vision")], custom_keys={"vision": {}}))
    with pytest.raises(ConfigError, match=r"custom_keys\.vision\.lr_mul'\. Remedy: did you mean 'lr_mult'"):
        build(dict(custom_keys={"vision": {"lr_mul": 1.0}}))


# ---- an optimizer of whole matrices, and AdamW for the rest ---------------------------------------------------------


class MixedModel(nn.Module):
    """Every kind of parameter that the rule for matrices distinguishes, one tied pair, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(8, 4)
        self.block = nn.Linear(4, 4)
        self.connector = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(4)
        self.conv = nn.Conv2d(1, 2, 3)
        self.out = nn.Linear(4, 8, bias=False)
        self.lm_head = nn.Linear(4, 8, bias=False)
        self.out.weight = self.lm_head.weight


MUON = {"type": "Muon", "lr": 0.02, "weight_decay": 0.1, "adamw": {"lr": 1e-3, "weight_decay": 0.05}}


def groups_of(optimizer, **paramwise):
    wrapper = OptimWrapper.parse({"optimizer": optimizer, "paramwise_cfg": paramwise}, where="optim_wrapper")
    parameters = MixedModel().named_parameters(remove_duplicate=False)
    return {group.name: group for group in build_param_groups(parameters, wrapper.optimizer, wrapper.paramwise_cfg)}


@needs.MUON
def test_muon_gets_matrices_and_adamw_the_rest():
    groups = groups_of(MUON)
    assert {name: (g.lr, g.weight_decay, g.by_adamw) for name, g in groups.items()} == {
        "default": (0.02, 0.1, False),
        "default.adamw": (1e-3, 0.05, True),
    }
    assert set(groups["default"].parameters) == {"block.weight", "connector.weight"}
    rest = {"embed_tokens.weight", "block.bias", "connector.bias", "norm.weight", "norm.bias", "conv.weight"}
    assert set(groups["default.adamw"].parameters) == {*rest, "conv.bias", "out.weight"}, "out is tied to the head"


@needs.MUON
def test_a_pattern_changes_both_parts_by_the_same_factor():
    rules = [
        {"pattern": "connector", "lr": 0.01},
        {"pattern": "block", "lr_mult": 2.0, "weight_decay": 0.3, "name": "two"},
        {"pattern": "conv", "lr": 0.0},
    ]
    groups = groups_of(MUON, groups=rules, norm_decay_mult=0.0)
    assert {name: (g.lr, g.weight_decay, g.by_adamw) for name, g in groups.items()} == {
        "default.adamw": (1e-3, 0.05, True),
        "default.adamw.norm": (1e-3, 0.0, True),
        "connector": (0.01, 0.1, False),
        "connector.adamw": (5e-4, 0.05, True),
        "two": (0.04, 0.3, False),
        "two.adamw": (2e-3, 0.3, True),
        "conv.adamw": (0.0, 0.0, True),
    }


@needs.MUON
def test_patterns_name_further_matrices_for_adamw():
    optimizer = {**MUON, "adamw": {"lr": 1e-3, "patterns": ["connector"]}}
    assert groups_of(optimizer)["default"].parameters == ("block.weight",)
    assert groups_of(optimizer)["default.adamw"].weight_decay == 0.01, "torch's default"


@needs.MUON
@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ({"type": "Muon", "lr": 0.02}, r"adamw is None: Muon trains matrices alone.*add adamw=dict\(lr=3e-4\)"),
        ({**MUON, "adamw": {"betas": (0.9, 0.95)}}, r"the config has no optim_wrapper\.optimizer\.adamw\.lr"),
        ({**MUON, "adamw": {"lr": -1.0}}, "adamw.lr is -1.0"),
        ({**MUON, "adamw": {"lr": 1e-3, "patterns": "block"}}, "adamw.patterns is 'block'. Allowed: a list"),
        ({**MUON, "adamw": {"lr": 1e-3, "patterns": ["blok"]}}, "'blok' matches no trained parameter"),
        ({**MUON, "adamw": {"lr": 1e-3, "patterns": ["block", "connector"]}}, "no trained parameter is a matrix"),
        ({"type": "AdamW", "lr": 1e-3, "adamw": {"lr": 1e-3}}, "AdamW trains every parameter itself"),
    ],
)
def test_wrong_settings_of_the_two_parts(optimizer, words):
    with pytest.raises(ConfigError, match=words):
        groups_of(optimizer)
