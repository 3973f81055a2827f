"""A hand-written loop of one update, as a process: transformers' Llama of two layers on the documents of ``starts.py``.

In: the file of the texts. Out: the weights and the optimizer's state.

    python benchmarks/shared/hand_start.py TEXTS.jsonl OUT.pt
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

NUM_WORDS, SEQ_LENGTH, BATCH = 500, 256, 4


def main(texts: Path, out: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({f"word{i}": i for i in range(NUM_WORDS)}, unk_token="word0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    documents = [json.loads(line)["text"] for line in texts.read_text(encoding="utf-8").splitlines()]
    tokens = [number for one in tokenizer.encode_batch(documents) for number in one.ids]
    config = LlamaConfig(
        vocab_size=NUM_WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=SEQ_LENGTH,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.tensor(tokens[: BATCH * SEQ_LENGTH]).view(BATCH, SEQ_LENGTH)
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    print(f"update 1: loss {loss.item():.3f}")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, out)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
