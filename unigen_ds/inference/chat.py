"""Greedy answers of a vision-language model, many prompts per forward pass.

The whole document is computed again for each token: right for short answers, and the same attention rules as in
training. There is no key/value cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unigen_ds.data.collate import Loaded, load_tiles, pack_documents
from unigen_ds.data.formats import Turn
from unigen_ds.data.samples import ImageSplit, Sample, TiledSplit, TokenSplit
from unigen_ds.data.vlm_processor import VLMProcessor


def answer(
    model: Any, processor: VLMProcessor, conversations: Sequence[Sequence[Turn]], *, max_new_tokens: int = 64
) -> list[str]:
    """What the model says next in each conversation. Raises ``UnreadableImage`` for a picture that is none."""
    prompts = [_loaded(processor.plan(turns, reply=True), processor) for turns in conversations]
    said = generate(model, processor, prompts, max_new_tokens=max_new_tokens)
    return [processor.tokenizer.decode(ids) for ids in said]


def _loaded(sample: Sample, processor: VLMProcessor) -> list[Loaded]:
    return [
        load_tiles(split, processor) if isinstance(split, TiledSplit) else split
        for split in sample.splits
        if not isinstance(split, ImageSplit)  # a VLMProcessor plans none
    ]


@torch.no_grad()
def generate(
    model: Any, processor: VLMProcessor, prompts: Sequence[Sequence[Loaded]], *, max_new_tokens: int
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
