"""``checkpoint_dir``: a folder for the checkpoints of one run, and which are deleted. Tools: ``test_launchers.py``."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.text_run import text_config
from tools.checkpoints import main as checkpoints
from unigen_ds.checkpoint.home import home_of
from unigen_ds.checkpoint.manifest import FILE_NAME, Manifest
from unigen_ds.checkpoint.store import list_checkpoints
from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.runner import Runner
from unigen_ds.system.journals import read_lines

RECORDS = [{"text": f"{'one two three'[: 3 + 5 * (i % 3)]}"} for i in range(24)]


def train(folder: Path, *, updates: int = 2, **overrides: Any) -> Runner:
    """Two updates of one sequence, unless they are done already; a checkpoint at the end."""
    options = {"train_cfg__max_epochs": 9, "train_dataloader__packing": None, "custom_hooks": [], **overrides}
    runner = Runner.from_cfg(text_config(folder, RECORDS, **options), max_updates=updates)
    runner.train()
    return runner


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Of a run in ``tmp_path/run``, which has a checkpoint of update 2."""
    train(tmp_path, checkpoint_dir=str(tmp_path / "checkpoints"))
    return tmp_path / "checkpoints"


def refusal(folder: Path, **overrides: Any) -> str:
    with pytest.raises(ConfigError) as error:
        train(folder, updates=3, **overrides)
    return str(error.value)


def test_it_resumes_and_each_file_is_where_it_belongs(home: Path, tmp_path: Path) -> None:
    train(tmp_path, updates=4, checkpoint_dir=str(home), resume="auto")
    assert [one.manifest.progress.updates for one in list_checkpoints(home) if one.manifest] == [2, 4]
    assert [line["update"] for line in read_lines(tmp_path / "run" / "ledger.jsonl")] == [1, 2, 3, 4]
    files = {path.name for path in home.iterdir()}
    assert files == {"iter_2.pth", "iter_4.pth", "last_checkpoint", ".lock", "work_dir.txt"}
    assert (home / "last_checkpoint").read_text().strip() == str(home / "iter_4.pth")
    assert {"metrics.jsonl", "timeline.jsonl", "train.log", ".lock"} <= {p.name for p in (tmp_path / "run").iterdir()}


def test_going_back_is_recorded_there(home: Path, tmp_path: Path) -> None:
    train(tmp_path, updates=4, checkpoint_dir=str(home), resume=True)
    train(tmp_path, updates=3, checkpoint_dir=str(home), resume=str(home / "iter_2.pth"))
    assert (home / "lineage.json").is_file() and not (tmp_path / "run" / "lineage.json").exists()
    assert checkpoints(["list", str(tmp_path / "run")]) == 0


def test_another_run_cannot_use_it(home: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    train(plain)
    for resume in (False, True, "auto"):
        new = tmp_path / f"new {resume}"
        message = refusal(new / "b", checkpoint_dir=str(home), resume=resume)
        assert f"{home} has the checkpoints of the run in {tmp_path / 'run'}, and this run is in" in message
        assert "Remedy: another --checkpoint-dir; or, to continue that run, --work-dir" in message
        assert "has the checkpoints of the run in" in refusal(new / "c", work_dir=str(home), resume=resume)
        message = refusal(new / "d", checkpoint_dir=str(plain / "run"), resume=resume)
        assert f"has the checkpoints of the run in {plain / 'run'}" in message


def test_a_run_is_not_started_where_it_would_not_see_its_checkpoints(home: Path, tmp_path: Path) -> None:
    train(tmp_path / "plain")
    for resume in (False, True, "auto"):
        message = refusal(tmp_path, resume=resume)
        assert f"has 1 checkpoint(s) in {home}, and checkpoint_dir is " in message
        assert f"--checkpoint-dir {home} to continue it" in message
        other = {"checkpoint_dir": str(tmp_path / "other"), "resume": resume}
        assert "and checkpoint_dir is" in refusal(tmp_path, **other)
        assert "Remedy: leave checkpoint_dir out to continue it" in refusal(tmp_path / "plain", **other)


def test_a_folder_that_is_gone_is_named(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(home)
    message = refusal(tmp_path, checkpoint_dir=str(home), resume="auto")
    assert f"the checkpoints of the run in {tmp_path / 'run'} were in {home}, and there is no such folder" in message
    assert checkpoints(["list", str(tmp_path / "run")]) == 1
    assert f"write its present path into {tmp_path / 'run' / 'checkpoint_dir.txt'}" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="there is no such folder"):
        home_of(tmp_path / "run")


def set_age(path: Path, days: float) -> None:
    manifest = Manifest.read(path)
    date = datetime.now(timezone.utc) - timedelta(days=days)
    text = replace(manifest, created=date.isoformat(timespec="seconds")).to_json()
    (path / FILE_NAME).write_text(text, encoding="utf-8")


@pytest.fixture
def five(tmp_path: Path) -> Callable[..., list[str]]:
    """Resumes a run whose checkpoints of updates 1, 2 and 3 are 9, 8 and 2 days old: the names that are left."""
    saving = {"default_hooks__checkpoint": {"interval": 1, "unit": "update"}}
    train(tmp_path, updates=4, **saving)
    for number, days in ((1, 9), (2, 8), (3, 2)):
        set_age(tmp_path / "run" / f"iter_{number}.pth", days)

    def names_after(**hook: Any) -> list[str]:
        train(
            tmp_path, updates=5, resume=True, default_hooks__checkpoint={**saving["default_hooks__checkpoint"], **hook}
        )
        return [checkpoint.path.stem for checkpoint in list_checkpoints(tmp_path / "run")]

    return names_after


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        ({}, ["iter_1", "iter_2", "iter_3", "iter_4", "iter_5"]),
        ({"max_keep_days": 7}, ["iter_3", "iter_4", "iter_5"]),
        ({"max_keep_days": 8.5, "max_keep_ckpts": 4}, ["iter_2", "iter_3", "iter_4", "iter_5"]),
        ({"max_keep_days": 1, "max_keep_ckpts": 4}, ["iter_4", "iter_5"]),
        ({"max_keep_days": 7, "max_keep_ckpts": 1}, ["iter_5"]),
        ({"max_keep_days": 1e-9}, ["iter_5"]),
    ],
)
def test_old_ones_are_deleted_by_number_and_by_age(
    five: Callable[..., list[str]], hook: dict[str, Any], expected: list[str]
) -> None:
    assert five(**hook) == expected


def test_neither_the_last_good_one_nor_the_best_is_deleted_by_its_age(tmp_path: Path) -> None:
    hook = {"type": "EvaluateHook", "interval": 1, "unit": "update", "save_best": "val/loss", "rule": "greater"}
    options = {"custom_hooks": [hook], "val_dataloader": {"split": 0.2},
             "default_hooks__checkpoint": {"interval": 1, "unit": "update", "max_keep_days": 1e-9}}  # fmt: skip
    train(tmp_path, updates=4, **options)  # the loss falls: the greatest is the first
    assert [checkpoint.path.stem for checkpoint in list_checkpoints(tmp_path / "run")] == ["iter_1", "iter_4"]
    set_age(tmp_path / "run" / "iter_1.pth", 30)
    set_age(tmp_path / "run" / "iter_4.pth", 30)
    train(tmp_path, updates=5, resume=True, **options)
    assert [checkpoint.path.stem for checkpoint in list_checkpoints(tmp_path / "run")] == ["iter_1", "iter_5"]


def test_an_age_must_be_positive(tmp_path: Path) -> None:
    assert "max_keep_days" in refusal(tmp_path, default_hooks__checkpoint={"max_keep_days": 0})
