"""Real runs that go on with another effective batch, or with changed data: by choice, and never asked twice."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_config
from unigen_ds.checkpoint import store
from unigen_ds.config.registry import HOOKS
from unigen_ds.core.errors import ResumeBlocked
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.runner import Runner
from unigen_ds.system.journals import read_lines

BASE: dict[str, Any] = {
    "train_dataloader__batch_size": 8,
    "train_dataloader__packing": None,
    "optim_wrapper__accumulative_counts": 2,
    "train_cfg__max_epochs": 3,
    "optim_wrapper__optimizer__lr": 1e-3,
    "default_hooks__checkpoint__max_keep_ckpts": -1,
}
CURVE = [{"type": "CosineAnnealingLR", "by_epoch": True, "begin": 0, "end": 3, "convert_to_iter_based": True}]
RECORDS = 83


class Bench:
    """Runs on one JSONL file that may be edited."""

    def __init__(self, folder: Path, digits: Path) -> None:
        self.folder, self.digits = folder, digits
        self.records = (digits / "train_caption.jsonl").read_text(encoding="utf-8").splitlines()
        self.data = folder / "mine.jsonl"
        self.write(self.records[:RECORDS])

    def write(self, lines: list[str]) -> None:
        self.data.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def train(self, name: str, updates: int, **options: Any) -> Runner:
        dataset = {"type": "UnifiedGenerationDataset", "data_path": str(self.data), "image_root": str(self.digits)}
        settings = {"train_dataloader__dataset": dataset, **BASE, "param_scheduler": CURVE, **options}
        config = tiny_config(self.folder / name, self.digits, **settings)
        runner = Runner.from_cfg(config, max_updates=updates)
        runner.train()
        return runner

    def lines(self, name: str, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
        return read_lines(self.folder / name / file)

    def copy(self, name: str, new: str) -> None:
        shutil.copytree(self.folder / name, self.folder / new)


@pytest.fixture(scope="module")
def bench(tmp_path_factory, digits) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("changes"), digits)
    bench.train("straight", 15)
    bench.train("short", 3)
    return bench


HALF = {"resume": True, "train_dataloader__batch_size": 4}


def lr(bench: Bench, name: str) -> dict[int, float]:
    """Sequences consumed before an update -> its learning rate."""
    return {line["sequences"] - (16 if line["update"] <= 3 or name == "straight" else 8): line["lr"]
            for line in bench.lines(name)}  # fmt: skip


@pytest.mark.parametrize(("choice", "factor"), [("keep-lr", 1.0), ("linear", 0.5), ("sqrt", 0.5**0.5)])
def test_the_choice_scales_the_curve_and_is_remembered(bench, choice, factor):
    """Saved at update 7, and resumed once more without the flag: the scale stays, nothing is asked."""
    bench.copy("short", choice)
    bench.train(choice, 7, **HALF, on_batch_change=choice)
    bench.train(choice, 9, **HALF)
    straight, rates = lr(bench, "straight"), lr(bench, choice)
    after = [place for place in rates if place >= 48 and place in straight]
    assert len(after) >= 3
    for place in after:
        assert rates[place] == pytest.approx(straight[place] * factor, rel=1e-9)
    newest, _ = store.newest(bench.folder / choice)
    assert newest is not None and newest.manifest is not None
    assert newest.manifest.schedule["lr_scale"] == pytest.approx(factor)


WARMUP = {"type": "LinearLR", "start_factor": 0.1, "begin": 0}
UNITS = {
    "by epoch": [{**WARMUP, "by_epoch": True, "end": 0.9, "convert_to_iter_based": True}],
    "by iteration": [{**WARMUP, "by_epoch": False, "end": 9}],
    "by update": [{**WARMUP, "unit": "update", "end": 5}],
}


@pytest.mark.parametrize("kind", UNITS)
def test_warm_up_goes_on_in_every_unit(bench, kind, tmp_path):
    """Stopped in the middle of the warm-up; 8 x 2 -> 4 x 4 -> 16 x 1: the same rate at the same update."""
    name = kind.replace(" ", "_")
    bench.train(name + "_straight", 7, param_scheduler=UNITS[kind])
    for updates, batch_size, counts in ((2, 8, 2), (4, 4, 4), (7, 16, 1)):
        cut = {"train_dataloader__batch_size": batch_size, "optim_wrapper__accumulative_counts": counts}
        bench.train(name, updates, resume=updates > 2, param_scheduler=UNITS[kind], **cut)
    straight, rates = ([line["lr"] for line in bench.lines(n)] for n in (name + "_straight", name))
    assert rates == straight and straight[0] < straight[2] < straight[-1]


# ---- data -----------------------------------------------------------------------------------------------------------


@HOOKS.register_module()
class RecordIdsHook(Hook):
    name = "record_ids"

    def after_update(self, run: Run, result: UpdateResult) -> None:
        with (run.work_dir / "ids.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps([run.progress.updates, list(result.sample_ids)]) + "\n")


def samples(bench: Bench, name: str, first: int, last: int) -> list[str]:
    lines = (bench.folder / name / "ids.jsonl").read_text(encoding="utf-8").splitlines()
    return [i for update, ids in map(json.loads, lines) if first <= update <= last for i in ids]


def test_appended_records_join_from_the_next_epoch_on(tmp_path, digits):
    """80 of 83 records make the first epoch (drop-last): 5 updates. Stopped after 3, then 40 records more."""
    mine = Bench(tmp_path, digits)
    record = {"custom_hooks": [{"type": "RecordIdsHook"}]}
    mine.train("straight", 5, **record)
    mine.train("run", 3, **record)
    mine.write(mine.records[: RECORDS + 40])
    with pytest.raises(ResumeBlocked, match=r"had 83 records and has 123.*--on-data-change append"):
        mine.train("run", 6, resume=True, **record)
    mine.train("run", 4, resume=True, on_data_change="append", **record)
    mine.train("run", 12, resume=True, **record)  # asked once
    assert samples(mine, "run", 1, 5) == samples(mine, "straight", 1, 5), "the first epoch is finished as it began"
    first, second = samples(mine, "run", 1, 5), samples(mine, "run", 6, 12)
    assert len(second) == 7 * 16 and max(Counter(second).values()) == 1 and not set(first) & set(second)
    new = {i for i in second if int(i.split(":")[1]) >= RECORDS}
    assert len(new) > 30  # 112 of 123 were drawn so far


def test_other_data_begins_a_new_epoch_by_choice(tmp_path, digits):
    bench = Bench(tmp_path, digits)
    bench.train("run", 3)
    bench.write(bench.records[100:160])
    with pytest.raises(ResumeBlocked, match="training data differs"):
        bench.train("run", 6, resume=True, on_data_change="append")
    runner = bench.train("run", 6, resume=True, on_data_change="restart")
    assert runner.progress.epoch == 1 and runner.progress.sequences == 6 * 16
    assert bench.train("run", 7, resume=True).progress.updates == 7  # asked once
