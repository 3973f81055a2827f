"""Greedy answers of a vision-language model, many prompts per forward pass; or one at a time (``ChatInferencer``).

The whole document is computed again for each token: right for short answers, and the same attention rules as in
training. There is no key/value cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from unigen_ds.core.errors import ConfigError
from unigen_ds.data.collate import Loaded, load_tiles, pack_documents
from unigen_ds.data.formats import Turn
from unigen_ds.data.samples import ImageSplit, Sample, TiledSplit, TokenSplit
from unigen_ds.data.vlm_processor import VLMProcessor
from unigen_ds.inference.inferencer import Generated


class ChatInferencer:
    """A ``VLM`` in evaluation mode behind the words of ``InterleaveInferencer``. It reads, and draws nothing."""

    def __init__(self, model: Any, processor: VLMProcessor) -> None:
        self.model, self.processor = model, processor

    def unified_generate(
        self,
        prompt: str,
        *,
        images: Sequence[str | Path] = (),
        think: bool = False,
        size: Sequence[int] | None = None,
        max_length: int = 1000,
        temperature: float = 0.0,
        **_: Any,
    ) -> Generated:
        """The likeliest answer to ``prompt``, with ``images`` shown before it. What is said of drawing has no effect.

        Raises ``ConfigError`` for ``think``, ``size`` and a ``temperature``, and ``UnreadableImage``.
        """
        asked = [name for name, value in (("think", think), ("size", size), ("temperature", temperature)) if value]
        if asked:
            raise ConfigError(f"{', '.join(asked)}: this model answers in text, and takes the likeliest")
        turns = [*(Turn("user", "image", str(path)) for path in images), Turn("user", "text", prompt)]
        return Generated(answer(self.model, self.processor, [turns], max_new_tokens=max_length)[0], [])


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
