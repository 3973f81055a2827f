"""An update is the same training however it is cut: (8, 1) = (4, 2) = (2, 4) sequences x accumulation.

Text and image targets are spread unevenly over the micro-batches (packed sequences of mixed directions), so a mean per
micro-batch weighs targets differently in each cut (``counts-of-first-micro-batch`` in ``tests/mutations.toml``).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

from tests.tiny import tiny_config
from unigen_ds.runner import Runner
from unigen_ds.system.journals import read_lines

CUTS = ((8, 1), (4, 2), (2, 4))
UPDATES = 20
LR = 2e-3


def has_zero_gradient(name: str) -> bool:
    """A key bias of the ViT: softmax ignores what all keys share, so Adam amplifies pure rounding noise."""
    return name.startswith("vit_model.") and name.endswith("k_proj.bias")


@dataclass
class Outcome:
    lines: list[dict]
    weights: dict[str, Tensor]


def train(folder: Path, data: Path, cut: tuple[int, int]) -> Outcome:
    config = tiny_config(
        folder,
        data,
        train_dataloader__batch_size=cut[0],
        optim_wrapper__accumulative_counts=cut[1],
        optim_wrapper__optimizer__lr=LR,
        train_cfg__max_epochs=1,
        param_scheduler=[],
    )
    runner = Runner.from_cfg(config, max_updates=UPDATES)
    runner.train()
    weights = dict(runner.backend.model.state_dict())
    return Outcome(read_lines(folder / "metrics.jsonl"), {name: w.clone() for name, w in weights.items()})


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, digits) -> dict[tuple[int, int], Outcome]:
    root = tmp_path_factory.mktemp("cuts")
    return {cut: train(root / f"{cut[0]}x{cut[1]}", digits, cut) for cut in CUTS}


def mismatches(a: Outcome, b: Outcome) -> list[str]:
    """What differs: losses and norms by 1e-5, weights by relative L2 1e-5, biases (which begin at 0) 3e-5."""
    lines = []
    assert len(a.lines) == len(b.lines) == UPDATES
    for one, other in zip(a.lines, b.lines, strict=True):
        for key in ("loss", "loss/text", "loss/image", "grad_norm"):
            if abs(one[key] - other[key]) > 1e-5 * abs(one[key]):
                lines.append(f"update {one['update']} {key}: {one[key]} against {other[key]}")
    for name, weight in a.weights.items():
        difference = b.weights[name] - weight
        if has_zero_gradient(name):
            if difference.abs().max() > LR * UPDATES:
                lines.append(f"{name}: {difference.abs().max()}")
        elif difference.norm() > (3e-5 if name.endswith(".bias") else 1e-5) * weight.norm():
            lines.append(f"{name}: relative {difference.norm() / weight.norm():.2e}")
    return lines


@pytest.mark.parametrize("cut", CUTS[1:])
def test_cuts_of_an_update_are_the_same_training(outcomes, cut):
    assert mismatches(outcomes[CUTS[0]], outcomes[cut]) == []


def test_the_learning_rate_is_the_same_function_of_data(outcomes):
    for key in ("sequences", "samples", "tokens", "lr"):
        assert [line[key] for line in outcomes[(8, 1)].lines] == [line[key] for line in outcomes[(2, 4)].lines]
