"""Answers of a model of transformers: its chat template, and ``generate`` of transformers itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unigen_ds.data.samples.sample import Loaded
from unigen_ds.data.samples.splits import TokenSplit
from unigen_ds.families.auto.batch import ModelBatch
from unigen_ds.families.auto.processor import ModelProcessor
from unigen_ds.inference.answers import Choose, TextInterface, chooser, device_of, tokens_left
from unigen_ds.inference.prompts import Sampling


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
        tokenizer, texts = self.processor.tokenizer, list[str]()
        write = self._in_step if getattr(self.model, "in_step", False) else self._generate
        for prompt, seed in zip(prompts, seeds, strict=True):
            ids = write(prompt, max_new_tokens, chooser(sampling, [seed]))
            texts.append(tokenizer.decode([i for i in ids if i not in tokenizer.end_ids]))
        return texts

    @torch.no_grad()
    def _generate(self, prompt: Sequence[Loaded], max_new_tokens: int, choose: Choose) -> list[int]:
        """The ids that follow a prompt, up to and with the first that ends an answer."""
        tokenizer, batch = self.processor.tokenizer, self._batch(prompt, adds_plain=False)

        def chosen(_: Tensor, scores: Tensor) -> Tensor:
            token = torch.tensor(choose(self._of_text(scores), [0]), device=scores.device)
            return torch.full_like(scores, -torch.inf).index_fill(-1, token, 0.0)

        ids = self.model.transformers_model.generate(
            **self.model.inputs(batch.to(device_of(self.model))),
            max_new_tokens=min(max_new_tokens, tokens_left(len(batch.text_ids), self.model.max_document_tokens)),
            logits_processor=[chosen],
            eos_token_id=sorted(tokenizer.end_ids),
            pad_token_id=tokenizer.eos_id,
        )
        return ids[0, len(batch.text_ids) :].tolist()

    @torch.no_grad()
    def _in_step(self, prompt: Sequence[Loaded], max_new_tokens: int, choose: Choose) -> list[int]:
        """The same where the ranks of a sharding engine make each pass together: every pass is one over the whole
        document, and has the same modules on every rank.
        """
        document, ids = [*prompt], list[int]()
        num_tokens = len(self._batch(document, adds_plain=False).text_ids)
        left = tokens_left(num_tokens, self.model.max_document_tokens)
        while len(ids) < min(max_new_tokens, left):
            batch = self._batch(document, adds_plain=True)
            logits = self.model.next_token_logits(batch.to(device_of(self.model)))[:1]
            ids += choose(self._of_text(logits), [0])
            document.append(TokenSplit.unlearned(ids[-1:]))
            if ids[-1] in self.processor.tokenizer.end_ids:
                break
        return ids

    def _of_text(self, logits: Tensor) -> Tensor:
        """The logits without the tokens of images: no answer has the features of one."""
        return logits.index_fill(-1, torch.tensor(self._image_ids, dtype=torch.int64, device=logits.device), -torch.inf)

    def _batch(self, document: Sequence[Loaded], *, adds_plain: bool) -> ModelBatch:
        builder = self.processor.builder()
        builder.adds_plain = builder.adds_plain and adds_plain
        builder.add_document(document)
        return builder.batch(1, (), ())
