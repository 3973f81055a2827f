"""Numbers of the data: consistent sums, the samples of a range, and what a start logs, with the balance of an epoch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.data.support import make_stream, mixed_dataset
from tests.tiny import tiny_config
from unigen_ds.data.batches.statistics import describe_data
from unigen_ds.runner import Runner


def test_describe(tmp_path: Path) -> None:
    sets = [mixed_dataset(tmp_path / name, number, name=name) for name, number in (("a", 20), ("b", 8))]
    stream = make_stream(sets, window=28, weights=[1.0, 3.0], seq_length=60)
    both = describe_data(stream)
    one = both["sources"]["a"]
    assert one["records"] == 20 and one["records_text_only"] == 5 and one["records_with_images"] == 15
    assert one["tokens"] == one["text_tokens"] + one["image_tokens"] == sets[0].lengths()[0].sum()
    assert 0 < one["image_token_share"] < 1 and one["text_targets"] > 0 and one["image_targets"] > 0
    assert one["lengths"]["min"] <= one["lengths"]["p50"] <= one["lengths"]["max"]
    json.dumps(both)
    assert both["records"] == 28 and both["sources"]["b"]["draws_per_epoch"] == 21
    assert both["sequences_per_epoch"] == stream.sequences_per_epoch and both["packed"]
    tokens = sum(min(int(sets[d.source].lengths()[0][d.index]), 60) for r in stream.window_rows(0, 0) for d in r)
    assert both["utilisation"] == pytest.approx(tokens / (60 * stream.sequences_per_epoch))
    assert describe_data(make_stream(sets))["samples_per_sequence"] == 1.0


def log_of(folder: Path, digits: Path, lines: list[str]) -> list[str]:
    data = folder.with_suffix(".jsonl")
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
    lines = log_of(tmp_path / "even", digits, draws[:20] + reads[:20])
    (line,) = [line for line in lines if "generate text" in line]
    assert "20 generate images" in line and "40 samples drawn an epoch" in line
    assert not [line for line in lines if "WARNING" in line]


def test_skipped_records_are_not_in_the_statistics(tmp_path: Path, digits: Path) -> None:
    draws, reads = kinds(digits)
    record = json.loads(reads[0])
    record["conversations"][-1]["content"] = " ".join(["7"] * 400)
    lines = log_of(tmp_path / "long", digits, [*draws[:20], *reads[:20], *[json.dumps(record) + "\n"] * 5])
    assert any("5 skipped" in line for line in lines), lines
    (line,) = [line for line in lines if "generate text" in line]
    assert "40 samples drawn an epoch" in line and "20 generate text, 20 generate images" in line
    (short,) = [line for line in log_of(tmp_path / "even", digits, draws[:20] + reads[:20]) if "generate text" in line]
    assert line.partition(": ")[2].partition(": ")[2] == short.partition(": ")[2].partition(": ")[2]


@pytest.mark.parametrize(("images", "texts"), [(2, 30), (30, 2)])
def test_a_strong_imbalance_is_a_warning(tmp_path: Path, digits: Path, images: int, texts: int) -> None:
    draws, reads = kinds(digits)
    lines = log_of(tmp_path / "odd", digits, draws[:images] + reads[:texts])
    (line,) = [line for line in lines if "WARNING" in line]
    more, fewer = ("texts", "images") if texts > images else ("images", "texts")
    assert f"30 samples of an epoch generate {more}, 2 generate {fewer}: more than 10 to 1" in line and "weight" in line
