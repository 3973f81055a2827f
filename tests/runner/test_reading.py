"""A run reads its own checkpoints and other trainers' files: how often they are opened, and what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unigen_ds.checkpoint.layouts import safetensors as layout
from unigen_ds.core.config import load_config
from unigen_ds.data.tokenizers import WordTokenizer
from unigen_ds.runner import Runner

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LLM = {
    "vocab_size": 20, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 48, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and documents that count."""
    folder = tmp_path_factory.mktemp("reading")
    WordTokenizer(words=WORDS).save_pretrained(str(folder / "tokenizer"))
    records = [{"text": " ".join(WORDS[(i + k) % 10] for k in range(2 + i % 12))} for i in range(60)]
    (folder / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return folder


def config(data: Path, work_dir: Path, **overrides: Any) -> Any:
    """A tiny DecoderLM with an average of its weights, for two updates; ``__`` stands for a dot."""
    given = {
        "tokenizer.path": str(data / "tokenizer"), "tokenizer.bos": "<|im_start|>", "tokenizer.eos": "<|im_end|>",
        "train_dataloader.dataset.data_path": str(data / "train.jsonl"), "train_dataloader.num_workers": 0,
        "train_dataloader.dataset.index_workers": 0, "train_dataloader.batch_size": 2,
        "train_dataloader.seq_length": 48, "optim_wrapper.accumulative_counts": 1,
        "train_cfg": {"max_updates": 2}, "param_scheduler": [], "backend": {"type": "single"},
        "custom_hooks": [{"type": "EMAHook", "momentum": 0.5}], "work_dir": str(work_dir),
        "default_hooks.logger.interval": 1, **{f"model.llm.{key}": value for key, value in LLM.items()},
    }  # fmt: skip
    return load_config("decoder_lm_90m", {**given, **{key.replace("__", "."): v for key, v in overrides.items()}})


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    runner = Runner.from_cfg(config(data, tmp_path_factory.mktemp("trained") / "run"))
    runner.train()
    return runner


# ---- how often a file is opened --------------------------------------------------------------------------------------


def test_a_resume_opens_each_file_once_however_many_tensors_it_has(
    data: Path, trained: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To open a file is to parse its header, which is as long as there are tensors."""
    opened: list[Path] = []
    real = layout.safe_open
    monkeypatch.setattr(layout, "safe_open", lambda path, **how: opened.append(path) or real(path, **how))
    (checkpoint,) = trained.work_dir.glob("*.pth")
    cfg = config(data, tmp_path / "run", resume=str(checkpoint), train_cfg__max_updates=3)
    resumed = Runner.from_cfg(cfg)
    resumed.train()
    names = sorted(path.relative_to(checkpoint).as_posix() for path in opened)
    assert names == ["ema/rank00000.safetensors", "model.safetensors", "optimizer.safetensors"]
    assert len(list(resumed.backend.model.parameters())) > 10, "each of which was read, and its moments and average"
