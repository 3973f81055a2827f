"""Answers of a vision-language model, many prompts per forward pass; or one at a time (``ChatInferencer``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unigen_ds.data.records.turn import Turn
from unigen_ds.data.samples.sample import Loaded, Sample
from unigen_ds.data.samples.splits import TokenSplit
from unigen_ds.families.nanovlm.processor import VLMProcessor
from unigen_ds.inference.answers import LIKELIEST, TextInterface
from unigen_ds.inference.continuation import Choose, chooser, continue_prompts, likeliest
from unigen_ds.inference.generated import Generated, Request
from unigen_ds.inference.sampling import Sampling


class ChatInferencer(TextInterface):
    """A ``VLM``: many prompts per forward pass, or one at a time."""

    def _answer(self, prompt: str, images: Sequence[Path], max_length: int, sampling: Sampling, seed: int) -> str:
        turns = [*(Turn("user", "image", str(path)) for path in images), Turn("user", "text", prompt)]
        choose = chooser(sampling, [seed])
        return answer(self.model, self.processor, [turns], max_new_tokens=max_length, choose=choose)[0]

    def complete(
        self, requests: Sequence[Request], *, max_new_tokens: int, sampling: Sampling = LIKELIEST, **_: Any
    ) -> list[Generated]:
        """The answer to each of some records. Arguments for drawing have no effect."""
        prompts = [[*each.prompt, TokenSplit.unlearned(each.begin)] for each in requests]
        choose = chooser(sampling, [each.seed for each in requests])
        written = generate(self.model, self.processor, prompts, max_new_tokens=max_new_tokens, choose=choose)
        return [Generated(self.processor.tokenizer.decode(ids), []) for ids in written]


def answer(
    model: Any,
    processor: VLMProcessor,
    conversations: Sequence[Sequence[Turn]],
    *,
    max_new_tokens: int = 64,
    choose: Choose = likeliest,
) -> list[str]:
    """The model's next message in each conversation. Raises ``UnreadableImage`` for a file that is no picture."""
    prompts = [_loaded(processor.plan(turns, reply=True), processor) for turns in conversations]
    written = generate(model, processor, prompts, max_new_tokens=max_new_tokens, choose=choose)
    return [processor.tokenizer.decode(ids) for ids in written]


def _loaded(sample: Sample, processor: VLMProcessor) -> list[Loaded]:
    return [split.load(processor, None) for split in sample.splits]


def generate(
    model: Any,
    processor: VLMProcessor,
    prompts: Sequence[Sequence[Loaded]],
    *,
    max_new_tokens: int,
    choose: Choose = likeliest,
) -> list[list[int]]:
    """The ids that follow each prompt, up to and with the first end id."""
    limit = model.llm_config["max_position_embeddings"]
    return continue_prompts(
        model, processor, prompts, max_new_tokens=max_new_tokens, max_positions=limit, choose=choose
    )
