"""Models that answer in text: their interface, and many prompts in each forward pass with a key/value cache for each.

A new token costs its own row of attention. Where a document may become longer than the model's positions, which are
then squeezed by its length (all of them, again for each token), the documents are computed anew instead.

Shape suffixes: T new tokens, N all tokens, H heads, E head width.
"""

from __future__ import annotations

import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from unigen_ds.config.registry import checked
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.data.batches.loader import pack_documents
from unigen_ds.data.records.records import Turn
from unigen_ds.data.samples.sample import LoadedSplit
from unigen_ds.data.samples.splits import TokenSplit
from unigen_ds.inference.generated import Generated, MaxLength, Picture, Request, Size, as_file, one_or_many_pictures
from unigen_ds.inference.prompts import Sampling
from unigen_ds.models.attention import Attend
from unigen_ds.system.log import logger
from unigen_ds.system.seeding import generator

Choose = Callable[[Tensor, Sequence[int]], Sequence[int]]
"""Logits ``[documents, vocabulary]`` and the number of each document among the prompts -> a token for each."""


class TextInterface(ABC):
    """A model in evaluation mode with the interface of ``InterleaveInferencer``. It draws nothing. A family adds
    ``write``, and ``prompt`` where a question is not one message of a chat."""

    answers = ("text",)
    """What ``complete`` can be asked for."""
    reads_images: bool = True
    """Where it is not, pictures are refused: of a call, and of previews at the start."""
    converses: bool = True
    """Whether earlier messages of a conversation may come first (``history``)."""
    thinks = False
    """Whether ``think`` is possible."""
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
        history: Sequence[Turn] = (),
        understand: bool = True,
        think: bool = False,
        size: Size = None,
        flow: Any = None,
        max_length: MaxLength = 1000,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        on_step: Any = None,
    ) -> Generated:
        """The answer to ``prompt``, with ``images`` shown before it, and before those the messages of ``history``: at
        most ``max_length`` tokens, the likeliest, or with a ``temperature`` one that ``seed`` determines
        (``Sampling``). ``understand``, ``flow`` and ``on_step`` have no effect. Raises ``ConfigError`` for ``parts``
        (a message has its pictures before its texts), ``think`` and ``size``, and for ``images`` and ``history`` where
        the model reads none; ``UnreadableImage``; ``DataError`` for a prompt that is longer than the model's positions.
        """
        context = one_or_many_pictures(images)
        options: dict[str, Any] = {} if self.reads_images else {"images": context}
        options |= {"parts": parts, "think": think, "size": size} | ({} if self.converses else {"history": history})
        if names := [name for name, value in options.items() if value]:
            raise ConfigError(f"{', '.join(names)}: {self.limits}")
        sampling = Sampling(temperature, top_p)
        with tempfile.TemporaryDirectory() as folder:
            paths = [as_file(each, Path(folder) / f"{number}.png") for number, each in enumerate(context)]
            question = self.prompt(prompt, paths, history)
        return Generated(self.write([question], [seed], max_length, sampling)[0], [])

    def complete(
        self, requests: Sequence[Request], *, max_new_tokens: int, sampling: Sampling | None = None, **_: Any
    ) -> list[Generated]:
        """The answer to each record, up to the last position of the model. Arguments for drawing have no effect. Raises
        ``DataError`` for a prompt that is longer than the model's positions."""
        prompts = [[*each.prompt, TokenSplit.unlearned(each.begin)] for each in requests]
        texts = self.write(prompts, [each.seed for each in requests], max_new_tokens, sampling or Sampling())
        return [Generated(text, []) for text in texts]

    def prompt(self, text: str, images: Sequence[Path], history: Sequence[Turn]) -> Sequence[LoadedSplit]:
        """Return what the model reads before its answer to a text and pictures: by default the next message of a chat,
        after those of ``history``."""
        turns = [*history, *(Turn("user", "image", str(path)) for path in images), Turn("user", "text", text)]
        return [split.load(self.processor, None) for split in self.processor.plan(turns, reply=True).splits]

    @abstractmethod
    def write(
        self, prompts: Sequence[Sequence[LoadedSplit]], seeds: Sequence[int], max_new_tokens: int, sampling: Sampling
    ) -> list[str]:
        """The text of at most ``max_new_tokens`` tokens that follows each prompt; ``seeds``: of each."""

    def idle(self, method: str) -> tuple[Any, ...]:
        """Return arguments of a pass that does nothing: of a rank that has no work while others have."""
        return idle_arguments(self.model, self.processor)


