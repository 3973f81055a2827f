"""A tiny unified model on the real digits, as a config, for tests that need a whole run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unigen_ds.runner.settings.tree import load_config

TINY: dict[str, Any] = {
    "model.llm.hidden_size": 32,
    "model.llm.intermediate_size": 64,
    "model.llm.num_hidden_layers": 2,
    "model.llm.num_attention_heads": 4,
    "model.llm.num_key_value_heads": 2,
    "model.llm.dropout": 0.0,
    "model.vit.hidden_size": 16,
    "model.vit.intermediate_size": 32,
    "model.vit.num_hidden_layers": 1,
    "model.vit.num_attention_heads": 2,
    "train_dataloader.num_workers": 0,
    "train_dataloader.seq_length": 80,
    "default_hooks.logger.interval": 1,
    "default_hooks.checkpoint.interval": -1,
    "custom_hooks": [],
}


def tiny_config(work_dir: Path, data_root: Path, **overrides: Any) -> Any:
    """The shipped digits config in a tiny size; ``overrides`` are dotted paths with ``__`` instead of dots."""
    values = {key.replace("__", "."): value for key, value in overrides.items()}
    paths = {"work_dir": str(work_dir), "train_dataloader.dataset.root": str(data_root)}
    return load_config("unified_digits", {**TINY, **paths, **values})
