"""Skipped updates, the first update of a fine-tune and the last losses after a resume: what is reported, what stops."""

from __future__ import annotations

import logging
import math
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.hooks.tiny_run import TinyRun
from tests.text_run import run_config, text_config, words
from tests.tiny import tiny_config
from tools.export import main as export
from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.config.registry import HOOKS
from unigen_ds.core.errors import TrainingError
from unigen_ds.families.decoder_lm.family import Decoder
from unigen_ds.hooks.base import Hook
from unigen_ds.hooks.guard.losses import NanGuardHook
from unigen_ds.runner import Runner
from unigen_ds.system.files import DIGESTS
from unigen_ds.system.log import NAME
from unigen_ds.system.seeding import rng_state


def test_a_warning_names_update_and_sequences(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(NAME), "propagate", True)
    run = TinyRun(tmp_path, [NanGuardHook()])
    run.update()
    run.update(applied=False)
    (record,) = caplog.records
    assert "update 2 (sequences 4:8)" in record.getMessage() and record.levelno == logging.WARNING


def test_so_many_in_a_row_stop_the_run(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, [NanGuardHook(max_consecutive=3)])
    run.update(applied=False)
    run.update()
    run.update(applied=False)
    run.update(applied=False)
    with pytest.raises(TrainingError) as error:
        run.update(applied=False)
    message = str(error.value)
    assert "3 updates in a row" in message and "updates 3 to 5, sequences 8:20" in message and "0:4" not in message
    remedy, _, rest = message.partition(": source:8:0")
    assert remedy.endswith("inspect_data.py CONFIG --sequences 8:20` shows all of these samples") and len(remedy) < 350
    assert message.count("tools/inspect_data.py") == 1 and rest.endswith("source:15:0 and 4 more.")


def test_an_overflow_of_fp16_is_no_gradient_that_is_not_finite(tmp_path: Path) -> None:
    """While the loss scale falls; at its least, or where the loss itself is not finite, it counts."""
    run = TinyRun(tmp_path, [NanGuardHook(max_consecutive=2)])
    for _ in range(5):
        run.update(applied=False, scale_fell=True)
    run.update(applied=False)
    run.update(applied=False, scale_fell=True)
    with pytest.raises(TrainingError, match=r"updates 6 to 8"):
        run.update(applied=False, scale_fell=True, text=math.inf)


RECORDS = [{"text": words(6, i)} for i in range(40)]
CHANCE = math.log(16)
"""Ten words, and special tokens."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned to count, as a directory that ``model.pretrained`` reads."""
    folder = tmp_path_factory.mktemp("published")
    cfg = text_config(
        folder, RECORDS, train_cfg={"max_epochs": 12}, optim_wrapper__optimizer={"type": "AdamW", "lr": 0.05}
    )
    runner, _ = run_config(cfg)
    assert export([str(runner.work_dir), str(folder / "model")]) == 0
    (folder / "model" / DIGESTS).unlink()  # the tests change the weights
    return folder / "model"


def lines(folder: Path, weights: Path, **overrides: Any) -> tuple[list[str], list[str]]:
    """What the log of a fine-tune of one update has about it: information and warnings."""
    folder.mkdir(exist_ok=True)
    cfg = text_config(folder, RECORDS, train_cfg={"max_updates": 1}, **overrides)
    cfg.model = {"type": "DecoderLM", "pretrained": str(weights)}
    with suppress(TrainingError):  # weights that are NaN end the run at its first save
        Runner.from_cfg(cfg).train()
    log_lines = (folder / "run" / "train.log").read_text().splitlines()
    return tuple(
        [x.partition("First update: ")[2] for x in log_lines if f"{kind} First update: " in x]
        for kind in ("INFO", "WARNING")
    )


def test_good_weights_have_no_warning(directory: Path, tmp_path: Path) -> None:
    info, warnings = lines(tmp_path, directory)
    number = len(load_file(directory / "model.safetensors"))
    assert warnings == [] and info[0] == f"the values of {number} tensors are looked at."
    assert info[1].startswith("losses text ") and f"chance is text {CHANCE:.4g}." in info[1]
    assert float(info[1].split("text ")[1].split(";")[0]) < 0.5 * CHANCE


