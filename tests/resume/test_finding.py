"""Two configs -> what was edited, in words."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from unigen_ds.resume.finding import edited_settings, other_sizes

CONFIG: dict[str, Any] = {
    "model": {
        "type": "UnifiedModel",
        "llm": {"hidden_size": 32, "num_attention_heads": 4, "dropout": 0.1, "rope_theta": 1e6},
        "vae": {"type": "PixelAutoencoder", "channels": 1},
        "timestep_shift": 1.0,
        "compile": False,
    },
    "loss_weights": {"text": 1.0},
    "optim_wrapper": {
        "optimizer": {"type": "AdamW", "lr": 1e-3, "betas": (0.9, 0.95)},
        "paramwise_cfg": {"groups": [{"pattern": "connector", "lr": 5e-3}]},
    },
    "custom_hooks": [{"type": "DigitsReportHook"}, {"type": "EMAHook", "momentum": 0.01}],
    "work_dir": "a",
}


def edit(**edits: Any) -> dict[str, Any]:
    config = copy.deepcopy(CONFIG)
    for path, value in edits.items():
        *sections, last = path.split("__")
        node = config
        for key in sections:
            node = node.setdefault(key, {})
        node[last] = value
    return config


@pytest.mark.parametrize(
    ("edits", "sizes", "settings"),
    [
        ({}, [], []),
        ({"model__llm__num_attention_heads": 2}, ["model.llm.num_attention_heads was 4 and is 2"], []),
        ({"model__llm__rope_theta": 1e4}, ["model.llm.rope_theta was 1000000.0 and is 10000.0"], []),
        ({"model__llm__dropout": 0.0}, [], ["model.llm.dropout was 0.1 and is 0.0"]),
        ({"model__llm__rms_norm_eps": 1e-6}, [], ["model.llm.rms_norm_eps was not given and is 1e-06"]),
        ({"model__timestep_shift": 4.0}, [], ["model.timestep_shift was 1.0 and is 4.0"]),
        ({"model__compile": True, "work_dir": "b", "optim_wrapper__optimizer__lr": 1.0}, [], []),
        ({"optim_wrapper__optimizer__betas": [0.9, 0.95]}, [], []),
        (
            {"optim_wrapper__optimizer__betas": [0.9, 0.99]},
            [],
            ["optim_wrapper.optimizer.betas was [0.9, 0.95] and is [0.9, 0.99]"],
        ),
        ({"custom_hooks": CONFIG["custom_hooks"][::-1]}, [], []),
        (
            {"custom_hooks": [{"type": "EMAHook", "momentum": 0.02}]},
            [],
            [
                "custom_hooks[DigitsReportHook].type was 'DigitsReportHook' and is not given",
                "custom_hooks[EMAHook].momentum was 0.01 and is 0.02",
            ],
        ),
        (
            {"custom_hooks": [*CONFIG["custom_hooks"], {"type": "EMAHook", "momentum": 0.5}]},
            [],
            [
                "custom_hooks[EMAHook#2].type was not given and is 'EMAHook'",
                "custom_hooks[EMAHook#2].momentum was not given and is 0.5",
            ],
        ),
        ({"loss_weights": None}, [], ["loss_weights.text was 1.0 and is not given"]),
    ],
)
def test_edits(edits: dict[str, Any], sizes: list[str], settings: list[str]) -> None:
    assert other_sizes(CONFIG, edit(**edits)) == sizes
    assert edited_settings(CONFIG, edit(**edits)) == settings
