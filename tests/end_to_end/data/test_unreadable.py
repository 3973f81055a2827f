"""No silent loss: updates without targets, sources whose images cannot be read, paths with ``~`` and variables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.support import talk, text
from tests.text_run import run_config, text_config, words
from tests.tiny import tiny_config
from tools.train import main as train
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.examples.digits.dataset import write_digits
from unigen_ds.runner import Runner


def test_an_update_without_a_target_is_a_warning(tmp_path: Path) -> None:
    """A conversation whose question fills the sequence keeps no target under 'truncate'; one document of three does."""
    records = [talk(text("user", words(40)), text("assistant", "one"))] * 2 + [{"text": "one two"}]
    runner, hook = run_config(text_config(tmp_path, records, train_dataloader__overflow="truncate"))
    log = (runner.work_dir / "train.log").read_text(encoding="utf-8")
    without = [n for n, batch in enumerate(hook.batches, 1) if not len(batch.text_target_ids)]
    assert len(hook.batches) == 3 and len(without) == 2
    assert log.count("WARNING Update ") == 2
    assert all(f"Update {n} had no target in its 1 samples: nothing was learned" in log for n in without)
    other, _ = run_config(text_config(tmp_path, [{"text": "one"}], work_dir=str(tmp_path / "other")))
    assert "had no target" not in (other.work_dir / "train.log").read_text(encoding="utf-8")


def test_a_source_without_a_readable_image_stops_the_start(tmp_path: Path, capsys: Any) -> None:
    root = tmp_path / "digits"
    write_digits(root)
    data = tmp_path / "digits_val.jsonl"
    lines = (root / "val.jsonl").read_text(encoding="utf-8").splitlines()[:12]
    data.write_text("".join(line.replace("val/", "gone/") + "\n" for line in lines), encoding="utf-8")
    source = {"type": "UnifiedGenerationDataset", "data_path": str(data)}
    first = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    paths = list(dict.fromkeys(
        str(tmp_path / turn["image_path"]) for r in first for turn in r["conversations"] if turn["type"] == "image"
    ))  # fmt: skip
    config = tiny_config(tmp_path / "broken", root, train_dataloader__dataset=source)
    with pytest.raises(DataError, match="digits_val: none of its 12 images can be read") as error:
        Runner.from_cfg(config)
    assert [path for path in paths if path in str(error.value)] == paths[:5]
    options = [f"{key}={value}" for key, value in {
        "train_dataloader.dataset": source, "work_dir": str(tmp_path / "tool"), "train_dataloader.num_workers": 0,
    }.items()]  # fmt: skip
    assert train(["unified_digits", "--cfg-options", *options]) == 1
    assert paths[0] in capsys.readouterr().err and not list((tmp_path / "tool").glob("*.pth"))
    (root / "val").rename(tmp_path / "gone")  # repaired: the index of before is not believed
    Runner.from_cfg(tiny_config(tmp_path / "again", root, train_dataloader__dataset=source))


def test_home_and_variables_in_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CORPUS", "train")
    text_config(tmp_path, [{"text": words(5)}] * 3)
    with (tmp_path / "config.py").open("a", encoding="utf-8") as file:
        file.write("work_dir = '~/there/run'\n")
    overrides = {"train_dataloader.dataset.data_path": "~/${CORPUS}.jsonl",
                 "train_dataloader.dataset.cache_dir": "$HOME/cache"}  # fmt: skip
    options = [f"{key}={value}" for key, value in overrides.items()]
    assert train([str(tmp_path / "config.py"), "--max-updates", "1", "--cfg-options", *options]) == 0
    assert [path.name for path in (tmp_path / "there" / "run").glob("*.pth")] == ["iter_1.pth"]
    with pytest.raises(ConfigError, match=r"work_dir is '\$NOT_SET/run', and the environment variable NOT_SET is not"):
        text_config(tmp_path, [{"text": "one"}], work_dir="$NOT_SET/run")
