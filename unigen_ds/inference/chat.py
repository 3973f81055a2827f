"""Greedy answers of a vision-language model, many prompts per forward pass.

The whole document is computed again for each token: right for short answers, and the same attention rules as in
training. There is no key/value cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unigen_ds.data.collate import Loaded, pack_documents
from unigen_ds.data.processor import UnifiedProcessor
from unigen_ds.data.samples import TokenSplit


@torch.no_grad()
def generate(
    model: Any, processor: UnifiedProcessor, prompts: Sequence[Sequence[Loaded]], *, max_new_tokens: int
) -> list[list[int]]:
    """The ids that follow each prompt, up to and with the first end id."""
    device = model.connector.proj.weight.device
    said: list[list[int]] = [[] for _ in prompts]
    open_ones = list(range(len(prompts)))
    for _ in range(max_new_tokens):
        documents = [[*prompts[i], TokenSplit(tuple(said[i]), (-100,) * len(said[i]))] for i in open_ones]
        chosen = model.next_token_logits(pack_documents(documents, processor).to(device)).argmax(-1).tolist()
        for i, token in zip(open_ones, chosen, strict=True):
            said[i].append(token)
        open_ones = [i for i in open_ones if said[i][-1] != processor.tokenizer.eos_id]
        if not open_ones:
            break
    return said
