"""A checkpoint is data: modules that its config names are imported, which executes them, only where the user asks."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tiny import tiny_config
from tools.generate import main as generate
from unigen_ds.checkpoint.manifest import FILE_NAME, Manifest
from unigen_ds.config.registry import HOOKS
from unigen_ds.runner import Runner

MODULE = "hook_of_a_stranger"
SOURCE = """
from pathlib import Path
from unigen_ds.config.registry import HOOKS
from unigen_ds.hooks.base import Hook

Path(__file__).with_suffix(".ran").touch()

@HOOKS.register_module()
class StrangersHook(Hook):
    pass
"""


ARGUMENTS = ["--prompt", "draw a one", "--size", "8", "8", "--num-timesteps", "2", "--out", "out"]


def test_modules_of_this_package_need_no_permission(
    tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = tiny_config(tmp_path / "run", digits, default_hooks__checkpoint__interval=1)
    Runner.from_cfg(config, max_updates=1).train()
    for name in ("unigen_ds.examples.digits", "unigen_ds_of_a_stranger"):
        monkeypatch.delitem(sys.modules, name, raising=False)  # as in a process that has not trained
    assert generate(["run", *ARGUMENTS]) == 0
    assert "unigen_ds.examples.digits" in sys.modules

    manifest = Manifest.read(tmp_path / "run" / "iter_1.pth")
    strange = {**manifest.config, "custom_imports": {"imports": ["unigen_ds_of_a_stranger"]}}
    (tmp_path / "run" / "iter_1.pth" / FILE_NAME).write_text(replace(manifest, config=strange).to_json())
    assert generate(["run", *ARGUMENTS]) == 2
    assert "imports unigen_ds_of_a_stranger" in capsys.readouterr().err, "its name begins alike, no more"


def test_a_config_of_the_users_own_is_trusted(tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module is executed again in a process that has not trained."""
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    own = {"custom_imports": {"imports": [MODULE]}, "custom_hooks": [{"type": "StrangersHook"}]}
    Runner.from_cfg(tiny_config(tmp_path / "run", digits, **own), max_updates=1).train()
    monkeypatch.delitem(sys.modules, MODULE)
    HOOKS.module_dict.pop("StrangersHook")
    (tmp_path / f"{MODULE}.ran").unlink()
    assert generate(["run", "--config", "run/config.py", *ARGUMENTS]) == 0
    assert (tmp_path / f"{MODULE}.ran").exists()
