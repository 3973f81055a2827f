"""The timer measures real time and counted operations."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.hooks.tiny_run import TinyRun
from tests.tiny import tiny_config
from unigen_ds.core.batch import PackedBatch
from unigen_ds.hooks.base import Hook, Run
from unigen_ds.hooks.log.timer import IterTimerHook, device_peak_tflops
from unigen_ds.runner.loop.runner import Runner
from unigen_ds.runner.start.parts import build_parts
from unigen_ds.system.journals import read_lines

PEAK = 1e-3


def spend(run: TinyRun, **sections: float) -> None:
    for name, seconds in sections.items():
        with run.clock(name):
            time.sleep(seconds)
    run.update()


def test_summary_of_real_time(tmp_path: Path) -> None:
    timer = IterTimerHook(window=2)
    run = TinyRun(tmp_path, [timer])
    time.sleep(0.1)  # building is not part of the first update
    run.start()
    assert timer.summary() == {}
    spend(run, data=0.3)  # leaves the window
    spend(run, data=0.01, forward_backward=0.05, step=0.02)
    time.sleep(0.02)
    spend(run, data=0.01, forward_backward=0.05, step=0.02)
    summary = timer.summary()
    assert 0.09 <= summary["time/update"] < 0.2
    assert 0.01 <= summary["time/data"] < 0.05
    assert summary["share/forward_backward"] > summary["share/step"] > summary["share/data"]
    assert summary["share/other"] > 0.02
    assert sum(value for name, value in summary.items() if name.startswith("share/")) == pytest.approx(1.0)
    assert summary["tokens_per_second"] == pytest.approx(100 / summary["time/update"])
    assert summary["samples_per_second"] == pytest.approx(4 / summary["time/update"])
    assert summary["eta"] == pytest.approx((80 - 12) / 4 * summary["time/update"])


class Recorder(Hook):
    """Keeps the micro-batches of every update."""

    def __init__(self) -> None:
        self.updates: list[list[PackedBatch]] = []

    def before_update(self, run: Run) -> None:
        self.updates.append([])

    def before_train_iter(self, run: Run, index: int, batch: PackedBatch) -> None:
        self.updates[-1].append(batch)


def count_operations(model: torch.nn.Module, batch: PackedBatch) -> int:
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        torch.stack(list(model(batch).sums.values())).sum().backward()
    return counter.get_total_flops()


def train(work_dir: Path, digits: Path, **overrides: object) -> tuple[Runner, Recorder]:
    changes = {"train_cfg": {"max_updates": 3}, "default_hooks__timer": {"type": "IterTimerHook", "window": 1}}
    config = tiny_config(work_dir, digits, **{**changes, **overrides})
    parts, recorder = build_parts(config), Recorder()
    runner = Runner(dataclasses.replace(parts, hooks=[*parts.hooks, recorder]))
    runner.train()
    return runner, recorder


def test_a_line_holds_operations_counted_one_by_one(tmp_path: Path, digits: Path) -> None:
    """Two iterations per update; ``time/update`` is that of the same update."""
    runner, recorder = train(tmp_path / "run", digits, env={"peak_tflops": PEAK}, optim_wrapper__accumulative_counts=2)
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert len(lines) == len(recorder.updates) == 3
    for line, batches in zip(lines, recorder.updates, strict=True):
        assert len(batches) == 2
        operations = sum(count_operations(runner.backend.model, batch) for batch in batches)
        assert line["tflops"] * 1e12 * line["time/update"] == pytest.approx(operations, rel=0.05)
        assert line["mfu"] == pytest.approx(line["tflops"] / PEAK)
    assert "MFU" in (tmp_path / "run" / "train.log").read_text()


def test_known_devices() -> None:
    peaks = {"NVIDIA A100-SXM4-80GB": 312, "NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA L40S": 362,
             "NVIDIA L4": 121, "Tesla V100-PCIE-32GB": 112, "Tesla T4": 65, "NVIDIA T400 4GB": None,
             "NVIDIA A10G": None, "some other device": None}  # fmt: skip
    assert {name: device_peak_tflops(name) for name in peaks} == peaks
