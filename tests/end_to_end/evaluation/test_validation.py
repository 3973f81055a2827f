"""Validation through ``Runner.from_cfg``: what is held out, what the losses are, and that training notices nothing."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.end_to_end.engines.launch import tensors, unequal
from tests.text_run import count_up, evaluations, word_config, write_jsonl
from tests.tiny import tiny_config
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.checkpoint.store import list_checkpoints
from unigen_ds.config.registry import HOOKS, MODELS
from unigen_ds.core.batch import LossTerms, PackedBatch
from unigen_ds.core.errors import ConfigError, DataError, ResumeBlocked
from unigen_ds.data.batches.loader import collate
from unigen_ds.data.order.order import Draw
from unigen_ds.families.bagel.model import UnifiedModel
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.runner import Runner
from unigen_ds.runner.settings.tree import Settings
from unigen_ds.system.journals import read_lines

EVERY = {"type": "EvaluateHook", "interval": 2, "unit": "update"}
SPLIT = {"split": 0.2, "batch_size": 4}


@MODELS.register_module(force=True)
class Drawing(UnifiedModel):
    """Draws from every generator in each forward pass, has running statistics, and a part that never trains."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.norm, self.fixed = nn.BatchNorm1d(1), nn.BatchNorm1d(1).eval()

    def forward(self, batch: PackedBatch) -> LossTerms:
        sums = dict(super().forward(batch).sums)
        noise = torch.rand(()) + float(np.random.rand()) + random.random()
        image = self.fixed(self.norm(batch.flow_noise.reshape(-1, 1)[:64])) if len(batch.flow_noise) else noise
        sums["image"] = sums["image"] + image.square().sum() + 0.0 * self.norm.weight.sum()
        return LossTerms(sums)


@HOOKS.register_module(force=True)
class KeepValues(Hook):
    """What ``after_val`` was called with, by update, and the numbers of the records that were trained on."""

    def __init__(self) -> None:
        self.indices: set[int] = set()
        self.values: dict[int, Mapping[str, float]] = {}
        self.num_starts = 0

    def after_update(self, run: Run, result: UpdateResult) -> None:
        self.indices |= {int(sample.split(":")[1]) for sample in result.sample_ids}

    def before_val(self, run: Run) -> None:
        self.num_starts += 1

    def after_val(self, run: Run, metrics: Mapping[str, float]) -> None:
        self.values[run.progress.updates] = dict(metrics)


def kept_of(run: Runner) -> KeepValues:
    return next(hook for hook in run.hooks if isinstance(hook, KeepValues))


def training(folder: Path) -> list[tuple[Any, ...]]:
    lines = [line for line in read_lines(folder / "run" / "metrics.jsonl") if "event" not in line]
    return [(line["update"], line["loss"], line["grad_norm"], line["lr"], line["samples"]) for line in lines]


def text_run(folder: Path, *, updates: int | None = None, **options: Any) -> Runner:
    folder.mkdir(exist_ok=True)
    if not (folder / "train.jsonl").exists():
        write_jsonl(folder / "train.jsonl", count_up(60))
    options.setdefault("custom_hooks", [EVERY] if options.get("val_dataloader") else [])
    return Runner.from_cfg(word_config(folder, **options), max_updates=updates)


def at_start(folder: Path, **options: Any) -> Mapping[str, float]:
    hook = {**EVERY, "at_start": True, **options.pop("hook", {})}
    run = text_run(
        folder, updates=1, **{"val_dataloader": SPLIT, "custom_hooks": [hook, {"type": "KeepValues"}], **options}
    )
    run.train()
    return kept_of(run).values[0]


# --- the training notices nothing -------------------------------------------------------------------------------------


def digits_run(folder: Path, root: Path, **options: Any) -> Runner:
    config = {
        "model__type": "Drawing", "model__llm__dropout": 0.1, "train_dataloader__batch_size": 2,
        "optim_wrapper__accumulative_counts": 2, "train_cfg": {"max_updates": 4},
        "default_hooks__checkpoint__interval": 4, **options,
    }  # fmt: skip
    return Runner.from_cfg(tiny_config(folder / "run", root, **config))


