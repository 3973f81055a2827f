"""Muon through the Runner in one process: its parameters, a resume, and where it is refused. With FSDP2:
``tests/end_to_end/engines/training/test_optimizers.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from tests.support import needs
from tests.tiny import tiny_config
from unigen_ds.config.registry import OPTIMIZERS
from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.runner import Runner
from unigen_ds.system.journals import read_lines

pytestmark = needs.MUON
ADAMW = {"lr": 2e-3, "betas": (0.9, 0.95)}
MUON = {"type": "Muon", "lr": 0.02, "weight_decay": 0.1, "adamw": ADAMW}


def train(work_dir: Path, data: Path, *, updates: int, optimizer: Any = MUON, **changes: Any) -> Runner:
    config = tiny_config(work_dir, data, optim_wrapper__optimizer=optimizer, **changes)
    runner = Runner.from_cfg(config, max_updates=updates)
    runner.train()
    return runner


def state(runner: Runner) -> dict[str, dict[str, Any]]:
    backend: Any = runner.backend
    return {name: backend._optimizer.state[p] for name, p in backend._masters.items() if p.requires_grad}


def test_matrices_are_muons_and_everything_else_is_adamws(tmp_path: Path, digits: Path) -> None:
    runner = train(tmp_path, digits, updates=2)
    masters: dict[str, Parameter] = runner.backend._masters  # type: ignore[attr-defined]
    muons = {name for name, moments in state(runner).items() if set(moments) == {"momentum_buffer"}}
    others = {name for name, moments in state(runner).items() if set(moments) == {"step", "exp_avg", "exp_avg_sq"}}
    assert muons | others == set(state(runner))
    assert all(masters[name].ndim == 2 for name in muons)
    assert {name for name in others if masters[name].ndim == 2 and "embed" not in name} == {
        "language_model.lm_head.weight"
    }
    assert "language_model.model.layers.0.self_attn.q_proj.weight" in muons
    last = [line for line in read_lines(tmp_path / "metrics.jsonl") if "loss" in line][-1]
    assert last["lr"] / last["lr/default.adamw"] == pytest.approx(0.02 / 2e-3), "one curve, a rate for each group"


def test_it_learns_and_resumes_bit_equal(tmp_path: Path, digits: Path) -> None:
    straight = train(tmp_path / "straight", digits, updates=5)
    train(tmp_path / "run", digits, updates=2)
    second = train(tmp_path / "run", digits, updates=5, resume=True)
    losses = [
        [line["loss"] for line in read_lines(tmp_path / name / "metrics.jsonl") if "loss" in line]
        for name in ("straight", "run")
    ]
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]
    for name, moments in state(straight).items():
        for kind, value in moments.items():
            assert torch.equal(value, state(second)[name][kind]), (kind, name)


def test_a_matrix_that_changes_its_optimizer_on_a_resume_is_named(tmp_path: Path, digits: Path) -> None:
    train(tmp_path, digits, updates=1)
    other = {**MUON, "adamw": {**ADAMW, "patterns": ["llm2vae"]}}
    with pytest.raises(CheckpointError, match=r"of exp_avg: missing: .*llm2vae\.weight"):
        train(tmp_path, digits, updates=2, optimizer=other, resume=True)


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero2_offload", "zero3"])
def test_zero_refuses_it_by_name(tmp_path: Path, digits: Path, stage: str) -> None:
    number = stage[4]
    words = rf"type is 'Muon', which computes on whole matrices: ZeRO-{number}.*--backend fsdp:FULL_SHARD, or single"
    with pytest.raises(ConfigError, match=words):
        train(tmp_path, digits, updates=1, backend={"type": "deepspeed", "config": stage})
    assert not tmp_path.exists() or not any(tmp_path.iterdir()), "before anything was started"


def test_its_class_means_its_name(tmp_path: Path, digits: Path) -> None:
    config = tiny_config(tmp_path, digits)
    config.optim_wrapper.optimizer = {**MUON, "type": torch.optim.Muon}
    assert Runner.from_cfg(config, max_updates=1).backend.trainable_sizes()


@OPTIMIZERS.register_module()
class Forgetful(torch.optim.SGD):
    """Has state that no checkpoint contains."""

    element_wise = True

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["history"] = [p.clone()]


def test_an_optimizer_whose_state_would_be_lost_is_refused_after_its_first_update(tmp_path: Path, digits: Path) -> None:
    with pytest.raises(ConfigError, match="Forgetful keeps 'history'"):
        train(tmp_path / "run", digits, updates=2, optimizer={"type": "Forgetful", "lr": 0.1})
    assert not list((tmp_path / "run").glob("*.pth")), "before anything was saved"
