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


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose config imports a module, which is then no longer imported."""
    folder = tmp_path_factory.mktemp("strange")
    (folder / f"{MODULE}.py").write_text(SOURCE)
    sys.path.insert(0, str(folder))
    config = tiny_config(
        folder / "run",
        folder / "data",
        custom_imports={"imports": [MODULE]},
        custom_hooks=[{"type": "StrangersHook"}],
        default_hooks__checkpoint__interval=1,
    )
    Runner.from_cfg(config, max_updates=1).train()
    sys.path.remove(str(folder))
    return folder / "run"


@pytest.fixture
def ran(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Exists once the module has been executed again."""
    monkeypatch.syspath_prepend(str(checkpoint.parent))
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    HOOKS.module_dict.pop("StrangersHook", None)
    marker = checkpoint.parent / f"{MODULE}.ran"
    marker.unlink(missing_ok=True)
    return marker


def test_modules_of_this_package_need_no_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(tmp_path / "run", tmp_path / "data", default_hooks__checkpoint__interval=1)
    Runner.from_cfg(config, max_updates=1).train()
    for name in ("unigen_ds.examples.digits", "unigen_ds_of_a_stranger"):
        monkeypatch.delitem(sys.modules, name, raising=False)  # as in a process that has not trained
    arguments = ["--prompt", "draw a one", "--size", "8", "8", "--num-timesteps", "2", "--out", str(tmp_path / "out")]
    assert generate([str(tmp_path / "run"), *arguments]) == 0
    assert "unigen_ds.examples.digits" in sys.modules

    manifest = Manifest.read(tmp_path / "run" / "iter_1.pth")
    strange = {**manifest.config, "custom_imports": {"imports": ["unigen_ds_of_a_stranger"]}}
    (tmp_path / "run" / "iter_1.pth" / FILE_NAME).write_text(replace(manifest, config=strange).to_json())
    assert generate([str(tmp_path / "run"), *arguments]) == 2
    assert "imports unigen_ds_of_a_stranger" in capsys.readouterr().err, "its name begins alike, no more"


def test_a_config_of_the_users_own_is_trusted(checkpoint: Path, ran: Path, tmp_path: Path) -> None:
    arguments = ["--prompt", "draw a one", "--size", "8", "8", "--num-timesteps", "2", "--out", str(tmp_path / "out")]
    assert generate([str(checkpoint), "--config", str(checkpoint / "config.py"), *arguments]) == 0
    assert ran.exists()
