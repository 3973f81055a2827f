"""A text that continues a prompt, from a ``DecoderLM``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unigen_ds.data.batches.collate import pack_documents
from unigen_ds.data.samples.splits import TokenSplit
from unigen_ds.inference.answers import LIKELIEST, TextInterface, tokens_left
from unigen_ds.inference.continuation import chooser, continue_prompts
from unigen_ds.inference.generated import Generated, Request
from unigen_ds.inference.sampling import Sampling
from unigen_ds.system.log import logger


class TextInferencer(TextInterface):
    """A ``DecoderLM``: its answer is the continuation."""

    reads_images = False
    limits = "this model continues a text, and does nothing else"

    def _answer(self, prompt: str, images: Sequence[Path], max_length: int, sampling: Sampling, seed: int) -> str:
        tokenizer = self.processor.tokenizer
        ids = self.write([tokenizer.bos_id, *tokenizer.encode(prompt)], max_length, seed=seed, **vars(sampling))
        return str(tokenizer.decode(ids))

    def complete(
        self, requests: Sequence[Request], *, max_new_tokens: int, sampling: Sampling = LIKELIEST, **_: Any
    ) -> list[Generated]:
        """The answer to each of some records of texts. It ends where the model has no more positions.

        Raises ``DataError`` for a prompt that is longer than these.
        """
        prompts = [[*each.prompt, TokenSplit.unlearned(each.begin)] for each in requests]
        left = [
            tokens_left(len(pack_documents([prompt], self.processor).text_ids), self.model.max_document_tokens)
            for prompt in prompts
        ]
        short = [i for i, number in enumerate(left) if number < max_new_tokens]
        texts: dict[int, str] = {}
        for group in ([i for i in range(len(left)) if i not in short], *([i] for i in short)):
            written = continue_prompts(
                self.model,
                self.processor,
                [prompts[i] for i in group],
                max_new_tokens=min([max_new_tokens, *(left[i] for i in group)]),
                max_positions=self.model.max_document_tokens + 1,
                choose=chooser(sampling, [requests[i].seed for i in group]),
            )
            texts |= {i: self.processor.tokenizer.decode(ids) for i, ids in zip(group, written, strict=True)}
        return [Generated(texts[i], []) for i in range(len(requests))]

    def write(
        self, ids: Sequence[int], max_length: int, *, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0
    ) -> list[int]:
        """At most ``max_length`` ids that follow ``ids``; the end token is left out. Temperature 0: the likeliest."""
        limit = self.model.max_document_tokens
        left = tokens_left(len(ids), limit)
        [written] = continue_prompts(
            self.model,
            self.processor,
            [[TokenSplit.unlearned(ids)]],
            max_new_tokens=min(max_length, left),
            max_positions=limit + 1,
            choose=chooser(Sampling(temperature, top_p), [seed]),
        )
        found = [token for token in written if token != self.processor.tokenizer.eos_id]
        if len(found) == len(written) == left < max_length:
            logger().warning(
                "the text ends after %d tokens: the model has no more than %d positions, and the prompt needs %d",
                len(found), limit, len(ids),
            )  # fmt: skip
        return found
