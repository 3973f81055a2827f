"""The last line of a run: where everything is, and a command that works."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.text_run import text_config, words
from tests.tiny import tiny_config
from tools import generate, report
from unigen_ds.runner import train_config


def commands(work_dir: Path) -> list[list[str]]:
    """The program and arguments of each command of the last line, with this test's own values."""
    last = (work_dir / "train.log").read_text(encoding="utf-8").splitlines()[-1]
    assert f"Everything is in {work_dir}: " in last
    values = {"TEXT": "draw a handwritten one"}
    lines = [shlex.split(command) for command in last.partition(" Next: ")[2].split("; ")]
    return [[Path(line[1]).stem, *(values.get(word, word) for word in line[2:])] for line in lines]


@pytest.mark.parametrize(
    "task, options",
    [("draw", ["--prompt"]), ("caption", ["--image", "FILE", "--understand", "--prompt"])],
)
def test_a_complete_run_names_the_command_that_uses_its_model(
    task: str, options: list[str], tmp_path: Path, digits: Path
) -> None:
    val: dict[str, Any] = {"type": "DigitsDataset", "root": str(digits), "task": task, "split": "val"}
    config = tiny_config(
        tmp_path / "run",
        digits,
        train_dataloader__dataset__task=task,
        train_cfg={"max_updates": 2},
        default_hooks__checkpoint={"interval": 1, "unit": "update"},
        val_dataloader={"batch_size": 2, "dataset": {**val, "task": task}},
        custom_hooks=[
            {"type": "EvaluateHook", "interval": 1, "unit": "update", "max_batches": 1, "save_best": "val/loss"}
        ],
    )
    assert train_config(config) is None
    (name, checkpoint, *words), (second, folder) = commands(tmp_path / "run")
    assert name == "generate" and [word for word in words if word.startswith("--") or word == "FILE"] == options
    assert checkpoint == (tmp_path / "run" / "best_checkpoint").read_text().strip()
    image = next((digits / "val").glob("*.png"))
    words = [str(image) if word == "FILE" else word for word in words]
    more = ["--out", str(tmp_path / "out"), "--max-length", "2", *(["--num-timesteps", "2"] if task == "draw" else [])]
    assert generate.main([checkpoint, *words, *more]) == 0
    assert second == "report" and report.main([folder]) == 0


def test_a_run_that_has_more_updates_is_continued(tmp_path: Path) -> None:
    config = text_config(tmp_path, [{"text": words(4, k)} for k in range(8)], custom_hooks=[])
    train_config(config, max_updates=1)
    assert [name for name, *_ in commands(tmp_path / "run")] == ["report"]  # it was not started by the tool
