"""The last update's losses after a resume: equal for the same weights and data, otherwise reported."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import tiny_config
from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.config.registry import HOOKS
from unigen_ds.core.errors import TrainingError
from unigen_ds.hooks.base import Hook
from unigen_ds.runner import Runner
from unigen_ds.system.seeding import rng_state


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Three updates of 4 x 3 packed sequences, with dropout."""
    folder = tmp_path_factory.mktemp("continuity")
    train(folder, "run", 3)
    return folder


def train(folder: Path, name: str, updates: int, **options: Any) -> Runner:
    given = {"train_dataloader__batch_size": 4, "optim_wrapper__accumulative_counts": 3, "model__llm__dropout": 0.1}
    runner = Runner.from_cfg(tiny_config(folder / name, folder / "digits", **{**given, **options}), max_updates=updates)
    runner.train()
    return runner


def resumed(folder: Path, name: str, **options: Any) -> str:
    """The log of the check when a copy of the run is resumed."""
    shutil.copytree(folder / "run", folder / name)
    train(folder, name, 4, resume=True, **options)
    lines = (folder / name / "train.log").read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if " Continuity" in line), "")


def test_the_recorded_losses_come_again_to_the_bit(folder):
    path = folder / "run" / "iter_9.pth"
    recorded = store.read_hook_states(path, Manifest.read(path))["continuity"]["losses"]
    assert set(recorded) == {"text", "image"}
    line = resumed(folder, "same")
    assert "are the recorded ones" in line
    for name, value in recorded.items():
        assert f"{name} {value:.6g} -> {value:.6g}" in line


def test_another_split_reproduces_them_up_to_rounding(folder):
    line = resumed(folder, "split", train_dataloader__batch_size=2, optim_wrapper__accumulative_counts=6)
    assert "are the recorded ones" in line


@HOOKS.register_module()
class DamageHook(Hook):
    """Doubles the weights between loading and the check."""

    @property
    def priority(self) -> int:
        return 1

    def after_load_checkpoint(self, run, manifest):
        with torch.no_grad():
            for shard in run.backend.master_shards():
                shard.data.mul_(2.0)


def test_other_weights_are_reported(folder):
    line = resumed(folder, "warned", custom_hooks=[{"type": "DamageHook"}])
    assert "WARNING" in line and "are not the recorded ones" in line


def test_or_stop_the_run(folder):
    with pytest.raises(TrainingError, match="are not the recorded ones"):
        halt = {"type": "ContinuityHook", "on_mismatch": "halt"}
        resumed(folder, "halted", custom_hooks=[{"type": "DamageHook"}], default_hooks__continuity=halt)
    assert [path.name for path in (folder / "halted").glob("iter_*")] == ["iter_9.pth"]


def test_a_batch_size_that_does_not_divide_the_update_is_reported(folder):
    line = resumed(folder, "indivisible", train_dataloader__batch_size=5, optim_wrapper__accumulative_counts=1,
                   on_batch_change="keep-lr")  # fmt: skip
    assert "not checked" in line


def test_the_check_draws_no_random_number(folder):
    """Otherwise the dropout after a resume would not be that of the uninterrupted run."""
    runner = train(folder, "random", 2)
    runner._last = replace(runner._last, update=None)
    before = rng_state()
    assert runner.last_losses()
    after = rng_state()
    assert torch.equal(before["torch"], after["torch"]) and before["scalars"] == after["scalars"]
    assert runner.backend.model.training
