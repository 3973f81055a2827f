"""What a start logs of the data: statistics of each source, and whether texts and images are in balance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny import tiny_config
from unigen_ds.examples.digits.dataset import write_digits
from unigen_ds.runner import Runner


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("data") / "digits")


def logged(folder: Path, digits: Path, lines: list[str]) -> list[str]:
    data = digits / f"{folder.name}.jsonl"
    data.write_text("".join(lines))
    source = [{"type": "UnifiedGenerationDataset", "data_path": str(data), "image_root": str(digits)}]
    Runner.from_cfg(tiny_config(folder, digits, train_dataloader__dataset=source, train_dataloader__batch_size=2))
    return [line for line in (folder / "train.log").read_text().splitlines() if " Data" in line]


def kinds(digits: Path) -> tuple[list[str], list[str]]:
    """Records that draw an image, and records that answer with a text."""
    lines = (digits / "train.jsonl").read_text().splitlines(keepends=True)
    draws = [line for line in lines if '"content": "draw' in line]
    return draws, [line for line in lines if line not in {*draws}]


def test_a_start_logs_what_an_epoch_draws(tmp_path: Path, digits: Path) -> None:
    draws, reads = kinds(digits)
    assert draws and reads
    lines = logged(tmp_path / "even", digits, draws[:20] + reads[:20])
    (line,) = [line for line in lines if "generate text" in line]
    assert "20 generate images" in line and "40 samples drawn an epoch" in line
    assert not [line for line in lines if "WARNING" in line]


def test_skipped_records_are_not_in_the_statistics(tmp_path: Path, digits: Path) -> None:
    """The longest records are skipped whole, since they do not fit into a sequence."""
    draws, reads = kinds(digits)
    record = json.loads(reads[0])
    record["conversations"][-1]["content"] = " ".join(["7"] * 400)
    lines = logged(tmp_path / "long", digits, [*draws[:20], *reads[:20], *[json.dumps(record) + "\n"] * 5])
    assert any("5 skipped" in line for line in lines), lines
    (line,) = [line for line in lines if "generate text" in line]
    assert "40 samples drawn an epoch" in line and "20 generate text, 20 generate images" in line
    (short,) = [line for line in logged(tmp_path / "even", digits, draws[:20] + reads[:20]) if "generate text" in line]
    assert line.partition(": ")[2].partition(": ")[2] == short.partition(": ")[2].partition(": ")[2]


@pytest.mark.parametrize(("images", "texts"), [(2, 30), (30, 2)])
def test_a_strong_imbalance_is_a_warning(tmp_path: Path, digits: Path, images: int, texts: int) -> None:
    draws, reads = kinds(digits)
    lines = logged(tmp_path / "odd", digits, draws[:images] + reads[:texts])
    (line,) = [line for line in lines if "WARNING" in line]
    more, fewer = ("texts", "images") if texts > images else ("images", "texts")
    assert f"30 samples of an epoch generate {more}, 2 generate {fewer}: more than 10 to 1" in line and "weight" in line
