"""AdamW's fused kernel: the default of every run, a resumed one too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import tiny_config
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


def weights(runner: Runner) -> list[torch.Tensor]:
    return [shard.data.clone() for shard in runner.backend.master_shards()]


def test_a_new_run_is_fused_and_stays_so(tmp_path, data):
    straight = train(tmp_path / "straight", data, updates=4)
    assert kernels(straight) == {True}
    train(tmp_path / "run", data, updates=2)
    resumed = train(tmp_path / "run", data, updates=4, resume=True)
    assert kernels(resumed) == {True}
    assert all(map(torch.equal, weights(straight), weights(resumed)))
