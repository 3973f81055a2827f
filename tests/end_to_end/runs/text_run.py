"""A language model of two small layers on a JSONL file of words, as a config and as a file for ``tools/train.py``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LLM = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip


def write_records(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def count_up(number: int) -> list[dict[str, str]]:
    return [{"text": " ".join(WORDS[(i + k) % 10] for k in range(2 + i % 12))} for i in range(number)]


def text_config(folder: Path, **dotted: Any) -> Any:
    """Of ``folder / 'train.jsonl'``, into ``folder / 'run'``; ``dotted``: changes, with ``__`` for the dots."""
    from unigen_ds.runner.settings.tree import load_config  # here: a test that only writes the file needs no torch

    plain = write_text_config(folder)
    return load_config(str(plain), {key.replace("__", "."): value for key, value in dotted.items()})


def write_text_config(folder: Path) -> Path:
    """The config as a file: 4 sequences an update, 6 updates, a checkpoint after every second one."""
    config = {
        "model": {"type": "DecoderLM", "llm": {"model_type": "llama", **LLM}},
        "tokenizer": {"type": "WordTokenizer", "words": WORDS},
        "train_dataloader": {
            "batch_size": 4, "num_workers": 0, "seq_length": 32,
            "dataset": {"type": "UnifiedGenerationDataset", "data_path": str(folder / "train.jsonl")},
        },
        "optim_wrapper": {"optimizer": {"type": "AdamW", "lr": 1e-2}},
        "train_cfg": {"max_updates": 6},
        "default_hooks": {"logger": {"interval": 1}, "checkpoint": {"interval": 2}},
        "work_dir": str(folder / "run"),
    }  # fmt: skip
    path = folder / "config.py"
    path.write_text("".join(f"{key} = {value!r}\n" for key, value in config.items()), encoding="utf-8")
    return path
