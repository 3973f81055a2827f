"""The losses of a training for each source of its data, against those of single records computed by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.text_run import count_up, word_config, write_jsonl
from tests.tiny import tiny_config
from unigen_ds.config.registry import HOOKS
from unigen_ds.core.batch import Batch
from unigen_ds.data.batches.loader import collate
from unigen_ds.data.order.order import Draw
from unigen_ds.examples.digits.dataset import write_digits
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.runner import Runner
from unigen_ds.system.journals import read_lines

NAMES = ("few", "many")


@HOOKS.register_module(force=True)
class KeepSamples(Hook):
    """Sample ids of each update, and those that could not be read."""

    def __init__(self) -> None:
        self.ids: list[Sequence[str]] = []
        self.unreadable: set[str] = set()

    def before_train_iter(self, run: Run, index: int, batch: Batch) -> None:
        self.unreadable |= {entry["sample"] for entry in batch.skipped}

    def after_update(self, run: Run, result: UpdateResult) -> None:
        self.ids.append(result.sample_ids)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of records that draw and read digits; one picture cannot be read."""
    root = write_digits(tmp_path_factory.mktemp("data") / "digits")
    lines = (root / "train.jsonl").read_text().splitlines(keepends=True)
    (root / "bad.png").write_bytes(b"no image")
    bad = {"text_prompt": "draw a handwritten six", "image_path": "bad.png"}
    (root / "few.jsonl").write_text("".join(lines[:7]))
    (root / "many.jsonl").write_text("".join(lines[7:20]) + json.dumps(bad) + "\n")
    return root


def config(folder: Path, root: Path, **changes: Any) -> Any:
    """Nothing moves: the learning rate is 0, no condition is left out."""
    sources = [{"type": "UnifiedGenerationDataset", "data_path": str(root / f"{name}.jsonl")} for name in NAMES]
    options = {
        "train_dataloader__dataset": {"_delete_": True, **sources[0]}, "train_dataloader__batch_size": 2,
        "optim_wrapper__accumulative_counts": 2, "optim_wrapper__optimizer__lr": 0.0, "param_scheduler": [],
        "loss_weights": {"text": 2.0, "image": 0.5}, "processor__ce_reweight": True, "processor__text_dropout": 0.0,
        "custom_hooks": [{"type": "KeepSamples"}], **changes,
    }  # fmt: skip
    settings = tiny_config(folder, root, **options)
    settings["train_dataloader"]["dataset"] = sources
    return settings


def of_record(runner: Runner, sample_id: str) -> dict[str, tuple[float, float]]:
    """Sum of the losses and weight of the targets of each term, of one record alone."""
    name, index, number = sample_id.split(":")
    draw = Draw(NAMES.index(name), int(index), int(number))
    batch = collate([(draw,)], runner.datasets, runner.processor, seq_length=80)
    model: Any = runner.backend.model
    with torch.no_grad():
        sums = model(batch).sums
    counts = batch.target_counts()
    return {term: (float(total), counts[term]) for term, total in sums.items()}


@pytest.mark.parametrize("packing", [None, {"type": "BestFitPacking", "window": 8}])
def test_they_are_means_over_the_targets_of_each_source(tmp_path: Path, digits: Path, packing: Any) -> None:
    runner = Runner.from_cfg(config(tmp_path / "run", digits, train_dataloader__packing=packing), max_updates=4)
    assert logged_names(runner) == {f"loss/{term}/{name}" for term in ("text", "image") for name in NAMES}
    assert {one.partition(":")[0] for one in kept_of(runner).unreadable} == {"many"}


def test_a_target_at_the_first_token_of_a_document_is_its_own(tmp_path: Path) -> None:
    records = count_up(30)
    for name, part in zip(NAMES, (records[:9], records[9:]), strict=True):
        write_jsonl(tmp_path / f"{name}.jsonl", part)
    sources = [{"type": "UnifiedGenerationDataset", "data_path": str(tmp_path / f"{name}.jsonl")} for name in NAMES]
    settings = word_config(tmp_path, optim_wrapper__optimizer__lr=0.0, custom_hooks=[{"type": "KeepSamples"}])
    settings["train_dataloader"]["dataset"] = sources
    assert logged_names(Runner.from_cfg(settings, max_updates=4)) == {f"loss/text/{name}" for name in NAMES}


def kept_of(runner: Runner) -> KeepSamples:
    return next(hook for hook in runner.hooks if isinstance(hook, KeepSamples))


def logged_names(runner: Runner) -> set[str]:
    """Train four updates. Every loss of a source is that of its records; returns the names."""
    runner.train()
    hook = kept_of(runner)
    lines = read_lines(runner.work_dir / "metrics.jsonl")
    assert len(lines) == len(hook.ids) == 4
    names: set[str] = set()
    for line, ids in zip(lines, hook.ids, strict=True):
        names |= compare(runner, line, set(ids) - hook.unreadable)
    return names


def compare(runner: Runner, line: dict[str, Any], ids: set[str]) -> set[str]:
    """The losses of sources in a line of the update that had the records ``ids``."""
    expected: dict[str, tuple[float, float]] = {}
    for sample_id in ids:
        for term, (total, weight) in of_record(runner, sample_id).items():
            name = f"loss/{term}/{sample_id.partition(':')[0]}"
            before = expected.get(name, (0.0, 0.0))
            expected[name] = (before[0] + total, before[1] + weight)
    means = {name: total / weight for name, (total, weight) in expected.items() if weight}
    assert {name: line[name] for name in line if name.count("/") == 2} == pytest.approx(means, rel=1e-5)
    return {*means}


def test_one_source_has_the_lines_of_before(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", count_up(20))
    Runner.from_cfg(word_config(tmp_path), max_updates=2).train()
    for line in read_lines(tmp_path / "run" / "metrics.jsonl"):
        assert line["loss/text"] > 0 and not [key for key in line if key.startswith("loss/") and key.count("/") > 1]
