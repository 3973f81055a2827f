"""A text that continues a prompt, from a ``DecoderLM``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.core.log import logger
from unigen_ds.core.seeding import generator
from unigen_ds.data.processor import ConversationProcessor
from unigen_ds.data.splits import TokenSplit
from unigen_ds.inference.continuation import continue_prompts, likeliest
from unigen_ds.inference.generated import Generated


class TextInferencer:
    """A ``DecoderLM`` in evaluation mode with the interface of ``InterleaveInferencer``."""

    def __init__(self, model: Any, processor: ConversationProcessor) -> None:
        self.model, self.processor = model, processor

    def unified_generate(
        self,
        prompt: str,
        *,
        images: Sequence[Any] = (),
        think: bool = False,
        size: Sequence[int] | None = None,
        max_length: int = 1000,
        temperature: float = 0.0,
        seed: int = 0,
        max_parts: int = 0,
        **_: Any,
    ) -> Generated:
        """The continuation of ``prompt``. Arguments for drawing have no effect.

        Raises ``ConfigError`` for ``images``, ``think``, ``size`` and ``max_parts``.
        """
        given = {"images": images, "think": think, "size": size, "max_parts": max_parts}
        unsupported = [name for name, value in given.items() if value]
        if unsupported:
            raise ConfigError(f"{', '.join(unsupported)}: this model continues a text, and does nothing else")
        tokenizer = self.processor.tokenizer
        ids = self.write([tokenizer.bos_id, *tokenizer.encode(prompt)], max_length, temperature=temperature, seed=seed)
        return Generated(tokenizer.decode(ids), [])

    def write(self, ids: Sequence[int], max_length: int, *, temperature: float = 0.0, seed: int = 0) -> list[int]:
        """At most ``max_length`` ids that follow ``ids``; the end token is left out. Temperature 0: the likeliest."""
        random = generator(seed, "write")

        def drawn(logits: Tensor) -> Sequence[int]:
            chances = torch.softmax(logits.float().cpu() / temperature, dim=-1)
            ids: list[int] = torch.multinomial(chances, 1, generator=random)[:, 0].tolist()
            return ids

        limit = self.model.max_document_tokens
        if len(ids) > limit:
            raise DataError(
                f"the prompt has {len(ids):,} tokens, and the model has {limit:,} positions", remedy="a shorter prompt"
            )
        [written] = continue_prompts(
            self.model,
            self.processor,
            [[TokenSplit(tuple(ids), (-100,) * len(ids))]],
            max_new_tokens=min(max_length, limit - len(ids) + 1),
            max_positions=limit + 1,  # the last token is not read any more
            choose=drawn if temperature > 0.0 else likeliest,
        )
        found = [token for token in written if token != self.processor.tokenizer.eos_id]
        if len(found) == len(written) == limit - len(ids) + 1 < max_length:
            logger().warning(
                "the text ends after %d tokens: the model has no more than %d positions, and the prompt needs %d",
                len(found), limit, len(ids),
            )  # fmt: skip
        return found
