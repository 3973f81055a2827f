"""Every format through a real run: the shipped samples give the very numbers of their JSONL, whatever reads them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_config
from unigen_ds.core.metrics import read_lines
from unigen_ds.runner import Runner

SAMPLES = Path(__file__).resolve().parents[2] / "docs" / "samples"
HUGGINGFACE = {"format": "huggingface"}
SAME: dict[str, dict[str, dict[str, Any]]] = {
    "captions.jsonl": {
        "captions.csv": {}, "captions.parquet": {}, "captions.feather": {}, "captions_bagel_t2i.parquet": {},
        "captions.tar": {}, "captions_folder": {}, "captions_metadata": {}, "captions_saved": {},
    },
    "talks.jsonl": {"talks_llava.json": {}, "talks_openai.jsonl": {}, "talks_nanovlm.parquet": {}, "talks.tar": {}},
    "texts.jsonl": {
        "texts.csv": {}, "texts.tsv": {}, "texts_folder": {}, "texts.jsonl.gz": {}, "texts.jsonl.zst": {},
    },
    "edits.jsonl": {"edits_bagel.parquet": {}},
}  # fmt: skip


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy: the index is kept beside the data."""
    folder = tmp_path_factory.mktemp("data") / "samples"
    shutil.copytree(SAMPLES, folder, ignore=shutil.ignore_patterns(".unigen_index"))
    return folder


def source(path: Any, **more: Any) -> dict[str, Any]:
    return {"type": "UnifiedGenerationDataset", "data_path": str(path), "name": "data", **more}


def train(folder: Path, data: Any, *, updates: int = 3, **dotted: Any) -> tuple[list[Any], list[Any]]:
    """Losses, and the ranges and digests of samples, of a tiny run."""
    config = tiny_config(folder, folder, train_dataloader__batch_size=1, **dotted)
    config["train_dataloader"]["dataset"] = data
    Runner.from_cfg(config, max_updates=updates).train()
    losses = [{key: value for key, value in line.items() if key.startswith("loss")}
              for line in read_lines(folder / "metrics.jsonl")]  # fmt: skip
    return losses, [(line["sequences"], line["digest"]) for line in read_lines(folder / "ledger.jsonl")]


@pytest.fixture(scope="module")
def reference(samples: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    known: dict[str, Any] = {}

    def of(name: str) -> Any:
        if name not in known:
            known[name] = train(tmp_path_factory.mktemp("run"), source(samples / name))
        return known[name]

    return of


@pytest.mark.parametrize(
    ("jsonl", "other", "more"), [(jsonl, other, more) for jsonl, rest in SAME.items() for other, more in rest.items()]
)
def test_the_same_records_train_bit_equally(
    jsonl: str, other: str, more: dict[str, Any], samples: Path, reference: Any, tmp_path: Path
) -> None:
    expected = reference(jsonl)
    assert len(expected[0]) == 3 and all(any(loss > 0 for loss in line.values()) for line in expected[0])
    assert train(tmp_path, source(samples / other, **more)) == expected


def test_every_sample_is_compared() -> None:
    named = {*SAME, *(other for rest in SAME.values() for other in rest)}
    found = {path.name for path in SAMPLES.iterdir()} - {"make.py", "images", ".unigen_index"}
    assert found == named


def manifest(folder: Path) -> Any:
    return json.loads(next(folder.glob("*/manifest.json")).read_text())
