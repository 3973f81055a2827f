"""``precision='auto'`` and ``world_size``: chosen or compared once, recorded, kept by a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.resume.saving.test_checkpoint_dir import train
from tests.text_run import log, text_config
from tools.evaluate import main as evaluate
from tools.resume import main as resume
from unigen_ds.backends import base
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.core.errors import ConfigError
from unigen_ds.optim import optimizer
from unigen_ds.runner import Runner

AUTO = {"optim_wrapper__precision": "auto"}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets whether the device computes bf16."""

    def computes(bf16: bool) -> None:
        for module in (optimizer, base):
            monkeypatch.setattr(module, "computes_bf16", lambda: bf16)

    return computes


def precisions_of(folder: Path, number: int) -> tuple[str, str]:
    """The precision of the engine and that of the config, as a checkpoint has them."""
    manifest = Manifest.read(folder / "run" / f"iter_{number}.pth")
    return manifest.topology["precision"], manifest.config["optim_wrapper"]["precision"]


@pytest.mark.parametrize(("bf16", "choice"), [(True, "bf16"), (False, "fp16")])
def test_it_follows_the_device_and_a_resume_keeps_it(tmp_path: Path, device: Any, bf16: bool, choice: str) -> None:
    device(bf16)
    runner = train(tmp_path, **AUTO)
    assert precisions_of(tmp_path, 2) == (choice, choice) == (runner.backend.topology()["precision"],) * 2
    assert f"optim_wrapper.precision is 'auto': this run computes in {choice}, as this device computes it." in log(
        tmp_path
    )
    device(True)
    train(tmp_path, updates=3, resume=True, **AUTO)
    assert precisions_of(tmp_path, 3) == (choice, choice)
    assert f"this run computes in {choice}, as the checkpoint has it." in log(tmp_path)
    assert "Checklist, precision" not in log(tmp_path) and "Checklist, config.edited" not in log(tmp_path)


def test_a_device_that_cannot_keep_it_is_a_finding(
    tmp_path: Path, device: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, **AUTO)
    device(False)
    options = ["optim_wrapper.precision=auto", "train_cfg.max_epochs=9", "train_dataloader.packing=null"]
    assert resume([str(tmp_path / "config.py"), "--cfg-options", *options, "custom_hooks=[]"]) == 0
    assert "bf16  ->  fp16" in capsys.readouterr().out
    train(tmp_path, updates=3, resume=True, **AUTO)
    assert precisions_of(tmp_path, 3) == ("fp16", "fp16")
    assert "Checklist, precision: bf16 -> fp16. masters and moments are fp32 in all" in log(tmp_path)


def test_an_evaluation_computes_as_the_training_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, val_dataloader={"split": 0.3}, **AUTO)
    out = str(tmp_path / "result.json")
    assert evaluate([str(tmp_path / "run"), "--out", out]) == 0
    assert '"precision": "bf16"' in Path(out).read_text(encoding="utf-8")


def test_another_number_of_processes_than_the_configs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as error:
        Runner.from_cfg(text_config(tmp_path, [{"text": "one"}], world_size=8))
    assert "world_size is 8, and 1 process was started" in str(error.value)
    assert "torchrun --nproc_per_node 8" in str(error.value) and "world_size=1" in str(error.value)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="world_size is 3, and 2 processes were started"):
        Runner.from_cfg(text_config(tmp_path, [{"text": "one"}], world_size=3, backend={"type": "fsdp"}))
    monkeypatch.delenv("WORLD_SIZE")
    train(tmp_path, world_size=1)
    with pytest.raises(ConfigError, match=r"world_size is 0\. Allowed: a whole number of at least 1"):
        Runner.from_cfg(text_config(tmp_path, [{"text": "one"}], world_size=0))
