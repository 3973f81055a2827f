"""Settings whose effect only a whole run shows: loss weights, page-locked batches, the end of an epoch."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.tiny import tiny_config
from unigen_ds.core.batch import PackedBatch
from unigen_ds.hooks.base import Hook, Run
from unigen_ds.runner import Runner
from unigen_ds.system.journals import read_lines

HEADS = {"text": "language_model.lm_head.weight", "image": "llm2vae.weight"}
"""The weights that one term of the loss alone reaches."""


def train_lines(work_dir: Path, data: Path, *, max_updates: int, **overrides: Any) -> list[dict[str, Any]]:
    """The metrics of a run without packing, dropout, decay and curve."""
    settings = {
        "train_dataloader__dataset__split": "val",
        "train_dataloader__packing": None,
        "train_dataloader__batch_size": 8,
        "optim_wrapper__accumulative_counts": 2,
        "optim_wrapper__optimizer__weight_decay": 0.0,
        "param_scheduler": [],
        "processor__text_dropout": 0.0,
    }
    config = tiny_config(work_dir, data, **{**settings, **overrides})
    Runner.from_cfg(config, max_updates=max_updates).train()
    return read_lines(work_dir / "metrics.jsonl")


def last_weights(work_dir: Path) -> dict[str, Tensor]:
    (checkpoint,) = work_dir.glob("iter_*.pth")
    return load_file(checkpoint / "model.safetensors")


# --- loss_weights -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weighted(tmp_path_factory, digits) -> dict[str, tuple[list[dict[str, Any]], dict[str, Tensor]]]:
    """Metrics and last weights of two updates, with several ``loss_weights``."""
    cases = {
        "none": {},
        "doubled": {"text": 2.0, "image": 2.0},
        "unlike": {"text": 0.25, "image": 4.0},
        "without text": {"text": 0.0},
        "without image": {"image": 0.0},
    }
    runs = {}
    for name, weights in cases.items():
        folder = tmp_path_factory.mktemp("run")
        runs[name] = (train_lines(folder, digits, max_updates=2, loss_weights=weights), last_weights(folder))
    runner = Runner.from_cfg(tiny_config(tmp_path_factory.mktemp("start"), digits))
    runs["start"] = ([], dict(runner.backend.model.state_dict()))
    return runs


def test_twice_the_weights_are_twice_the_gradient(weighted):
    """Exactly: a factor of 2 rounds nothing."""
    (plain, *_), (double, *_) = weighted["none"][0], weighted["doubled"][0]
    assert double["loss"] == 2 * plain["loss"] and double["grad_norm"] == 2 * plain["grad_norm"]


def test_the_logged_loss_is_the_weighted_sum(weighted):
    (plain, *_), (unlike, *_) = weighted["none"][0], weighted["unlike"][0]
    for term in ("loss/text", "loss/image"):
        assert unlike[term] == plain[term], "the terms themselves are not weighted"
    assert unlike["loss"] == 0.25 * unlike["loss/text"] + 4.0 * unlike["loss/image"]
    assert unlike["grad_norm"] != pytest.approx(plain["grad_norm"], rel=0.05)


@pytest.mark.parametrize(("term", "other"), [("text", "image"), ("image", "text")])
def test_a_term_of_weight_zero_moves_nothing(weighted, term, other):
    """Its own weights stay as they began, to the last bit; the other term's are trained."""
    still, trains = weighted[f"without {term}"][1], weighted[f"without {other}"][1]
    start = weighted["start"][1]
    assert still[HEADS[term]].equal(start[HEADS[term]]) and not trains[HEADS[term]].equal(start[HEADS[term]])
    assert not still[HEADS[other]].equal(start[HEADS[other]])


# --- pin_memory ---------------------------------------------------------------------------------------------------


class Storages(Hook):
    """Where the tensors of each batch are that reaches the training loop, and whether that is page-locked memory."""

    pointers: ClassVar[list[set[int]]] = []
    locked: ClassVar[list[bool]] = []

    def before_train_iter(self, run: Run, index: int, batch: PackedBatch) -> None:
        tensors = [value for value in vars(batch).values() if isinstance(value, Tensor) and value.numel()]
        self.pointers.append({tensor.untyped_storage().data_ptr() for tensor in tensors})
        self.locked.append(torch.cuda.is_available() and all(tensor.is_pinned() for tensor in tensors))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("pin_memory", [True, False])
