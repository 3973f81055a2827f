"""A packed run starts without planning an epoch: the number of its sequences is counted, and is that of the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runner.text_run import count_up, text_config, write_records
from unigen_ds.data.packing import WindowPacking
from unigen_ds.runner import Runner


def test_a_start_plans_no_window_before_the_first_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_records(tmp_path / "train.jsonl", count_up(500))
    packing = {"type": "WindowPacking", "window": 50}
    planned: list[int] = []
    plan = WindowPacking.plan
    monkeypatch.setattr(WindowPacking, "plan", lambda self, *a: planned.append(1) or plan(self, *a))
    runner = Runner.from_cfg(text_config(tmp_path, train_dataloader__packing=packing), max_updates=3)
    assert not planned
    stream = runner._parts.loader._iterations._stream
    rows = [len(stream.window_rows(0, window)) for window in range(10)]
    assert runner.ruler.sequences_per_epoch == sum(rows) > 100
    runner.train()