class PackedInferencer(TextInterface):
    """A model that reads packed documents and has ``next_token_logits(batch, attend=)`` (``continue_prompts``)."""

    def write(
        self, prompts: Sequence[Sequence[LoadedSplit]], seeds: Sequence[int], max_new_tokens: int, sampling: Sampling
    ) -> list[str]:
        tokenizer = self.processor.tokenizer
        answers = continue_prompts(
            self.model, self.processor, prompts, max_new_tokens=max_new_tokens, choose=chooser(sampling, seeds)
        )
        return [tokenizer.decode([token for token in ids if token != tokenizer.eos_id]) for ids in answers]


def tokens_left(num_tokens: int, limit: int | None) -> int:
    """Tokens that may follow a prompt where a model has ``limit`` positions. Raises ``DataError`` for none."""
    if limit is not None and num_tokens > limit:
        raise DataError(
            f"the prompt has {num_tokens:,} tokens, and the model has {limit:,} positions",
            remedy="a shorter prompt",
        )
    return sys.maxsize if limit is None else limit - num_tokens + 1  # the last one is not read any more


def likeliest(logits: Tensor, documents: Sequence[int] = ()) -> Sequence[int]:
    ids: list[int] = logits.argmax(-1).tolist()
    return ids


def sample(logits: Tensor, sampling: Sampling, random: torch.Generator) -> int:
    """A token by chance, from logits ``[vocabulary]`` and a temperature above 0."""
    chances = torch.softmax(logits.float().cpu() / sampling.temperature, dim=-1)
    if sampling.top_p < 1.0:
        likely, order = chances.sort(descending=True, stable=True)
        beyond = likely.cumsum(0) - likely >= sampling.top_p
        chances = chances.masked_fill(torch.zeros_like(beyond).scatter(0, order, beyond), 0.0)
    return int(torch.multinomial(chances, 1, generator=random))


def chooser(sampling: Sampling, seeds: Sequence[int]) -> Choose:
    """Return a function that chooses the next tokens of several documents, each with a generator of its own."""
    if sampling.temperature == 0.0:
        return likeliest
    randoms = [generator(seed, "write") for seed in seeds]
    return lambda logits, documents: [
        sample(row, sampling, randoms[i]) for row, i in zip(logits, documents, strict=True)
    ]


def device_of(model: Any) -> torch.device:
    """The device on which a model computes. Of one that an engine shards, parameters may be elsewhere."""
    device: torch.device = getattr(model, "compute_device", None) or next(model.parameters()).device
    return device


def idle_arguments(model: Any, processor: Any) -> tuple[Any, ...]:
    """Return arguments of a pass over one token, for a rank without work while others have some (``together.py``)."""
    document = [TokenSplit.unlearned((processor.tokenizer.eos_id,))]
    return (pack_documents([document], processor).to(device_of(model)),)


