"""Adapters on a frozen base: training, checkpoints without the base, resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.text_run import WORDS, text_config, words
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.metrics import read_lines
from unigen_ds.data.tokenizers import WordTokenizer
from unigen_ds.families.decoder_lm.model import DecoderLM
from unigen_ds.families.decoder_lm.published import write_directory
from unigen_ds.runner import Runner

LLM = {
    "model_type": "llama", "vocab_size": 20, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
RECORDS = [{"text": words(3 + i % 9, i)} for i in range(60)]
LORA = {"r": 4, "alpha": 8, "target_modules": [r"self_attn\.(q|v)_proj", "down_proj"]}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published directory with random weights."""
    out = tmp_path_factory.mktemp("lora") / "base"
    torch.manual_seed(3)
    write_directory(DecoderLM(llm=LLM), out, tokenizer=WordTokenizer(words=WORDS))
    return out


def config(folder: Path, base: Path, **overrides: Any) -> Any:
    folder.mkdir(exist_ok=True)
    model = {"model": {"type": "DecoderLM", "pretrained": str(base)}, "lora": LORA}
    ema = [{"type": "EMAHook", "momentum": 0.1}]
    saves = {"default_hooks__checkpoint__interval": 4, "default_hooks__checkpoint__unit": "update"}
    return text_config(folder, RECORDS, **{
        **model, "custom_hooks": ema, "default_hooks__logger__interval": 1, "optim_wrapper__optimizer__lr": 2e-2,
        "train_dataloader__batch_size": 2, **saves, **overrides,
    })  # fmt: skip


def lines(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(folder / "run" / "metrics.jsonl") if "loss" in line]


@pytest.mark.parametrize("lora", [{}, {"use_dora": True, "dropout": 0.1}], ids=["lora", "dora"])
def test_checkpoints_hold_adapters_alone_and_a_resume_is_exact(tmp_path: Path, base: Path, lora: dict[str, Any]) -> None:
    overrides = {"lora": {**LORA, **lora}}
    Runner.from_cfg(config(tmp_path / "whole", base, **overrides), max_updates=8).train()
    Runner.from_cfg(config(tmp_path / "twice", base, **overrides), max_updates=4).train()
    Runner.from_cfg(config(tmp_path / "twice", base, **overrides, resume=True), max_updates=8).train()
    whole, twice = lines(tmp_path / "whole"), lines(tmp_path / "twice")
    assert [line["loss"] for line in whole] == [line["loss"] for line in twice] and len(whole) == 8
    assert whole[-1]["loss"] < whole[0]["loss"]
    for file in ("model.safetensors", "ema/rank00000.safetensors", "optimizer.safetensors"):
        first, second = (load_file(tmp_path / name / "run" / "iter_8.pth" / file) for name in ("whole", "twice"))
        assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
        assert first and all(".lora_" in key for key in first)
