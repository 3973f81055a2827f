"""AdamW's fused kernel: the default of a new run, recorded in the manifest; a resumed run keeps its kernel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import tiny_config
from unigen_ds.checkpoint.store import list_checkpoints
from unigen_ds.checks.resume import inspect_resume
from unigen_ds.runner import Runner


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("data") / "digits"


def train(work_dir: Path, data: Path, *, updates: int, **overrides: Any) -> Runner:
    runner = Runner.from_cfg(tiny_config(work_dir, data, **overrides), max_updates=updates)
    runner.train()
    return runner


def kernels(runner: Runner) -> set[object]:
    return {group["fused"] for group in runner.backend._optimizer.param_groups}  # type: ignore[attr-defined]


def recorded(work_dir: Path) -> object:
    manifest = list_checkpoints(work_dir)[-1].manifest
    assert manifest is not None
    return manifest.config["optim_wrapper"]["optimizer"].get("fused")


def weights(runner: Runner) -> list[torch.Tensor]:
    return [shard.data.clone() for shard in runner.backend.master_shards()]


def test_a_new_run_is_fused_and_stays_so(tmp_path, data):
    straight = train(tmp_path / "straight", data, updates=4)
    assert kernels(straight) == {True} and recorded(tmp_path / "straight") is True
    train(tmp_path / "run", data, updates=2)
    found = inspect_resume(tiny_config(tmp_path / "run", data, resume=True), world_size=1)
    assert not [f for f in found.findings if "optimizer.fused" in json.dumps(f.state_dict())], (
        "the run's own choice is not an edit"
    )
    resumed = train(tmp_path / "run", data, updates=4, resume=True)
    assert kernels(resumed) == {True} and recorded(tmp_path / "run") is True
    assert all(map(torch.equal, weights(straight), weights(resumed)))
