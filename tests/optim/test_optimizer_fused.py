"""AdamW's fused kernel: the default of every run, a resumed one too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.tiny import tiny_config
from unigen_ds.runner import Runner


def train(work_dir: Path, data: Path, *, updates: int, **overrides: Any) -> Runner:
    runner = Runner.from_cfg(tiny_config(work_dir, data, **overrides), max_updates=updates)
    runner.train()
    return runner


def kernels(runner: Runner) -> set[object]:
    return {group["fused"] for group in runner.backend._optimizer.param_groups}  # type: ignore[attr-defined]


def weights(runner: Runner) -> list[torch.Tensor]:
    return [shard.data.clone() for shard in runner.backend.master_shards()]


def test_a_new_run_is_fused_and_stays_so(tmp_path, digits):
    straight = train(tmp_path / "straight", digits, updates=4)
    assert kernels(straight) == {True}
    train(tmp_path / "run", digits, updates=2)
    runner = train(tmp_path / "run", digits, updates=4, resume=True)
    assert kernels(runner) == {True}
    assert all(map(torch.equal, weights(straight), weights(runner)))
