"""AdamW's fused kernel: the default of a new run, recorded in the manifest; a resumed run keeps its kernel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import tiny_config
from unigen_ds.checkpoint.manifest import FILE_NAME, Manifest
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


def forget(work_dir: Path) -> None:
    """The newest checkpoint, as written by versions without this record."""
    path = list_checkpoints(work_dir)[-1].path
    manifest = Manifest.read(path)
    manifest.config["optim_wrapper"]["optimizer"].pop("fused", None)
    (path / FILE_NAME).write_text(manifest.to_json())


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


def test_a_checkpoint_without_the_record_continues_bit_equal_and_not_fused(tmp_path, data):
    plain = {"optim_wrapper__optimizer__fused": False}
    straight = train(tmp_path / "straight", data, updates=5, **plain)
    assert kernels(straight) == {False} and recorded(tmp_path / "straight") is False
    train(tmp_path / "run", data, updates=2, **plain)
    forget(tmp_path / "run")
    resumed = train(tmp_path / "run", data, updates=5, resume=True)
    assert kernels(resumed) <= {False, None} and recorded(tmp_path / "run") is None
    assert all(map(torch.equal, weights(straight), weights(resumed)))


@pytest.mark.parametrize("optimizer", [{"type": "SGD", "lr": 0.1}, {"type": "AdamW", "lr": 0.1, "foreach": True}])
def test_other_optimizers_and_other_choices_are_left_alone(tmp_path, data, optimizer):
    runner = Runner.from_cfg(tiny_config(tmp_path, data, optim_wrapper__optimizer=optimizer))
    assert kernels(runner) == {None}