def test_useless_weights_are_named_with_their_causes(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of the embedding belong to other tokens, as under another model's tokenizer."""
    shutil.copytree(directory, tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    name = next(name for name in tensors if "embed_tokens" in name)
    save_file({**tensors, name: tensors[name].roll(5, 0).contiguous()}, tmp_path / "model" / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    _, (warnings, link) = lines(tmp_path, tmp_path / "model")
    assert warnings.endswith(
        f", and chance is {CHANCE:.4g}: the task is new to the loaded weights, or they are not the trained ones"
    )
    assert link == "the likely causes are in docs/checkpoints/load_from.md#the-first-update"
    monkeypatch.setattr(Decoder, "chance_level", lambda family, processor: {"image": 2.0})
    info, warnings = lines(tmp_path / "unknown", tmp_path / "model")
    assert warnings == [] and info[1].startswith("losses text ") and "chance" not in info[1], "its family states none"


def test_a_loss_above_the_expected_one(directory: Path, tmp_path: Path) -> None:
    expected = {"first_update": {"expected": {"text": 0.01, "image": 0.5}, "factor": 2.0}}
    _, warnings = lines(tmp_path, directory, default_hooks=expected)
    assert len(warnings) == 3 and "more than 2 times the expected 0.01 (FirstUpdateHook.expected)" in warnings[0]
    assert "expected has image, of which this update had no targets" in warnings[1]


@pytest.mark.parametrize(("value", "info"), [(0.0, "are all zeros"), (500.0, "more than 10"), (math.nan, "not finite")])
def test_tensors_that_cannot_be_right(directory: Path, tmp_path: Path, value: float, info: str) -> None:
    shutil.copytree(directory, tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    name = next(name for name in tensors if "gate_proj" in name)
    save_file({**tensors, name: torch.full_like(tensors[name], value)}, tmp_path / "model" / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    _, warnings = lines(tmp_path, tmp_path / "model")
    assert info in warnings[0] and "gate_proj.weight" in warnings[0] and f"1 of {len(tensors)} tensors" in warnings[0]


def test_random_weights_and_a_resume_are_not_looked_at(directory: Path, tmp_path: Path) -> None:
    Runner.from_cfg(text_config(tmp_path, RECORDS, train_cfg={"max_updates": 1})).train()
    log = tmp_path / "run" / "train.log"
    assert "First update" not in log.read_text()
    lines(tmp_path / "tuned", directory)
    cfg = text_config(tmp_path / "tuned", RECORDS, train_cfg={"max_updates": 2}, resume=True)
    cfg.model = {"type": "DecoderLM", "pretrained": str(directory)}
    Runner.from_cfg(cfg).train()
    assert (tmp_path / "tuned" / "run" / "train.log").read_text().count("tensors are looked at") == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Three updates of 4 x 3 packed sequences, with dropout."""
    folder = tmp_path_factory.mktemp("continuity")
    train(folder, "run", 3)
    return folder


def train(folder: Path, name: str, updates: int, **options: Any) -> Runner:
    base = {"train_dataloader__batch_size": 4, "optim_wrapper__accumulative_counts": 3, "model__llm__dropout": 0.1}
    runner = Runner.from_cfg(tiny_config(folder / name, folder / "digits", **{**base, **options}), max_updates=updates)
    runner.train()
    return runner


def resume_line(folder: Path, name: str, **options: Any) -> str:
    """The log of the check when a copy of the run is resumed."""
    shutil.copytree(folder / "run", folder / name)
    train(folder, name, 4, resume=True, **options)
    lines = (folder / name / "train.log").read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if " Continuity" in line), "")


def test_the_recorded_losses_come_again_to_the_bit(folder):
    path = folder / "run" / "iter_9.pth"
    losses = store.read_hook_states(path, Manifest.read(path))["continuity"]["losses"]
    assert set(losses) == {"text", "image"}
    line = resume_line(folder, "same")
    assert "are the recorded ones" in line
    for name, value in losses.items():
        assert f"{name} {value:.6g} -> {value:.6g}" in line


def test_another_split_reproduces_them_up_to_rounding(folder):
    line = resume_line(folder, "split", train_dataloader__batch_size=2, optim_wrapper__accumulative_counts=6)
    assert "are the recorded ones" in line


@HOOKS.register_module()
class DamageHook(Hook):
    """Doubles the weights between loading and the check."""

    @property
    def priority(self) -> int:
        return 1

    def after_load_checkpoint(self, run, manifest):
        with torch.no_grad():
            for shard in run.backend.master_shards():
                shard.data.mul_(2.0)


def test_other_weights_are_reported(folder):
    line = resume_line(folder, "warned", custom_hooks=[{"type": "DamageHook"}])
    assert "WARNING" in line and "are not the recorded ones" in line


def test_or_stop_the_run(folder):
    with pytest.raises(TrainingError, match="are not the recorded ones"):
        halt = {"type": "ContinuityHook", "on_mismatch": "halt"}
        resume_line(folder, "halted", custom_hooks=[{"type": "DamageHook"}], default_hooks__continuity=halt)
    assert [path.name for path in (folder / "halted").glob("iter_*")] == ["iter_9.pth"]


def test_a_batch_size_that_does_not_divide_the_update_is_reported(folder):
    line = resume_line(folder, "indivisible", train_dataloader__batch_size=5, optim_wrapper__accumulative_counts=1,
                   on_batch_change="keep-lr")  # fmt: skip
    assert "not checked" in line


def test_the_check_draws_no_random_number(folder):
    """Otherwise the dropout after a resume would not be that of the uninterrupted run."""
    runner = train(folder, "random", 2)
    runner._last = replace(runner._last, update=None)
    before = rng_state()
    assert runner.last_losses()
    after = rng_state()
    assert torch.equal(before["torch"], after["torch"]) and before["scalars"] == after["scalars"]
    assert runner.backend.model.training
