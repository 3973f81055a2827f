"""Answers of a model of transformers: its chat template, its own keys and values of earlier tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from unigen_ds.data.samples.sample import Loaded
from unigen_ds.data.samples.splits import TokenSplit
from unigen_ds.families.auto.batch import ModelBatch
from unigen_ds.families.auto.model import Cached
from unigen_ds.families.auto.processor import ModelProcessor
from unigen_ds.inference.answers import TextInterface, tokens_left
from unigen_ds.inference.continuation import Choose, chooser, device_of
from unigen_ds.inference.sampling import Sampling


class ModelInferencer(TextInterface):
    """A ``CausalLM`` or an ``ImageTextToText``. Without a chat template its answer is the continuation."""

    def __init__(self, model: Any, processor: ModelProcessor) -> None:
        super().__init__(model, processor)
        self.reads_images = processor.pictures is not None
        self._image_ids = [] if processor.pictures is None else processor.pictures.token_ids

    def prompt(self, text: str, images: Sequence[Path]) -> Sequence[Loaded]:
        chat = self.processor.tokenizer.chat
        return super().prompt(text, images) if chat.chat_template else [TokenSplit.unlearned(chat(text)["input_ids"])]

    def write(
        self, prompts: Sequence[Sequence[Loaded]], seeds: Sequence[int], max_new_tokens: int, sampling: Sampling
    ) -> list[str]:
        """One after the other."""
        tokenizer, choose, texts = self.processor.tokenizer, chooser(sampling, seeds), list[str]()
        for number, prompt in enumerate(prompts):
            ids = self._continue(prompt, number, max_new_tokens, choose)
            texts.append(tokenizer.decode([i for i in ids if i not in tokenizer.end_ids]))
        return texts

    @torch.no_grad()
    def _continue(self, prompt: Sequence[Loaded], number: int, max_new_tokens: int, choose: Choose) -> list[int]:
        """The ids that follow a prompt, up to and with the first that ends an answer.

        Where the ranks of a sharding engine make each pass together, every pass is one over the whole document: then it
        has the same modules on every rank.
        """
        in_step = getattr(self.model, "in_step", False)
        cache = None if in_step else Cached()
        document, new, ids = [*prompt], [*prompt], list[int]()
        while len(ids) < max_new_tokens:
            batch = self._batch(document if cache is None else new, adds_plain=in_step)
            if not ids:
                left = tokens_left(batch.document_lengths[0], self.model.max_document_tokens)
                max_new_tokens = int(min(max_new_tokens, left))
            logits = self.model.next_token_logits(batch.to(device_of(self.model)), cache)
            if cache is not None and cache.values is None:
                cache = None  # a model without keys and values
            # without the tokens of images: no answer has the features of one
            image_ids = torch.tensor(self._image_ids, dtype=torch.int64, device=logits.device)
            [token] = choose(logits[:1].index_fill(-1, image_ids, -torch.inf), [number])
            ids.append(int(token))
            new = [TokenSplit.unlearned([int(token)])]
            document += new
            if token in self.processor.tokenizer.end_ids:
                break
        return ids

    def _batch(self, document: Sequence[Loaded], *, adds_plain: bool) -> ModelBatch:
        builder = self.processor.builder()
        builder.adds_plain = builder.adds_plain and adds_plain
        builder.add_document(document)
        return builder.batch(1, (), ())
