"""Greedy answers of a vision-language model, many prompts per forward pass; or one at a time (``ChatInferencer``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unigen_ds.core.errors import ConfigError
from unigen_ds.data.formats import Turn
from unigen_ds.data.samples import Loaded, Sample
from unigen_ds.families.nanovlm.processor import VLMProcessor
from unigen_ds.inference.continuation import continue_prompts
from unigen_ds.inference.generated import Generated


class ChatInferencer:
    """A ``VLM`` in evaluation mode with the interface of ``InterleaveInferencer``. It reads, and draws nothing."""

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
        max_parts: int = 0,
        **_: Any,
    ) -> Generated:
        """The likeliest answer to ``prompt``, with ``images`` shown before it. Arguments for drawing have no effect.

        Raises ``ConfigError`` for ``think``, ``size``, ``max_parts`` and a ``temperature``, and ``UnreadableImage``.
        """
        given = {"think": think, "size": size, "temperature": temperature, "max_parts": max_parts}
        unsupported = [name for name, value in given.items() if value]
        if unsupported:
            raise ConfigError(f"{', '.join(unsupported)}: this model answers in text, with the likeliest tokens")
        turns = [*(Turn("user", "image", str(path)) for path in images), Turn("user", "text", prompt)]
        return Generated(answer(self.model, self.processor, [turns], max_new_tokens=max_length)[0], [])


def answer(
    model: Any, processor: VLMProcessor, conversations: Sequence[Sequence[Turn]], *, max_new_tokens: int = 64
) -> list[str]:
    """The model's next message in each conversation. Raises ``UnreadableImage`` for a file that is no picture."""
    prompts = [_loaded(processor.plan(turns, reply=True), processor) for turns in conversations]
    written = generate(model, processor, prompts, max_new_tokens=max_new_tokens)
    return [processor.tokenizer.decode(ids) for ids in written]


def _loaded(sample: Sample, processor: VLMProcessor) -> list[Loaded]:
    return [split.load(processor, None) for split in sample.splits]


def generate(
    model: Any, processor: VLMProcessor, prompts: Sequence[Sequence[Loaded]], *, max_new_tokens: int
) -> list[list[int]]:
    """The ids that follow each prompt, up to and with the first end id."""
    limit = model.llm_config["max_position_embeddings"]
    return continue_prompts(model, processor, prompts, max_new_tokens=max_new_tokens, max_positions=limit)
