"""``tools/resume.py`` on a real run: what it says, what it proposes, and that what it writes and starts goes on."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.support import flip_byte
from tests.support.processes import ROOT, run
from tests.tiny import TINY, tiny_config
from tools import resume as tool
from unigen_ds.runner import Runner
from unigen_ds.system.journals import read_lines

OPTIONS: dict[str, Any] = {
    **TINY,
    "train_dataloader.batch_size": 4,
    "optim_wrapper.accumulative_counts": 3,
    "train_cfg.max_epochs": 2,
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, digits) -> Path:
    """Four updates of 4 x 3 sequences; the digits are beside it."""
    folder = tmp_path_factory.mktemp("run") / "run"
    (folder.parent / "digits").symlink_to(digits)
    overrides = {key.replace(".", "__"): value for key, value in OPTIONS.items()}
    Runner.from_cfg(tiny_config(folder, digits, **overrides), max_updates=4).train()
    return folder


def options(run_dir: Path, **changes: Any) -> list[str]:
    values = {**OPTIONS, "train_dataloader.dataset.root": str(run_dir.parent / "digits")}
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    return ["--cfg-options", *(f"{k}={v if isinstance(v, str) else repr(v)}" for k, v in values.items())]


def ask(run_dir: Path, *flags: str, **changes: Any) -> int:
    return tool.main(["unified_digits", "--work-dir", str(run_dir), *flags, *options(run_dir, **changes)])


def findings(capsys) -> dict[str, dict[str, Any]]:
    return {f["id"]: f for f in json.loads(capsys.readouterr().out)["findings"]}


def files(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


def test_an_unchanged_run_is_all_ok_and_nothing_is_written(run_dir, capsys):
    before = files(run_dir)
    assert ask(run_dir) == 0
    output = capsys.readouterr().out
    assert files(run_dir) == before
    lines = [line for line in output.splitlines() if line[:5].strip() in ("ok", "warn", "block")]
    assert len(lines) >= 14 and all(line.startswith("ok") for line in lines)
    assert all(f"({point} of 5)" in output for point in range(1, 6))
    assert "batch_size 1 x 12 accumulated, batch_size 2 x 6" in output
    assert "plan A: smaller micro-batches" in output and "2 per device x 1 process(es) x 6 accumulated = 12" in output


def test_half_the_batch_is_blocked_until_a_choice_is_made(run_dir, capsys):
    half = {"optim_wrapper__accumulative_counts": 1, "train_dataloader__batch_size": 6}
    assert ask(run_dir, "--json", **half) == 3
    assert findings(capsys)["batch.effective"]["status"] == "block"
    assert ask(run_dir, "--json", "--on-batch-change", "linear", **half) == 0
    checks = findings(capsys)
    assert checks["batch.effective"]["status"] == "warn" and "multiplied by 0.5" in checks["batch.effective"]["why"]


def test_a_machine_one_does_not_have(run_dir, capsys):
    status = ask(run_dir, "--json", "--world-size", "3", "--backend", "fsdp", train_dataloader__batch_size=2,
                   optim_wrapper__accumulative_counts=2)  # fmt: skip
    checks = findings(capsys)
    assert status == 0
    assert "dp_size 3" in checks["engine"]["now"] and "FULL_SHARD" in checks["engine"]["now"]
    assert checks["rng"]["status"] == "warn" and checks["progress.position"]["now"].startswith("iteration 8 of")


def test_another_model_is_compared_without_being_built(run_dir, capsys):
    assert ask(run_dir, "--json", model__llm__num_hidden_layers=1) == 3
    model = findings(capsys)["model.structure"]
    assert model["status"] == "block" and "is gone" in model["now"]


def test_only_verify_reads_every_byte(tmp_path, run_dir, capsys):
    folder = Path(shutil.copytree(run_dir, tmp_path / "run"))
    flip_byte(folder / "iter_12.pth" / "model.safetensors")
    arguments = ["unified_digits", "--work-dir", str(folder), *options(run_dir)]
    assert tool.main(arguments) == 0
    assert tool.main([*arguments, "--verify"]) == 1
    assert "none is usable" in capsys.readouterr().err


@pytest.mark.slow
def test_run_starts_the_training(tmp_path, run_dir):
    folder = Path(shutil.copytree(run_dir, tmp_path / "run"))
    command = [sys.executable, "tools/resume.py", "unified_digits", "--work-dir", str(folder), "--run"]
    command += options(run_dir, train_cfg__max_epochs=None, train_cfg__max_updates=6)
    process = run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, timeout=200)
    assert process.returncode == 0, process.stderr
    assert read_lines(folder / "metrics.jsonl")[-1]["update"] == 6


HUNGRY = """
import torch
from unigen_ds.config.registry import HOOKS
from unigen_ds.hooks.base import Hook

@HOOKS.register_module()
class HungryHook(Hook):
    def before_train_iter(self, run, index, batch):
        self.kept = torch.empty(1 << 45)  # the allocator really refuses 128 TiB
"""


def test_a_real_out_of_memory_error_prints_the_plans(tmp_path, run_dir):
    (tmp_path / "hungry.py").write_text(HUNGRY, encoding="utf-8")
    command = [sys.executable, "tools/train.py", "unified_digits", "--work-dir", str(tmp_path / "run")]
    command += ["--load-from", str(next(run_dir.glob("*.pth"))), "--resume"]
    command += options(
        run_dir,
        custom_imports={"imports": ["unigen_ds.examples.digits", "hungry"]},
        custom_hooks=[{"type": "HungryHook"}],
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    process = run(command, cwd=ROOT, env=environment, text=True, timeout=200)
    assert process.returncode == 1 and "can't allocate memory" in process.stderr
    plans = [line for line in process.stderr.splitlines() if line.strip().startswith("plan ")]
    assert [line.split()[1] for line in plans] == ["A", "B", "C", "D"]
    assert "train_dataloader.batch_size=2" in plans[0] and "optim_wrapper.accumulative_counts=6" in plans[0]
    assert "--nproc_per_node 2" in plans[1] and "--backend deepspeed:zero2" in plans[1]
    assert all(word in plans[2] for word in ("batch_size=1", "accumulative_counts=6", "--nproc_per_node 2"))
    assert all("--load-from" in plan for plan in plans), "a run without a checkpoint begins as it was asked to"
    assert all("--resume" in plan and f"--work-dir {tmp_path / 'run'}" in plan for plan in plans)
