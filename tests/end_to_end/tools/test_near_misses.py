"""What a user reads who named something that is nearly right: a module, a hook, a checkpoint, a data file, a share."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.text_run import text_config
from tools.checkpoints import main as checkpoints
from tools.evaluate import main as evaluate
from tools.export import main as export
from tools.resume import main as resume
from tools.train import main as train
from unigen_ds.config.registry import HOOKS

OWN = """
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

@HOOKS.register_module(force=True)
class PrintHook(Hook):
    pass
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config whose file is in a folder of its own, with its data and what may be beside it."""
    text_config(tmp_path, [{"text": f"one two three {word}"} for word in ("one", "two", "three", "four")])
    path = tmp_path / "config.py"
    path.write_text(path.read_text().replace('custom_hooks = [dict(type="KeepBatches")]\n', ""))
    return path


@pytest.fixture
def _same_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {*sys.modules}
    yield
    for name in sys.modules.keys() - before:
        if name.startswith("of_this_test"):
            del sys.modules[name]


@pytest.mark.usefixtures("_same_path")
def test_a_module_beside_the_config_or_its_base(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (config.parent / "of_this_test.py").write_text(OWN)
    above = config.parent / "above" / "config.py"
    above.parent.mkdir()
    above.write_text(
        "_base_ = '../config.py'\ncustom_imports = dict(imports=['of_this_test'])\n"
        "custom_hooks = [dict(type='PrintHook')]\n"
    )
    assert train([str(above), "--max-updates", "1"]) == 0
    capsys.readouterr()
    above.write_text(above.read_text().replace("PrintHook", "PrintHok"))
    assert train([str(above)]) == 2
    assert "custom_hooks[0].type is 'PrintHok'. Remedy: did you mean 'PrintHook'?" in capsys.readouterr().err
    above.write_text(above.read_text().replace("PrintHok", "SomethingElse"))
    assert train([str(above)]) == 2
    assert ", PrintHook" in capsys.readouterr().err and "PrintHook" not in HOOKS.module_dict


@pytest.mark.usefixtures("_same_path")
def test_a_module_that_is_nowhere(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(config.read_text() + "custom_imports = dict(imports=['of_this_test_absent'])\n")
    assert train([str(config)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "'of_this_test_absent' cannot be imported" in line and "site-packages" not in line
    assert "Remedy: put it beside the config, or start with PYTHONPATH=FOLDER" in line


def test_a_deleted_checkpoint(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["default_hooks.checkpoint.interval=1", "default_hooks.checkpoint.filename_tmpl=step_{}"]
    assert train([str(config), "--max-updates", "2", "--cfg-options", *options]) == 0
    run = tmp_path / "run"
    names = sorted(path.name for path in run.glob("step_*"))
    assert names
    absent = str(run / "step_900")
    for command in (
        [evaluate, absent],
        [export, absent, str(tmp_path / "out")],
        [checkpoints, "show", absent],
        [resume, str(config), "--checkpoint", absent],
        [train, str(config), "--resume", absent],
    ):
        capsys.readouterr()
        tool, *arguments = command
        assert tool(arguments) == 1  # type: ignore[operator]
        error = capsys.readouterr().err
        assert f"checkpoint {absent} does not exist" in error and f"{run} has {', '.join(names)}" in error, error
    shutil.rmtree(run)
    assert evaluate([absent]) == 1
    assert f"checkpoint {absent} does not exist" in capsys.readouterr().err


def test_a_data_file(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*options: str) -> str:
        capsys.readouterr()
        assert train([str(config), "--work-dir", str(tmp_path / "other"), "--cfg-options", *options]) == 1
        return capsys.readouterr().err

    data = tmp_path / "train.jsonl"
    absent = error(f"train_dataloader.dataset.data_path={tmp_path / 'trian.jsonl'}")
    assert "train_dataloader.dataset[0]: data file" in absent and f"did you mean '{data}'?" in absent
    assert f"{tmp_path} has train.jsonl" in error(f"train_dataloader.dataset.data_path={tmp_path / 'xyz'}")
    data.write_text(json.dumps({"text": "one"}) + "\n{broken\n")
    assert f"{data}:2" in error("randomness.seed=1")
