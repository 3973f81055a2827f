"""Fine-tunes from good, useless and damaged weights, through ``Runner``: what is logged of their first update."""

from __future__ import annotations

import math
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.text_run import text_config, trained, words
from tools.export import main as export
from unigen_ds.core.errors import TrainingError
from unigen_ds.families.decoder_lm.family import Decoder
from unigen_ds.runner import Runner
from unigen_ds.system.files import DIGESTS

RECORDS = [{"text": words(6, i)} for i in range(40)]
CHANCE = math.log(16)
"""Ten words, and special tokens."""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned to count, as a directory that ``model.pretrained`` reads."""
    folder = tmp_path_factory.mktemp("published")
    cfg = text_config(
        folder, RECORDS, train_cfg={"max_epochs": 12}, optim_wrapper__optimizer={"type": "AdamW", "lr": 0.05}
    )
    runner, _ = trained(cfg)
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
    found = (folder / "run" / "train.log").read_text().splitlines()
    return tuple(
        [x.partition("First update: ")[2] for x in found if f"{kind} First update: " in x]
        for kind in ("INFO", "WARNING")
    )


def test_good_weights_have_no_warning(published: Path, tmp_path: Path) -> None:
    info, warned = lines(tmp_path, published)
    number = len(load_file(published / "model.safetensors"))
    assert warned == [] and info[0] == f"the values of {number} tensors are looked at."
    assert info[1].startswith("losses text ") and f"chance is text {CHANCE:.4g}." in info[1]
    assert float(info[1].split("text ")[1].split(";")[0]) < 0.5 * CHANCE


def test_useless_weights_are_named_with_their_causes(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of the embedding belong to other tokens, as under another model's tokenizer."""
    shutil.copytree(published, tmp_path / "model")
    tensors = load_file(published / "model.safetensors")
    name = next(name for name in tensors if "embed_tokens" in name)
    save_file({**tensors, name: tensors[name].roll(5, 0).contiguous()}, tmp_path / "model" / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    _, (warned, link) = lines(tmp_path, tmp_path / "model")
    assert warned.endswith(
        f", and chance is {CHANCE:.4g}: the task is new to the loaded weights, or they are not the trained ones"
    )
    assert link == "the likely causes are in docs/checkpoints.md#the-first-update"
    monkeypatch.setattr(Decoder, "chance_level", lambda family, processor: {"image": 2.0})
    info, warned = lines(tmp_path / "unknown", tmp_path / "model")
    assert warned == [] and info[1].startswith("losses text ") and "chance" not in info[1], "its family states none"


def test_a_loss_above_the_expected_one(published: Path, tmp_path: Path) -> None:
    expected = {"first_update": {"expected": {"text": 0.01, "image": 0.5}, "factor": 2.0}}
    _, warned = lines(tmp_path, published, default_hooks=expected)
    assert len(warned) == 3 and "more than 2 times the expected 0.01 (FirstUpdateHook.expected)" in warned[0]
    assert "expected has image, of which this update had no targets" in warned[1]


@pytest.mark.parametrize(("value", "info"), [(0.0, "are all zeros"), (500.0, "more than 10"), (math.nan, "not finite")])
def test_tensors_that_cannot_be_right(published: Path, tmp_path: Path, value: float, info: str) -> None:
    shutil.copytree(published, tmp_path / "model")
    tensors = load_file(published / "model.safetensors")
    name = next(name for name in tensors if "gate_proj" in name)
    save_file({**tensors, name: torch.full_like(tensors[name], value)}, tmp_path / "model" / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    _, warned = lines(tmp_path, tmp_path / "model")
    assert info in warned[0] and "gate_proj.weight" in warned[0] and f"1 of {len(tensors)} tensors" in warned[0]


def test_random_weights_and_a_resume_are_not_looked_at(published: Path, tmp_path: Path) -> None:
    Runner.from_cfg(text_config(tmp_path, RECORDS, train_cfg={"max_updates": 1})).train()
    log = tmp_path / "run" / "train.log"
    assert "First update" not in log.read_text()
    lines(tmp_path / "tuned", published)
    cfg = text_config(tmp_path / "tuned", RECORDS, train_cfg={"max_updates": 2}, resume=True)
    cfg.model = {"type": "DecoderLM", "pretrained": str(published)}
    Runner.from_cfg(cfg).train()
    assert (tmp_path / "tuned" / "run" / "train.log").read_text().count("tensors are looked at") == 1