@torch.no_grad()
def continue_prompts(
    model: Any,
    processor: Any,
    prompts: Sequence[Sequence[LoadedSplit]],
    *,
    max_new_tokens: int,
    choose: Choose = likeliest,
    cached: bool = True,
) -> list[list[int]]:
    """The ids that follow each prompt, up to and with the first end id, or until the model has no more positions.

    Args:
        model: has ``next_token_logits(batch, attend=...)``; where it has ``max_document_tokens``, the limit of a
            document; where it has ``squeezes_beyond``, positions of longer documents depend on their length.
        processor: of the model; its tokenizer has the end id.
        choose: picks the tokens.
        cached: keep keys and values; only where every token sees all earlier ones and no later one.

    Raises ``DataError`` for a prompt that is longer than the model's positions.
    """
    device, limit = device_of(model), getattr(model, "max_document_tokens", None)
    texts: list[list[int]] = [[] for _ in prompts]
    caches, begin = [KVCache() for _ in prompts], torch.zeros(len(prompts), dtype=torch.int64)
    unread: list[list[LoadedSplit]] = [[*prompt] for prompt in prompts]
    open_ones, rest = list(range(len(prompts))), list[int]()
    for step in range(max_new_tokens if prompts else 0):
        batch = pack_documents([unread[i] for i in open_ones], processor)
        lengths, attend = batch.document_lengths, None
        if step == 0:
            rest = [tokens_left(length, limit) for length in lengths]
            cached &= max(lengths) + max_new_tokens <= getattr(model, "squeezes_beyond", sys.maxsize)
        if cached:
            sizes = torch.tensor(lengths)
            batch = replace(batch, position_ids=batch.position_ids + begin[open_ones].repeat_interleave(sizes))
            begin[open_ones] = batch.position_ids[sizes.cumsum(0) - 1] + 1
            attend = partial(_attend_each, [caches[i].attend(causal=True, keep=True) for i in open_ones], lengths)
        tokens = choose(model.next_token_logits(batch.to(device), attend=attend), open_ones)
        for i, token in zip(open_ones, tokens, strict=True):
            texts[i].append(int(token))
            unread[i] = ([] if cached else unread[i]) + [TokenSplit.unlearned((int(token),))]
        open_ones = [i for i in open_ones if texts[i][-1] != processor.tokenizer.eos_id]
        for i in [i for i in open_ones if len(texts[i]) == rest[i] < max_new_tokens]:
            logger().warning(f"the text ends after {rest[i]} tokens: the model has no more than {limit} positions")
            open_ones.remove(i)
        if not open_ones:
            break
    return texts


@dataclass
class KVCache:
    """``layers[i]``: keys and values ``[N, H, E]`` of layer i; none before the first token. A copy is cheap: it shares
    the tensors, which are replaced and never written to."""

    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def copy(self) -> KVCache:
        """Return a cache with the same tokens; later ones are added to one of the two alone."""
        return KVCache(list(self.layers))

    def attend(self, *, causal: bool, keep: bool) -> Attend:
        """Return the attention of one forward pass over new tokens, which the layers call once each, in order. New
        tokens see the cache and all new ones (``causal``: up to themselves); ``keep`` adds them to it."""
        layer = -1

        def attend(q_THE: Tensor, k_THE: Tensor, v_THE: Tensor) -> Tensor:
            nonlocal layer
            layer += 1
            if layer < len(self.layers):
                k_THE, v_THE = (torch.cat(pair) for pair in zip(self.layers[layer], (k_THE, v_THE), strict=True))
            if keep:
                self.layers[layer : layer + 1] = [(k_THE, v_THE)]
            new, total, groups = len(q_THE), len(k_THE), q_THE.shape[1] // k_THE.shape[1]
            mask = None
            if causal and new > 1:
                mask = torch.ones(new, total, dtype=torch.bool, device=q_THE.device).tril(total - new)
            k_THE, v_THE = k_THE.repeat_interleave(groups, 1), v_THE.repeat_interleave(groups, 1)
            q, k, v = (x.transpose(0, 1)[None] for x in (q_THE, k_THE, v_THE))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1)

        return attend


def _attend_each(attends: Sequence[Attend], lengths: Sequence[int], *qkv_THE: Tensor) -> Tensor:
    """Attention of the next tokens of several documents, each with its own cache."""
    documents = zip(*(x.split(list(lengths)) for x in qkv_THE), strict=True)
    return torch.cat([attend(*qkv) for attend, qkv in zip(attends, documents, strict=True)])