def test_batches_come_from_page_locked_memory_if_asked_for(tmp_path, digits, monkeypatch, pin_memory, num_workers):
    """Without CUDA: torch's real loader, which is told of an accelerator; the page-locked copy alone is a plain one."""
    copies: list[Tensor] = []

    def copy(block: Tensor) -> Tensor:
        copies.append(block.clone())
        return copies[-1]

    real = torch.cuda.is_available()
    if not real:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        monkeypatch.setattr(Tensor, "pin_memory", copy)
    Storages.pointers.clear()
    Storages.locked.clear()
    settings = {"train_dataloader__pin_memory": pin_memory, "train_dataloader__num_workers": num_workers}
    train_lines(tmp_path, digits, max_updates=2, custom_hooks=[dict(type=Storages)], **settings)
    blocks = {block.untyped_storage().data_ptr() for block in copies}
    if pin_memory:
        assert all(len(one) == 1 for one in Storages.pointers), "one block a batch, for one copy"
    elif num_workers:
        assert all(len(one) == 1 for one in Storages.pointers), "one block of memory, the patches made of bytes too"
    assert len(Storages.pointers) == 4
    assert (Storages.locked if real else [one <= blocks for one in Storages.pointers]) == [pin_memory] * 4


# --- the end of an epoch ------------------------------------------------------------------------------------------


class Pairs:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = [6 + index % 10, 7]
        return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(("drop_last", "iterations"), [(True, 781), (False, 782)])
def test_iterations_of_an_epoch(tmp_path, digits, drop_last, iterations):
    """100,000 samples, 64 on each of 2 processes, divided by 32: 781 whole iterations, or one more that is filled."""
    settings = pairs(100_000 // 32, batch_size=64 * 2 // 32, drop_last=drop_last)
    runner = Runner.from_cfg(tiny_config(tmp_path, digits, **settings, train_cfg={"max_epochs": 8}))
    assert runner.ruler.sequences_per_epoch / runner.geometry.sequences_per_iteration == iterations
    assert runner.total_sequences == 8 * iterations * runner.geometry.sequences_per_iteration


@pytest.mark.parametrize(("drop_last", "iterations", "samples"), [(True, 6, 96), (False, 7, 100)])
def test_the_last_iteration_of_an_epoch_is_left_out_or_filled_up(tmp_path, digits, drop_last, iterations, samples):
    """100 records, 16 an iteration: with ``drop_last=False`` the last iteration has 4 records and 12 empty rows."""
    settings = pairs(100, batch_size=16, drop_last=drop_last)
    lines = train_lines(tmp_path, digits, max_updates=99, **settings, train_cfg={"max_epochs": 1})
    assert [line["iteration"] for line in lines] == list(range(1, iterations + 1))
    assert (lines[-1]["samples"], lines[-1]["epoch"]) == (samples, 1.0)


def pairs(length: int, *, batch_size: int, drop_last: bool) -> dict[str, Any]:
    """Settings of a run on so many records of two tokens."""
    inner = {"type": Pairs, "length": length}
    return {
        "train_dataloader__dataset": {"type": "DatasetAdapter", "dataset": inner},
        "train_dataloader__batch_size": batch_size,
        "train_dataloader__drop_last": drop_last,
        "train_dataloader__packing": None,
        "optim_wrapper__accumulative_counts": 1,
        "param_scheduler": [],
    }


# --- activation_checkpointing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("recompute", "calls"), [(False, 1), (True, 2)])
def test_layers_are_computed_again_in_the_backward_pass_if_asked_for(tmp_path, digits, recompute, calls):
    """Calls of each layer of the decoder and of the vision tower for a micro-batch."""
    config = tiny_config(tmp_path, digits, train_dataloader__dataset__split="val", train_dataloader__batch_size=2,
                         optim_wrapper__accumulative_counts=1, model__activation_checkpointing=recompute)  # fmt: skip
    runner = Runner.from_cfg(config, max_updates=1)
    counts: Counter[str] = Counter()
    layers = [name for name, _ in runner.backend.model.named_modules() if re.search(r"\blayers\.\d+$", name)]
    for name in layers:  # a save computes the loss once more, without gradients
        runner.backend.model.get_submodule(name).register_forward_pre_hook(
            lambda *_, name=name: counts.update([name] * torch.is_grad_enabled())
        )
    runner.train()
    assert {name.partition(".")[0] for name in layers} == {"language_model", "vit_model"}
    assert counts == dict.fromkeys(layers, calls)
