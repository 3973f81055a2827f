"""The installed DeepSpeed is the one whose private attributes were tested; another one is refused at the start."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tools.train import main as train
from unigen_ds.backends.deepspeed.deepspeed_config import ALLOWED_VERSIONS, TESTED_VERSION
from unigen_ds.system import machine

ROOT = Path(__file__).resolve().parents[2]


def test_the_installed_deepspeed_is_the_tested_one():
    assert version("deepspeed") == TESTED_VERSION
    assert f"deepspeed=={TESTED_VERSION}" in (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert SpecifierSet(ALLOWED_VERSIONS).contains(TESTED_VERSION)


@pytest.mark.parametrize("version", ["0.18.9", "0.20.0", None])
def test_another_deepspeed_is_refused_at_the_start(version, tmp_path, monkeypatch, capsys):
    real = machine.installed_version
    monkeypatch.setattr(machine, "installed_version", lambda name: version if name == "deepspeed" else real(name))
    arguments = ["unified_digits", "--work-dir", str(tmp_path / "run"), "--backend", "deepspeed:zero2"]
    arguments += ["--max-updates", "1", "--cfg-options", f"train_dataloader.dataset.root={tmp_path / 'digits'}"]
    assert train(arguments) == 2
    text = capsys.readouterr().err
    assert (f"deepspeed {version} is installed" if version else "deepspeed is not installed") in text
    assert f"pip install 'deepspeed{ALLOWED_VERSIONS}'" in text and not (tmp_path / "run").exists()


@pytest.mark.parametrize("version", ["0.19.8+cu128", "0.19.9rc1"])
def test_a_release_of_the_tested_series_is_accepted(version, monkeypatch):
    monkeypatch.setattr(machine, "installed_version", lambda package: version)
    machine.check_packages({"deepspeed": ALLOWED_VERSIONS})


def test_a_users_repository_is_only_read(tmp_path, monkeypatch):
    """Else a run that is killed within ``git status`` would leave the lock of the index."""
    index = tmp_path / ".git" / "index"
    monkeypatch.chdir(tmp_path)
    os.system("git init -q; touch a; git add a; git -c user.name=a -c user.email=b commit -qm a; touch -d 2020-01-01 a")
    before, status = index.read_bytes(), machine.git_commits()["folder"]["changed"]
    assert (status, index.read_bytes()) == (False, before)
