"""What a user plugs in or switches on, in a real run: curve, augmentation, hooks, precision, weights.

Each run trains the tiny model of ``tests/tiny.py`` on real digits for a few updates.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.text_run import KeepBatches
from tests.tiny import tiny_config
from unigen_ds.config.registry import TRANSFORMS
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.runner import Runner
from unigen_ds.system.journals import read_lines

UPDATES = 4


@TRANSFORMS.register_module()
class Negative:
    """An augmentation of a user's own: black becomes white."""

    def __call__(self, image: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return -image


class SlowHook(Hook):
    def after_update(self, run: Run, result: UpdateResult) -> None:
        time.sleep(0.02)


@dataclass(frozen=True)
class Training:
    runner: Runner
    watcher: KeepBatches

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [line for line in read_lines(self.runner.work_dir / "metrics.jsonl") if "loss" in line]


def train(work_dir: Path, data: Path, *hooks: Any, updates: int = UPDATES, **changes: Any) -> Training:
    custom_hooks = [{"type": "KeepBatches"}, *hooks]
    options = {"param_scheduler": [], "train_dataloader__batch_size": 4, "custom_hooks": custom_hooks, **changes}
    runner = Runner.from_cfg(tiny_config(work_dir, data, **options), max_updates=updates)
    runner.train()
    return Training(runner, next(hook for hook in runner.hooks if isinstance(hook, KeepBatches)))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Training:
    return train(tmp_path_factory.mktemp("plain"), digits)


def test_an_augmentation_of_ones_own_changes_what_is_read_alone(tmp_path: Path, digits: Path, plain: Training) -> None:
    with_change = train(tmp_path, digits, processor__vit_augment=[{"type": "Negative"}])
    for own, other in zip(with_change.watcher.batches, plain.watcher.batches, strict=True):
        assert torch.equal(own.vit_patches, -other.vit_patches)
        assert torch.equal(own.vae_images, other.vae_images) and torch.equal(own.text_ids, other.text_ids)
    assert any(batch.vit_patches.numel() for batch in plain.watcher.batches)


def test_another_seed_is_another_run_and_the_same_one_the_same(tmp_path: Path, digits: Path, plain: Training) -> None:
    same = [line["loss"] for line in train(tmp_path / "same", digits).lines]
    other = [line["loss"] for line in train(tmp_path / "other", digits, randomness__seed=7).lines]
    assert same == [line["loss"] for line in plain.lines] and not set(other) & set(same)


def test_targets_are_weighed_by_the_length_of_their_text(tmp_path: Path, digits: Path, plain: Training) -> None:
    assert all(torch.all(batch.text_target_weight == 1.0) for batch in plain.watcher.batches)
    with_weights = train(tmp_path, digits, processor__ce_reweight=True)
    texts = 0
    for batch in with_weights.watcher.batches:
        of_split = batch.split_ids[batch.text_target_index]
        for split in of_split.unique():
            weights = batch.text_target_weight[of_split == split]
            assert torch.allclose(weights, torch.full_like(weights, 1 / math.sqrt(len(weights))))
            texts += 1
    assert texts > 10


def test_conditions_are_dropped_as_often_as_asked(tmp_path: Path, digits: Path, plain: Training) -> None:
    """With probability 1 no question is left: prompts and the pictures that are read are gone, targets are not."""
    none = train(tmp_path, digits, processor__text_dropout=1.0, processor__vit_dropout=1.0)
    targets = [sum(len(b.text_target_ids) for b in t.watcher.batches) for t in (none, plain)]
    assert targets[0] == targets[1] > 0
    assert all(batch.vit_patches.numel() == 0 for batch in none.watcher.batches)
    assert sum(b.num_tokens for b in none.watcher.batches) < sum(b.num_tokens for b in plain.watcher.batches)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_keeps_fp32_masters_and_resumes_bit_equal(tmp_path: Path, digits: Path, precision: str) -> None:
    """fp16 begins with its loss scale: a first overflow is skipped, and the scale continues after a resume."""
    changes: dict[str, Any] = {"optim_wrapper__precision": precision}
    straight = train(tmp_path / "straight", digits, **changes)
    train(tmp_path / "cut", digits, updates=2, **changes)
    cut = train(tmp_path / "cut", digits, resume=True, **changes)
    assert [line["loss"] for line in cut.lines] == [line["loss"] for line in straight.lines]
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert {p.dtype for p in straight.runner.backend.model.parameters()} == {low}
    name = f"iter_{UPDATES}.pth"
    one, two = (load_file(tmp_path / run / name / "model.safetensors") for run in ("straight", "cut"))
    assert all(torch.equal(one[key], two[key]) for key in one)
    masters = [value for value in one.values() if value.dtype == torch.float32]
    assert any(not torch.equal(value, value.to(low).float()) for value in masters), "masters are not rounded"
    scales = load_file(tmp_path / "cut" / name / "optimizer.safetensors").get("loss_scale|loss_scale|0")
    assert (scales is not None) == (precision == "fp16")


def test_a_slow_hook_is_named_once(tmp_path: Path, digits: Path) -> None:
    train(tmp_path, digits, {"type": SlowHook}, updates=56, train_dataloader__batch_size=1)
    log = (tmp_path / "train.log").read_text()
    assert log.count("of the time is other") == 1 and "slow hooks" in log