def held_digits(root: Path, **settings: Any) -> dict[str, Any]:
    return {"dataset": {"type": "DigitsDataset", "root": str(root), "split": "val"}, "batch_size": 8, **settings}


def test_training_with_and_without_evaluation_is_bit_equal(tmp_path: Path, digits: Path) -> None:
    """Generators of torch, numpy and Python, running statistics, dropout, a part in another mode, EMA weights."""
    ema = {"type": "EMAHook", "momentum": 0.1}
    hook = {**EVERY, "interval": 1, "at_start": True, "max_batches": 3, "use_ema": True}
    digits_run(tmp_path / "without", digits, custom_hooks=[ema]).train()
    validation = {"val_dataloader": held_digits(digits, num_workers=1), "custom_hooks": [ema, hook]}
    digits_run(tmp_path / "with", digits, **validation).train()
    assert [line["update"] for line in evaluations(tmp_path / "with")] == [0, 1, 2, 3, 4]
    assert_same_training(tmp_path / "without", tmp_path / "with")


def assert_same_training(a: Path, b: Path) -> None:
    """Lines, checkpoints, generators and ledger, bit by bit."""
    assert training(a) == training(b) and len(training(a)) >= 2
    for one, other in zip(list_checkpoints(a / "run"), list_checkpoints(b / "run"), strict=True):
        assert unequal(tensors(one.path), tensors(other.path)) == []
        states = [sorted((checkpoint.path / "rng").iterdir()) for checkpoint in (one, other)]
        assert [p.read_bytes() for p in states[0]] == [p.read_bytes() for p in states[1]]
        loaders = [Manifest.read(checkpoint.path).loader for checkpoint in (one, other)]
        assert loaders[0] == loaders[1]
    assert (a / "run" / "ledger.jsonl").read_bytes() == (b / "run" / "ledger.jsonl").read_bytes()


# --- what the values are ----------------------------------------------------------------------------------------------


def by_hand(run: Runner, root_of: Any, number: int, **changes: Any) -> dict[str, float]:
    """Mean losses of records, one at a time, noise keyed by their ids."""
    dataset = root_of.build(processor=run.processor)
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    run.processor.dropout = {}
    run.backend.model.eval()
    for index in range(number):
        batch = collate([(Draw(0, index, 0),)], [dataset], run.processor, seq_length=80)
        with torch.no_grad():
            terms = run.backend.model(batch)
        for term, count in batch.target_counts().items():
            sums[term] = sums.get(term, 0.0) + float(terms.sums[term])
            counts[term] = counts.get(term, 0.0) + count
    return {key: value / counts[key] for key, value in sums.items() if counts[key]}


def test_the_values_are_means_over_targets_by_term_and_source(tmp_path: Path, digits: Path) -> None:
    """Without condition dropout; the noise of a record is a function of its id alone."""
    hooks = [{**EVERY, "at_start": True, "interval": -1}, {"type": "KeepValues"}]
    loader = held_digits(digits, batch_size=50)
    run = digits_run(
        tmp_path, digits, model__type="UnifiedModel", val_dataloader=loader, custom_hooks=hooks,
        loss_weights={"text": 2.0, "image": 0.5}, processor__vit_dropout=0.9, train_cfg={"max_updates": 1},
    )  # fmt: skip
    again = Settings.from_config(run.config)
    expected = by_hand(
        digits_run(tmp_path / "hand", digits, model__type="UnifiedModel"), again.val_dataloader.dataset[0], 594
    )
    run.train()
    hook = kept_of(run)
    values = hook.values[0]
    assert hook.num_starts == 2 and set(hook.values) == {0, 1}
    assert len(expected) == 2
    for key, value in expected.items():
        assert values[f"val/loss/{key}"] == pytest.approx(value, rel=1e-6), key
    for term in ("text", "image"):
        assert values[f"val/loss/{term}/digits_val"] == values[f"val/loss/{term}"]
    assert values["val/loss"] == pytest.approx(2.0 * expected["text"] + 0.5 * expected["image"], rel=1e-6)
    assert set(values) == {
        "val/loss",
        *(f"val/loss/{key}" for key in (*expected, "text/digits_val", "image/digits_val")),
    }


