"""The inferencers of models that answer in text: ``TextInterface``, and ``PackedInferencer`` for packed documents."""

from __future__ import annotations

import math
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from unigen_ds.config.registry import checked
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.data.batches.loader import pack_documents
from unigen_ds.data.records.records import Turn
from unigen_ds.data.samples.sample import Loaded
from unigen_ds.data.samples.splits import TokenSplit
from unigen_ds.inference.continuation import chooser, continue_prompts, idle_arguments
from unigen_ds.inference.generated import Generated, MaxLength, MaxParts, Picture, Request, Size, as_file, pictures
from unigen_ds.inference.sampling import Sampling
from unigen_ds.system.log import logger


class TextInterface(ABC):
    """A model in evaluation mode with the interface of ``InterleaveInferencer``. It draws nothing.

    A family adds ``write``, and ``prompt`` where a question is not one message of a chat.
    """

    answers = ("text",)
    """What ``complete`` can be asked for."""
    reads_images: bool = True
    """Where it is not, pictures are refused: of a call, and of previews at the start."""
    limits: ClassVar[str] = "this model answers in text"
    """The reason why it refuses everything else."""

    def __init__(self, model: Any, processor: Any) -> None:
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
        """The answer to ``prompt``, with ``images`` shown before it: at most ``max_length`` tokens, the likeliest, or
        with a ``temperature`` one that ``seed`` determines (``Sampling``). ``understand``, ``flow`` and ``on_step``
        have no effect.

        Raises ``ConfigError`` for ``parts`` (a message has its pictures before its texts), ``think``, ``size`` and
        ``max_parts``, and for ``images`` where the model reads none; ``UnreadableImage``; ``DataError`` for a prompt
        that is longer than the model's positions.
        """
        shown_pictures = pictures(images)
        options = {"parts": parts, "think": think, "size": size, "max_parts": max_parts}
        options = options if self.reads_images else {"images": shown_pictures, **options}
        unsupported = [name for name, value in options.items() if value]
        if unsupported:
            raise ConfigError(f"{', '.join(unsupported)}: {self.limits}")
        sampling = Sampling(temperature, top_p)
        with tempfile.TemporaryDirectory() as folder:
            paths = [as_file(each, Path(folder) / f"{number}.png") for number, each in enumerate(shown_pictures)]
            question = self.prompt(prompt, paths)
        return Generated(self.write([question], [seed], max_length, sampling)[0], [])

    def complete(
        self, requests: Sequence[Request], *, max_new_tokens: int, sampling: Sampling | None = None, **_: Any
    ) -> list[Generated]:
        """The answer to each of some records. It ends where the model has no more positions. Arguments for drawing have
        no effect.

        Raises ``DataError`` for a prompt that is longer than the model's positions.
        """
        prompts = [[*each.prompt, TokenSplit.unlearned(each.begin)] for each in requests]
        texts = self.write(prompts, [each.seed for each in requests], max_new_tokens, sampling or Sampling())
        return [Generated(text, []) for text in texts]

    def prompt(self, text: str, images: Sequence[Path]) -> Sequence[Loaded]:
        """Return what the model reads before its answer to a text and pictures: by default one message of a chat."""
        turns = [*(Turn("user", "image", str(path)) for path in images), Turn("user", "text", text)]
        return [split.load(self.processor, None) for split in self.processor.plan(turns, reply=True).splits]

    @abstractmethod
    def write(
        self, prompts: Sequence[Sequence[Loaded]], seeds: Sequence[int], max_new_tokens: int, sampling: Sampling
    ) -> list[str]:
        """The text of at most ``max_new_tokens`` tokens that follows each prompt; ``seeds``: of each."""

    def idle(self, method: str) -> tuple[Any, ...]:
        """Return arguments of a pass that does nothing: of a rank that has no work while others have."""
        return idle_arguments(self.model, self.processor)


class PackedInferencer(TextInterface):
    """A model that reads packed documents and has ``next_token_logits(batch, attend=)``: many prompts in each forward
    pass. ``max_document_tokens`` of the model is the limit of a document; positions of a document that is longer than
    its ``squeezes_beyond`` depend on its length.
    """

    def write(
        self, prompts: Sequence[Sequence[Loaded]], seeds: Sequence[int], max_new_tokens: int, sampling: Sampling
    ) -> list[str]:
        tokenizer, limit = self.processor.tokenizer, getattr(self.model, "max_document_tokens", None)
        lengths = [len(pack_documents([prompt], self.processor).text_ids) if limit else 0 for prompt in prompts]
        left = [tokens_left(length, limit) for length in lengths]
        short = [i for i, number in enumerate(left) if number < max_new_tokens]
        texts: dict[int, str] = {}
        for group in ([i for i in range(len(prompts)) if i not in short], *([i] for i in short)):
            continued = continue_prompts(
                self.model,
                self.processor,
                [prompts[i] for i in group],
                max_new_tokens=int(min([max_new_tokens, *(left[i] for i in group)])),
                max_positions=getattr(self.model, "squeezes_beyond", math.inf),
                choose=chooser(sampling, [seeds[i] for i in group]),
            )
            for i, ids in zip(group, continued, strict=True):
                texts[i] = tokenizer.decode([token for token in ids if token != tokenizer.eos_id])
                if i in short and ids[-1] != tokenizer.eos_id:
                    logger().warning(
                        "the text ends after %d tokens: the model has no more than %d positions, and the prompt"
                        " needs %d", len(ids), limit, lengths[i],
                    )  # fmt: skip
        return [texts[i] for i in range(len(prompts))]


def tokens_left(num_tokens: int, limit: int | None) -> float:
    """Tokens that may follow a prompt where a model has ``limit`` positions: the last one is not read any more.

    Raises ``DataError`` for none.
    """
    if limit is None:
        return math.inf
    if num_tokens > limit:
        raise DataError(
            f"the prompt has {num_tokens:,} tokens, and the model has {limit:,} positions",
            remedy="a shorter prompt",
        )
    return limit - num_tokens + 1
