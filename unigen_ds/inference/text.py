"""A text that goes on with a prompt, from a ``DecoderLM``.

The whole text is computed again for each token, with the attention of training; there is no key/value cache. For long
texts export the model: transformers' ``generate`` has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unigen_ds.core.errors import ConfigError
from unigen_ds.core.seeding import generator
from unigen_ds.data.collate import pack_documents
from unigen_ds.data.processor import UnifiedProcessor
from unigen_ds.data.samples import TokenSplit
from unigen_ds.inference.inferencer import Generated


class TextInferencer:
    """A ``DecoderLM`` in evaluation mode, behind the words of ``InterleaveInferencer``."""

    def __init__(self, model: Any, processor: UnifiedProcessor) -> None:
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
        **_: Any,
    ) -> Generated:
        """What follows ``prompt``. What is said of drawing has no effect.

        Raises ``ConfigError`` for ``images``, ``think`` and ``size``.
        """
        asked = [name for name, value in (("images", images), ("think", think), ("size", size)) if value]
        if asked:
            raise ConfigError(f"{', '.join(asked)}: this model goes on with a text, and knows nothing else")
        tokenizer = self.processor.tokenizer
        ids = self.write([tokenizer.bos_id, *tokenizer.encode(prompt)], max_length, temperature=temperature, seed=seed)
        return Generated(tokenizer.decode(ids), [])

    @torch.no_grad()
    def write(self, ids: Sequence[int], max_length: int, *, temperature: float = 0.0, seed: int = 0) -> list[int]:
        """At most ``max_length`` ids that follow ``ids``; the end token is left out. 0 takes the likeliest."""
        random, device, written = generator(seed, "write"), self.model.lm_head.weight.device, [*ids]
        room = self.model.llm_config.max_position_embeddings - len(ids) + 1
        for _ in range(min(max_length, room)):
            split = TokenSplit(tuple(written), (-100,) * len(written))
            logits = self.model.next_token_logits(pack_documents([[split]], self.processor).to(device))[0]
            if temperature > 0.0:
                chances = torch.softmax(logits.float().cpu() / temperature, dim=-1)
                token = int(torch.multinomial(chances, 1, generator=random))
            else:
                token = int(logits.argmax())
            if token == self.processor.tokenizer.eos_id:
                break
            written.append(token)
        return written[len(ids) :]
