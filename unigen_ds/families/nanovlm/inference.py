"""Answers of a vision-language model, many prompts per forward pass; or one at a time (``ChatInferencer``)."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unigen_ds.core.errors import ConfigError
from unigen_ds.core.registry import checked
from unigen_ds.data.records import Turn
from unigen_ds.data.samples import Loaded, Sample
from unigen_ds.data.splits import TokenSplit
from unigen_ds.families.nanovlm.processor import VLMProcessor
from unigen_ds.inference.continuation import Choose, chooser, continue_prompts, idle_arguments, likeliest
from unigen_ds.inference.generated import Generated, Request
from unigen_ds.inference.given import MaxLength, MaxParts, Picture, Size, as_file, pictures
from unigen_ds.inference.sampling import Sampling

_LIKELIEST = Sampling()


class ChatInferencer:
    """A ``VLM`` in evaluation mode with the interface of ``InterleaveInferencer``. It reads, and draws nothing."""

    answers = ("text",)
    """What ``complete`` can be asked for."""

    def __init__(self, model: Any, processor: VLMProcessor) -> None:
        self.model, self.processor = model, processor

    @checked("unified_generate")
    def unified_generate(
        self,
        prompt: str,
        *,
        images: Picture | Sequence[Picture] = (),
        parts: Sequence[Any] = (),
        understand: bool = True,
        think: bool = False,
        size: Size = None,
        flow: Any = None,
        max_length: MaxLength = 1000,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        on_step: Any = None,
        max_parts: MaxParts = 0,
    ) -> Generated:
        """The answer to ``prompt``, with ``images`` shown before it, as of ``InterleaveInferencer``: the likeliest, or
        with a ``temperature`` one that ``seed`` determines (``Sampling``). ``understand``, ``flow`` and ``on_step``
        have no effect.

        Raises ``ConfigError`` for ``think``, ``size``, ``max_parts`` and ``parts`` (a message has its pictures before
        its texts), and ``UnreadableImage``.
        """
        given = {"parts": parts, "think": think, "size": size, "max_parts": max_parts}
        unsupported = [name for name, value in given.items() if value]
        if unsupported:
            raise ConfigError(f"{', '.join(unsupported)}: this model answers in text")
        choose = chooser(Sampling(temperature, top_p), [seed])
        with tempfile.TemporaryDirectory() as folder:
            paths = [as_file(each, Path(folder) / f"{number}.png") for number, each in enumerate(pictures(images))]
            turns = [*(Turn("user", "image", str(path)) for path in paths), Turn("user", "text", prompt)]
            made = answer(self.model, self.processor, [turns], max_new_tokens=max_length, choose=choose)
        return Generated(made[0], [])

    def complete(
        self, requests: Sequence[Request], *, max_new_tokens: int, sampling: Sampling = _LIKELIEST, **_: Any
    ) -> list[Generated]:
        """The answer to each of some records. Arguments for drawing have no effect."""
        prompts = [[*each.prompt, TokenSplit(tuple(each.begin), (-100,) * len(each.begin))] for each in requests]
        choose = chooser(sampling, [each.seed for each in requests])
        written = generate(self.model, self.processor, prompts, max_new_tokens=max_new_tokens, choose=choose)
        return [Generated(self.processor.tokenizer.decode(ids), []) for ids in written]

    def idle(self, method: str) -> tuple[Any, ...]:
        """As of ``InterleaveInferencer``."""
        return idle_arguments(self.model, self.processor)


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
