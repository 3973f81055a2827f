"""Configs and checkpoints from before the digits were a plug-in still work, and continue under today's config."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, run
from tests.tiny import TINY

BEFORE = Path(__file__).parent / "config_before_plug_ins.py"


def train(folder: Path, config: str, *arguments: str, **changed: object) -> str:
    """A training as a process of its own, which has imported nothing of the demo; its log."""
    options = {"train_dataloader.dataset.root": str(folder.parent / "digits"), **changed}
    command = [sys.executable, "tools/train.py", config, "--work-dir", str(folder), *arguments]
    command += ["--cfg-options", *(f"{key}={value}" for key, value in options.items())]
    done = run(command, cwd=ROOT, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return (folder / "train.log").read_text()


def updates(folder: Path) -> dict[int, list[float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["update"]: [line[key] for key in ("loss", "lr", "grad_norm")] for line in lines if "loss" in line}


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two updates of the former config, and a checkpoint that names the former components."""
    folder = tmp_path_factory.mktemp("former") / "run"
    train(folder, str(BEFORE), "--max-updates", "2")
    return folder


def test_a_former_config_trains_and_the_log_names_the_plug_in(before: Path) -> None:
    log = (before / "train.log").read_text()
    line = "'DigitsDataset' is in unigen_ds.examples.digits now; import it with custom_imports"
    assert log.count(line) == log.count("unigen_ds.examples.digits now") == 1, "the import registers the hook as well"
    assert sorted(updates(before)) == [1, 2]
    manifest = json.loads((before / "iter_2.pth" / "manifest.json").read_text())
    assert "custom_imports" not in manifest["config"]
    assert manifest["config"]["custom_hooks"] == [{"type": "DigitsReportHook"}]


def test_it_continues_under_todays_config_bit_equal_and_nothing_is_an_edit(before: Path) -> None:
    options = {**TINY, "custom_hooks": [{"type": "DigitsReportHook"}]}
    text = train(before, "unified_digits", "--resume", "--max-updates", "4", **options)
    assert "Checklist: " in text and "Checklist, " not in text, "no point of the checklist is a warning"
    straight = before.parent / "straight"
    text = train(straight, "unified_digits", "--max-updates", "4", **options)
    assert "unigen_ds.examples.digits now" not in text, "today's config names the plug-in"
    assert updates(before) == updates(straight) and sorted(updates(straight)) == [1, 2, 3, 4]
