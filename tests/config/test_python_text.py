"""The text of a config can be read back, in a process that has imported nothing else."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_config
from unigen_ds.config.file import read_file
from unigen_ds.config.overrides import plain_values
from unigen_ds.config.python_text import config_text
from unigen_ds.runner.settings.tree import Settings, load_config

OWN = """
from unigen_ds import Hook
from unigen_ds.config.registry import DATASETS, HOOKS
from unigen_ds.examples.digits.dataset import DigitsDataset

@DATASETS.register_module()
class OwnDigits(DigitsDataset):
    pass

@HOOKS.register_module()
class RegisteredHook(Hook):
    pass

class ImportedHook(Hook):
    pass
"""
READ = "import sys; from unigen_ds.runner.settings.tree import load_settings; print(load_settings(sys.argv[1]).config)"


def test_a_config_that_imports_classes_is_copied_with_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data set and hooks of a user's module that the config names by their classes."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "own_parts.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    values = plain_values(tiny_config(tmp_path / "run", tmp_path / "digits"))
    values["train_dataloader"].pop("dataset")
    data = f"dataset=dict(type=OwnDigits, root={str(tmp_path / 'digits')!r}, split='val')"
    text = "".join(f"{key} = {value!r}\n" for key, value in values.items() if key != "custom_imports")
    path = tmp_path / "config.py"
    path.write_text(
        f"from own_parts import ImportedHook, OwnDigits, RegisteredHook\n{text}train_dataloader.update({data})\n"
        "custom_hooks = [dict(type=ImportedHook), dict(type=RegisteredHook)]\n"
    )
    settings = Settings.from_config(load_config(path))
    copy = tmp_path / "run" / "config.py"
    copy.parent.mkdir()
    copy.write_text(config_text(settings.config))
    command = [sys.executable, "-c", READ, str(copy)]
    process = subprocess.run(
        command, env={"PYTHONPATH": f"{Path.cwd()}:{tmp_path / 'modules'}"}, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert all(name in process.stdout for name in ("OwnDigits", "RegisteredHook", "ImportedHook"))


def test_the_text_of_a_config_can_be_read_back(tmp_path: Path) -> None:
    """Also where a key is a keyword of Python or no name at all, and where a number is infinite."""
    values: dict[str, Any] = {
        "loss_weights": {"class": 0.5, "value": 1.0, "a'b": 2},
        "param_scheduler": [{"type": "LinearLR", "end": math.inf}],
        "launcher": ("one",),
        "train_cfg": {"max_epochs": 3, "nothing": None, "several\nlines": "a\nb" * 40},
        "empty": [{}, [], ()],
        "names": {"class": 1, "value": 2},
    }
    path = tmp_path / "config.py"
    path.write_text(config_text(values), encoding="utf-8")
    assert plain_values(read_file(path)) == values