def test_each_source_has_its_own_losses(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", count_up(7))
    write_jsonl(tmp_path / "b.jsonl", [{"text": "nine nine"}, {"text": "five"}])
    data = [{"type": "UnifiedGenerationDataset", "data_path": str(tmp_path / f"{name}.jsonl")} for name in "ab"]
    values = at_start(tmp_path, val_dataloader={"dataset": data, "batch_size": 3})
    targets = {"a": sum(len(r["text"].split()) + 1 for r in count_up(7)), "b": 5}
    mean = sum(values[f"val/loss/text/{name}"] * number for name, number in targets.items()) / sum(targets.values())
    assert values["val/loss"] == pytest.approx(mean, rel=1e-6)
    assert values["val/loss/text/a"] != values["val/loss/text/b"]
    alone = at_start(tmp_path / "alone", val_dataloader={"dataset": data[1], "batch_size": 3})
    assert alone["val/loss/text"] == pytest.approx(values["val/loss/text/b"], rel=1e-6)


def test_splits_of_the_training_batch_change_no_bit_and_batch_sizes_no_digit(tmp_path: Path) -> None:
    cuts = [(8, 1), (4, 2), (2, 4)]
    values = [
        at_start(tmp_path / f"{b}x{n}", train_dataloader__batch_size=b, optim_wrapper__accumulative_counts=n)
        for b, n in cuts
    ]
    assert values[0] == values[1] == values[2]
    for size in (1, 3, 64):
        other = at_start(tmp_path / f"by{size}", val_dataloader={**SPLIT, "batch_size": size})
        assert other == pytest.approx(values[0], rel=1e-6), size
    assert at_start(tmp_path / "workers", val_dataloader={**SPLIT, "num_workers": 2}) == values[0]


def test_a_part_of_the_samples_is_spread_over_the_source(tmp_path: Path) -> None:
    run = text_run(tmp_path, val_dataloader={**SPLIT, "batch_size": 2})
    data = run.validation._sets[0].data
    (every,), (some,) = data.draws(), data.draws(4)
    assert (
        len(some) == 4 and set(some) < set(every) and some[0] == every[0] and every.index(some[-1]) >= len(every) // 2
    )
    at_start(tmp_path / "b", hook={"max_batches": 1})
    assert "Evaluation: 4 samples" in (tmp_path / "b" / "run" / "train.log").read_text()


def test_the_average_is_evaluated_where_it_is_wanted(tmp_path: Path) -> None:
    ema = {"type": "EMAHook", "momentum": 0.01}
    values = []
    for use in (False, True):
        hooks = [ema, {**EVERY, "use_ema": use}]
        text_run(tmp_path / str(use), val_dataloader=SPLIT, custom_hooks=hooks).train()
        values.append(evaluations(tmp_path / str(use))[-1]["val/loss"])
    assert training(tmp_path / "False") == training(tmp_path / "True")
    assert values[1] > values[0] + 0.1  # the average is hardly trained
    with pytest.raises(ConfigError, match="there is no EMAHook"):
        text_run(tmp_path / "none", val_dataloader=SPLIT, custom_hooks=[{**EVERY, "use_ema": True}]).train()


def test_an_unreadable_sample_is_counted(tmp_path: Path, digits: Path) -> None:
    from PIL import Image

    Image.new("L", (8, 8)).save(tmp_path / "good.png")
    (tmp_path / "bad.png").write_bytes(b"no image")
    record = {"text_prompt": "draw a seven", "image_path": "good.png"}
    write_jsonl(tmp_path / "val.jsonl", [record, {**record, "image_path": "bad.png"}, record])
    data = {"type": "UnifiedGenerationDataset", "data_path": str(tmp_path / "val.jsonl")}
    run = digits_run(tmp_path, digits, model__type="UnifiedModel", val_dataloader={"dataset": data, "batch_size": 2},
                     train_cfg={"max_updates": 1})  # fmt: skip
    run.train()
    log = (tmp_path / "run" / "train.log").read_text()
    assert "1 validation samples could not be read and are left out of val/loss. The first: val:1:0" in log
    assert evaluations(tmp_path)[-1]["val/loss/image"] > 0


# --- when -------------------------------------------------------------------------------------------------------------


def test_the_interval_the_end_the_checkpoint_and_the_lines(tmp_path: Path) -> None:
    text_run(tmp_path, val_dataloader=SPLIT, train_cfg={"max_updates": 5}).train()
    lines = evaluations(tmp_path)
    assert [line["update"] for line in lines] == [2, 4, 5]
    assert set(lines[0]) == {"event", "update", "val/loss", "val/loss/text", "val/loss/text/train"}
    log = (tmp_path / "run" / "train.log").read_text()
    assert f"evaluation at update 4: val/loss {lines[1]['val/loss']:.4g}" in log
    metrics = {
        checkpoint.manifest.progress.updates: checkpoint.manifest.metrics
        for checkpoint in list_checkpoints(tmp_path / "run")
        if checkpoint.manifest
    }
    assert metrics[5]["val/loss"] == lines[-1]["val/loss"]


def test_a_hook_is_added_where_there_is_none(tmp_path: Path) -> None:
    run = text_run(tmp_path, val_dataloader=SPLIT, custom_hooks=[], train_cfg={"max_epochs": 2})
    run.train()
    assert len(evaluations(tmp_path)) == 2 and run.progress.epoch == 2
    assert "val_dataloader is evaluated after every epoch" in (tmp_path / "run" / "train.log").read_text()


def test_the_cache_of_the_device_is_released_if_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after each evaluation; the device is a stand-in."""
    releases: list[str] = []
    device = SimpleNamespace(is_available=lambda: True, empty_cache=lambda: releases.append("all"))
    monkeypatch.setattr(
        "unigen_ds.hooks.evaluate.evaluate.torch", SimpleNamespace(cuda=device, manual_seed=torch.manual_seed)
    )
    text_run(tmp_path, val_dataloader=SPLIT).train()
    assert releases == []
    text_run(tmp_path / "wanted", val_dataloader=SPLIT, custom_hooks=[{**EVERY, "empty_cache": True}]).train()
    assert len(releases) == 2 * len(evaluations(tmp_path / "wanted")) == 6


@HOOKS.register_module(force=True)
class KillOnce(Hook):
    """SIGKILL after an update, whose evaluation is in the log and whose checkpoint is not written."""

    def __init__(self, *, at_update: int) -> None:
        self.at_update = at_update

    def after_update(self, run: Run, result: UpdateResult) -> None:
        if run.progress.updates == self.at_update:
            os.kill(os.getpid(), signal.SIGKILL)


# --- a share of the training records ----------------------------------------------------------------------------------


def test_what_is_evaluated_is_never_trained_on(tmp_path: Path) -> None:
    """Sample ids have the number of the record in its file; equal records are on the same side."""
    records = [*count_up(40), *count_up(40)]  # each twice
    records += [{"note": i % 7, **record} for i, record in enumerate(count_up(40))]
    write_jsonl(tmp_path / "train.jsonl", records)
    shuffled = [json.dumps(dict(reversed(record.items())), indent=1) for record in records]
    loader = {"train_dataloader__drop_last": False, "custom_hooks": [{"type": "KeepValues"}]}
    run = text_run(tmp_path, val_dataloader=SPLIT, train_cfg={"max_epochs": 1}, **loader)
    run.train()
    held_out = {draw.index for draw in run.validation._sets[0].data.draws()[0]}
    indices = kept_of(run).indices
    assert len(held_out) + len(indices) == 120 and not held_out & indices
    assert {i + 40 for i in held_out if i < 40} == {i for i in held_out if 40 <= i < 80}
    assert 10 <= len(held_out) <= 40
    other = tmp_path / "other"
    other.mkdir()
    (other / "train.jsonl").write_text(f"[{','.join(shuffled)}]")  # other keys first, other white space, another format
    (other / "words.txt").write_text("")
    same = text_run(other, val_dataloader=SPLIT, tokenizer={"type": "WordTokenizer", "words": ["zero", "two"]})
    assert {draw.index for draw in same.validation._sets[0].data.draws()[0]} == held_out
    second = text_run(tmp_path, val_dataloader={**SPLIT, "seed": 5}, resume=False, work_dir=str(tmp_path / "seeded"))
    assert {draw.index for draw in second.validation._sets[0].data.draws()[0]} != held_out


def test_appended_records_move_no_old_one_and_a_changed_share_is_a_change(tmp_path: Path) -> None:
    first = text_run(tmp_path, val_dataloader=SPLIT, updates=2)
    first.train()
    held_out = set(first.validation._sets[0].data.draws()[0])
    changes: list[tuple[Any, str]] = [
        (None, "val_dataloader.split was .*'share': 0.2.* and is None"),
        ({**SPLIT, "split": 0.3}, "was .*'share': 0.2.* and is .*'share': 0.3"),
        ({**SPLIT, "seed": 4}, "was .*'seed': 0.* and is .*'seed': 4"),
    ]
    for loader, words in changes:
        with pytest.raises(ResumeBlocked, match=words):
            text_run(tmp_path, val_dataloader=loader, resume=True)
        with pytest.raises(ResumeBlocked, match="data"):
            text_run(tmp_path, val_dataloader=loader, resume=True, on_data_change="append")
    write_jsonl(tmp_path / "train.jsonl", [*count_up(60), *[{"text": "two " * k} for k in range(1, 31)]])
    with pytest.raises(ResumeBlocked, match="train had"):
        text_run(tmp_path, val_dataloader=SPLIT, resume=True)
    options = {"resume": True, "train_dataloader__drop_last": False, "custom_hooks": [{"type": "KeepValues"}]}
    more = text_run(
        tmp_path, val_dataloader=SPLIT, on_data_change="append", train_cfg={"max_updates": 40}, **options
    )  # fmt: skip
    now = set(more.validation._sets[0].data.draws()[0])
    assert held_out < now and all(draw.index >= 60 for draw in now - held_out)
    more.train()
    indices = kept_of(more).indices
    assert not indices & {draw.index for draw in now} and len(indices) + len(now) == 90
    restart = text_run(
        tmp_path,
        val_dataloader={**SPLIT, "split": 0.3},
        resume=True,
        on_data_change="restart",
        train_cfg={"max_updates": 42},
    )
    restart.train()
    assert restart.progress.updates == 42


def test_a_share_of_nothing_and_of_all(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", count_up(4))
    for share, problem in ((0.0001, "selects none of 4 records"), (0.9999, "leaves none of the 4 records of train")):
        with pytest.raises(DataError, match=problem):
            text_run(tmp_path, val_dataloader={"split": share})


# --- the settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loader",
    [None, "", {"dataset": ""}, {"dataset": {"type": "UnifiedGenerationDataset", "data_path": ""}, "batch_size": 1}],
)
def test_no_validation(tmp_path: Path, loader: Any) -> None:
    hooks = [EVERY] if loader is not None else []
    run = text_run(tmp_path, val_dataloader=loader, custom_hooks=hooks)
    assert not run.validation
    run.train()
    assert evaluations(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"custom_hooks": [EVERY]}, "there is no val_dataloader"),
        ({"val_dataloader": {"batch_size": 2}}, "neither dataset nor split"),
        ({"val_dataloader": {"split": 1.5}}, "val_dataloader.split is 1.5"),
        ({"val_dataloader": {**SPLIT, "packing": None}}, "an evaluation has one sample in a sequence"),
        ({"val_dataloader": {**SPLIT, "batch_size": 0}}, "val_dataloader.batch_size is 0"),
        ({"val_dataloader": SPLIT, "val_evaluator": {"type": "Accuracy"}}, "the metrics of EvaluateHook"),
    ],
)  # fmt: skip
def test_wrong_settings(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    config = {**{key: word_config(tmp_path)[key] for key in word_config(tmp_path)}, **changes}
    with pytest.raises(ConfigError, match=words):
        Settings.from_config(config)
