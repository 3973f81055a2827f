"""What the inferencers of the families that answer in text have in common."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from unigen_ds.config.registry import checked
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.inference.continuation import idle_arguments
from unigen_ds.inference.generated import Generated, MaxLength, MaxParts, Picture, Size, as_file, pictures
from unigen_ds.inference.sampling import Sampling

LIKELIEST = Sampling()


def tokens_left(num_tokens: int, limit: int | None) -> int:
    """Tokens that may follow a prompt where a model has ``limit`` positions: the last one is not read any more.

    Raises ``DataError`` for none.
    """
    if limit is None:
        return 1 << 62
    if num_tokens > limit:
        raise DataError(
            f"the prompt has {num_tokens:,} tokens, and the model has {limit:,} positions",
            remedy="a shorter prompt",
        )
    return limit - num_tokens + 1


class TextInterface(ABC):
    """A model in evaluation mode with the interface of ``InterleaveInferencer``. It draws nothing.

    A family adds how it answers (``_answer``) and ``complete``.
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
        ``max_parts``, and for ``images`` where the model reads none; ``UnreadableImage``.
        """
        shown = pictures(images)
        given = {"parts": parts, "think": think, "size": size, "max_parts": max_parts}
        given = given if self.reads_images else {"images": shown, **given}
        unsupported = [name for name, value in given.items() if value]
        if unsupported:
            raise ConfigError(f"{', '.join(unsupported)}: {self.limits}")
        sampling = Sampling(temperature, top_p)
        with tempfile.TemporaryDirectory() as folder:
            paths = [as_file(each, Path(folder) / f"{number}.png") for number, each in enumerate(shown)]
            return Generated(self._answer(prompt, paths, max_length, sampling, seed), [])

    @abstractmethod
    def _answer(self, prompt: str, images: Sequence[Path], max_length: int, sampling: Sampling, seed: int) -> str:
        """The text that follows ``prompt``, of at most ``max_length`` tokens."""

    def idle(self, method: str) -> tuple[Any, ...]:
        """As of ``InterleaveInferencer``."""
        return idle_arguments(self.model, self.processor)
