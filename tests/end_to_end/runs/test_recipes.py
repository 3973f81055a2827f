"""Shipped recipes for published models, trained from a tiny directory; others by commands in ``test_pages.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.text.chat_support import character_tokenizer
from tests.end_to_end.engines.jobs.pictures import write_talks
from tests.end_to_end.engines.jobs.texts import write_decoder
from tests.support.golden_files import NANOVLM
from unigen_ds.data.text.tokenizers import WordTokenizer
from unigen_ds.runner import Runner
from unigen_ds.runner.open.trained import open_model
from unigen_ds.runner.settings.tree import load_config
from unigen_ds.system.journals import read_lines

WORDS = ("zero", "one", "two", "three", "four", "draw", "a", "handwritten", "this", "is")
SMALL = {
    "train_dataloader.num_workers": 0,
    "train_dataloader.dataset.index_workers": 0,
    "default_hooks.logger.interval": 1,
    "backend": {"type": "single"},
}
TEMPLATE = json.loads((NANOVLM / "config.json").read_text(encoding="utf-8"))["lm_chat_template"]


def train_recipe(name: str, tmp_path: Path, changes: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Two updates of a recipe: its lines of metrics, and its log."""
    settings = load_config(name, {**SMALL, **changes, "work_dir": str(tmp_path / "run")})
    Runner.from_cfg(settings, max_updates=2).train()
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    return lines, (tmp_path / "run" / "train.log").read_text()


def test_a_recipe_of_nanovlm_trains(tmp_path: Path) -> None:
    """With nanoVLM's own chat template; each checkpoint also is a directory that nanoVLM loads."""
    write_talks(tmp_path / "talks")
    character_tokenizer("{% if messages %}a{% endif %}" + TEMPLATE).save_pretrained(tmp_path / "chat")
    lines, log = train_recipe("nanovlm_460m", tmp_path, {
        "model.pretrained": str(NANOVLM), "model.llm": None, "model.vit": None, "model.pixel_shuffle_factor": None,
        "tokenizer.path": str(tmp_path / "chat"),
        "train_dataloader.dataset.data_path": str(tmp_path / "talks" / "mixed.jsonl"),
        "train_dataloader.dataset.filters": None,
        "train_dataloader.seq_length": 400, "train_dataloader.batch_size": 1,
        "processor.max_image_size": 64, "optim_wrapper.accumulative_counts": 1,
        "custom_hooks": [{"type": "SavePretrainedHook"}],
    })  # fmt: skip
    assert [line["update"] for line in lines] == [1, 2] and "First update: losses text" in log
    folder = tmp_path / "run" / "pretrained" / "iter_2"
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["lm_chat_template"] == TEMPLATE
    model, again = (open_model(path)[0].state_dict() for path in (tmp_path / "run", folder))
    assert model.keys() == again.keys() and all(torch.equal(model[key], again[key]) for key in model)


def test_the_larger_decoder_trains(tmp_path: Path) -> None:
    """From a tiny Llama; its layers are computed again in the backward pass."""
    write_decoder(tmp_path / "llama")
    WordTokenizer(words=WORDS).save_pretrained(str(tmp_path / "llama"))
    records = [{"text": " ".join(WORDS[(i + k) % 10] for k in range(2 + i % 12))} for i in range(60)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    lines, log = train_recipe("decoder_lm_300m", tmp_path, {
        "model.pretrained": str(tmp_path / "llama"), "model.llm": None,
        "tokenizer.path": str(tmp_path / "llama"), "tokenizer.bos": "<|im_start|>", "tokenizer.eos": "<|im_end|>",
        "train_dataloader.dataset.data_path": str(tmp_path / "train.jsonl"), "train_dataloader.batch_size": 2,
        "train_dataloader.seq_length": 48,
    })  # fmt: skip
    assert [line["update"] for line in lines] == [1, 2] and "First update: losses text" in log


@pytest.mark.parametrize(("name", "engine"), [("bagel_7b_fsdp", "fsdp"), ("bagel_7b_zero3", "deepspeed"),
                                              ("bagel_from_parts", "fsdp")])  # fmt: skip
def test_a_recipe_of_bagel_has_its_engine_and_numbers(name: str, engine: str) -> None:
    """Those of BAGEL's own fine-tuning command; a sequence has room for one edit of its largest images."""
    settings = load_config(name, {"work_dir": "run"})
    assert settings["backend"]["type"] == engine and settings["model"]["activation_checkpointing"] is True
    assert settings["custom_hooks"] == [{"type": "EMAHook", "momentum": 0.0001}]
    vae, vit = (settings["processor"][f"{kind}_transform"] for kind in ("vae", "vit"))
    edit = 2 * (vae["max_size"] // vae["stride"]) ** 2 + (vit["max_size"] // vit["stride"]) ** 2
    assert edit + 500 < settings["train_dataloader"]["seq_length"], "two latents and a read image, and the text"
