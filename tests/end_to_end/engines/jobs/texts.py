"""Data and weights of the engine tests that are text alone."""

from __future__ import annotations

import json
from pathlib import Path

import torch

_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LLM = {
    "model_type": "llama", "vocab_size": 53, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 80, "tie_word_embeddings": True,
    "initializer_range": 0.2,
}  # fmt: skip


def write_documents(path: Path) -> None:
    documents = [" ".join(_WORDS[(i * 7 + k * (i % 5 + 1)) % 10] for k in range(1 + i * 5 % 19)) for i in range(240)]
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents), encoding="utf-8")


def write_numbers(path: Path) -> None:
    """Sums and products, a line each: ``the sum of 1 and 0.5 is 1.5``."""
    pairs = [(i * 0.5, (i * 7 % 11) * 0.25) for i in range(96)]
    lines = [
        f"the {('sum', 'product')[i % 2]} of {a / 10} and {b} is {round(a / 10 * b if i % 2 else a / 10 + b, 3)}"
        for i, (a, b) in enumerate(pairs)
    ]
    path.write_text("\n".join(lines), encoding="utf-8")


def write_decoder(folder: Path) -> None:
    """A small Llama as transformers itself writes it, in several files."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    LlamaForCausalLM(LlamaConfig.from_dict(LLM)).save_pretrained(folder, max_shard_size="40KB")
