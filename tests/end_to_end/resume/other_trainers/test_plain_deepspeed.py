"""A run of plain DeepSpeed goes on here: its directory has no manifest, and the config says the rest."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.processes import ROOT, run
from tests.tiny import TINY, tiny_config
from tools import resume as tool
from unigen_ds.core.errors import ResumeBlocked
from unigen_ds.runner import Runner
from unigen_ds.system.journals import read_lines

CUT = {"train_dataloader__batch_size": 4, "optim_wrapper__accumulative_counts": 3, "train_dataloader__packing": None}


def cfg_options(folder: Path) -> list[str]:
    values = {**TINY, **{k.replace("__", "."): v for k, v in CUT.items()}, "param_scheduler": []}
    values["train_dataloader.dataset.root"] = str(folder / "digits")
    return ["--cfg-options", *(f"{k}={v!r}" for k, v in values.items())]


def findings(folder: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    arguments = ["unified_digits", "--work-dir", str(folder / "asked"), "--checkpoint", str(checkpoint), "--json"]
    assert tool.main([*arguments, *cfg_options(folder)]) == 0
    return {finding["id"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """``plain``: what DeepSpeed's own save_checkpoint writes after four updates, and nothing else."""
    folder = tmp_path_factory.mktemp("foreign")
    train(folder, "straight", 8)
    work_dir = str(folder / "ds")
    command = [sys.executable, "tools/train.py", "unified_digits", "--work-dir", work_dir, "--max-updates", "4"]
    command += ["--backend", "deepspeed:zero2", *cfg_options(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    process = run(command, cwd=ROOT, env=environment, text=True, timeout=250)
    assert process.returncode == 0, process.stderr[-3000:]
    (folder / "plain" / "global_step4").mkdir(parents=True)
    for path in (folder / "ds" / "iter_12.pth").glob("*.pt"):
        shutil.copy(path, folder / "plain" / "global_step4")
    (folder / "plain" / "latest").write_text("global_step4")
    return folder


def train(folder: Path, name: str, updates: int, **options: Any) -> Runner:
    config = tiny_config(folder / name, folder / "digits", **{**CUT, "param_scheduler": [], **options})
    runner = Runner.from_cfg(config, max_updates=updates)
    runner.train()
    return runner


def test_it_goes_on_with_the_next_sequence_and_the_same_moments(folder):
    runner = train(folder, "resumed", 8, resume=str(folder / "plain"))
    assert runner.progress.updates == 8 and runner.progress.sequences == 96
    straight, lines = (read_lines(folder / name / "metrics.jsonl") for name in ("straight", "resumed"))
    assert [line["update"] for line in lines] == [5, 6, 7, 8]
    for one, two in zip(straight[4:], lines, strict=True):
        for key in ("loss", "grad_norm"):
            assert two[key] == pytest.approx(one[key], rel=1e-5)
        for key in ("lr", "sequences", "samples"):
            assert two[key] == one[key]


def test_what_cannot_be_known_is_said(folder):
    log = (folder / "resumed" / "train.log").read_text(encoding="utf-8")
    assert "has no manifest: it is read as another trainer's checkpoint" in log
    assert "Checklist, checkpoint.foreign" in log and "The order of its data" in log and "(EMA) is not stored" in log


def test_weights_only(folder):
    runner = train(folder, "weights", 1, load_from=str(folder / "plain"))
    assert runner.progress.updates == 1
    losses = [read_lines(folder / name / "metrics.jsonl")[0]["loss"] for name in ("straight", "weights")]
    assert losses[1] < losses[0]


def test_an_effective_batch_that_differs_is_refused(folder):
    with pytest.raises(ResumeBlocked, match="effective batch size differs"):
        train(folder, "other", 8, resume=str(folder / "plain"), optim_wrapper__accumulative_counts=2)


def test_the_tool_reads_it_too(folder, capsys):
    checks = findings(folder, folder / "plain", capsys)
    assert checks["checkpoint.foreign"]["status"] == "warn" and checks["model.structure"]["status"] == "ok"
    assert checks["progress.position"]["was"].startswith("iteration 12 of")
    unknown = {name: f["now"] for name, f in checks.items() if f["was"] == "not known" and f["status"] == "warn"}
    assert {*unknown} == {
        "checkpoint.complete", "optimizer.type", "lr.curve", "config.edited", "data.unchanged", "rng", "versions",
    }  # fmt: skip
    assert not any("same" in now or "compared" in now or "no other" in now for now in unknown.values())
    assert "at 0." in unknown["lr.curve"] and unknown["optimizer.type"] == "AdamW", "what the run would do is there"


@pytest.mark.parametrize("section", [{"enabled": True}, {"enabled": "auto"}])
def test_the_precision_is_the_stored_one(folder, tmp_path, capsys, section):
    """Of a run in bf16 its ds_config tells it; what it leaves open is not called fp32."""
    shutil.copytree(folder / "plain", tmp_path / "plain")
    (header,) = (tmp_path / "plain").glob("*/*_model_states.pt")
    state = torch.load(header, weights_only=False)
    state["ds_config"]["bf16"] = section
    torch.save(state, header)
    precision = findings(folder, tmp_path / "plain", capsys)["precision"]
    old = "bf16" if section["enabled"] is True else "not known"
    assert [precision[key] for key in ("status", "was", "now")] == ["warn", old, "fp32"]
