"""Answers of a model of transformers: its chat template, its own keys and values of earlier tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from unigen_ds.data.records.turn import Turn
from unigen_ds.data.samples.sample import Loaded
from unigen_ds.data.samples.splits import TokenSplit
from unigen_ds.families.auto.batch import ModelBatch
from unigen_ds.families.auto.model import Cached
from unigen_ds.families.auto.processor import ModelProcessor
from unigen_ds.inference.answers import LIKELIEST, TextInterface, tokens_left
from unigen_ds.inference.continuation import Choose, chooser, device_of
from unigen_ds.inference.generated import Generated, Request
from unigen_ds.inference.sampling import Sampling


class ModelInferencer(TextInterface):
    """A ``CausalLM`` or an ``ImageTextToText``. Without a chat template its answer is the continuation."""

    def __init__(self, model: Any, processor: ModelProcessor) -> None:
        super().__init__(model, processor)
        self.reads_images = processor.pictures is not None
        self._image_ids = [] if processor.pictures is None else processor.pictures.token_ids

    def _answer(self, prompt: str, images: Sequence[Path], max_length: int, sampling: Sampling, seed: int) -> str:
        loaded = self._asked([*(Turn("user", "image", str(path)) for path in images), Turn("user", "text", prompt)])
        return self._text(self._write(loaded, 0, max_length, chooser(sampling, [seed])))

    def complete(
        self, requests: Sequence[Request], *, max_new_tokens: int, sampling: Sampling = LIKELIEST, **_: Any
    ) -> list[Generated]:
        """The answer to each of some records. Arguments for drawing have no effect."""
        choose = chooser(sampling, [each.seed for each in requests])
        found = []
        for number, each in enumerate(requests):
            prompt = [*each.prompt, TokenSplit.unlearned(each.begin)]
            found.append(Generated(self._text(self._write(prompt, number, max_new_tokens, choose)), []))
        return found

    def _asked(self, turns: Sequence[Turn]) -> list[Loaded]:
        tokenizer = self.processor.tokenizer
        if not tokenizer.chat.chat_template:
            return [TokenSplit.unlearned(tokenizer.chat(turns[-1].value)["input_ids"])]
        sample = self.processor.plan(turns, reply=True)
        return [split.load(self.processor, None) for split in sample.splits]

    @torch.no_grad()
    def _write(self, prompt: Sequence[Loaded], number: int, max_new_tokens: int, choose: Choose) -> list[int]:
        """The ids that follow a prompt, up to and with the first that ends an answer.

        Where the ranks of a sharding engine make each pass together, every pass is one over the whole document: then it
        has the same modules on every rank.
        """
        in_step = getattr(self.model, "in_step", False)
        cache = None if in_step else Cached()
        document, new, written = [*prompt], [*prompt], list[int]()
        while len(written) < max_new_tokens:
            batch = self._batch(document if cache is None else new, adds_plain=in_step)
            if not written:
                max_new_tokens = min(
                    max_new_tokens, tokens_left(batch.document_lengths[0], self.model.max_document_tokens)
                )
            logits = self.model.next_token_logits(batch.to(device_of(self.model)), cache)
            if cache is not None and cache.values is None:
                cache = None  # a model without keys and values
            token = int(choose(self._of_texts(logits[:1]), [number])[0])
            written.append(token)
            new = [TokenSplit.unlearned([token])]
            document += new
            if token in self.processor.tokenizer.end_ids:
                break
        return written

    def _of_texts(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits ``[1, vocabulary]`` without the tokens of images: no answer has the features of one."""
        return logits.index_fill(-1, torch.tensor(self._image_ids, dtype=torch.int64, device=logits.device), -torch.inf)

    def _batch(self, document: Sequence[Loaded], *, adds_plain: bool) -> ModelBatch:
        builder = self.processor.builder()
        builder.adds_plain = builder.adds_plain and adds_plain
        builder.add_document(document)
        return builder.batch(1, (), ())

    def _text(self, ids: Sequence[int]) -> str:
        ends = self.processor.tokenizer.end_ids
        return self.processor.tokenizer.decode([i for i in ids if i not in ends])
