"""The judge: right on real digits, able to say no, and blind to nothing that the model could cheat with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny import tiny_config
from unigen_ds.core.errors import ConfigError
from unigen_ds.examples.digits.dataset import read_split
from unigen_ds.examples.digits.report_hook import train_classifier
from unigen_ds.runner import Runner

Split = tuple[np.ndarray, np.ndarray]


@pytest.fixture(scope="module")
def splits(digits: Path) -> tuple[Split, Split]:
    return read_split(digits, "train"), read_split(digits, "val")


@pytest.fixture(scope="module")
def classifier(splits: tuple[Split, Split]) -> Any:
    return train_classifier(*splits[0])


def test_the_classifier_reads_real_digits(classifier: Any, splits: tuple[Split, Split]) -> None:
    images, labels = splits[1]
    assert len(images) == 297 and classifier.score(images.reshape(len(images), -1), labels) >= 0.95


def report(work_dir: Path, data: Path, dataset: object) -> dict[str, Any]:
    hook = {"type": "DigitsReportHook", "num_timesteps": 2}
    changes = {"train_dataloader__dataset": dataset, "custom_hooks": [hook], "train_cfg": {"max_updates": 1}}
    Runner.from_cfg(tiny_config(work_dir, data, **{**changes, "param_scheduler": []})).train()
    assert (work_dir / "samples.png").is_file()
    results: dict[str, Any] = json.loads((work_dir / "results.json").read_text())
    return results


def test_the_hook_finds_the_digits_among_the_runs_data(digits: Path, tmp_path: Path) -> None:
    mixture = [{"type": "DigitsDataset", "root": str(digits), "task": task} for task in ("draw", "caption")]
    own = {"type": "UnifiedGenerationDataset", "data_path": str(digits / "train.jsonl"), "cache_dir": str(tmp_path)}
    results = report(tmp_path / "mixture", digits, mixture)
    assert results["drawn"] == 200 and results["captioned"] == 297
    with pytest.raises(ConfigError, match="DigitsReportHook needs a data set of type DigitsDataset"):
        report(tmp_path / "none", digits, own)
    assert not (tmp_path / "none" / "metrics.jsonl").exists(), "refused before the training"
