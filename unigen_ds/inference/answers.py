"""Models that answer in text: their interface, and many prompts in each forward pass with a key/value cache for each.

A new token costs its own row of attention. Where a document may become longer than the model's positions, which are
then squeezed by its length (all of them, again for each token), the documents are computed anew instead.

Shape suffixes: T new tokens, N all tokens, H heads, E head width.
"""

from __future__ import annotations

import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from unigen_ds.config.registry import checked
from unigen_ds.core.batch import to_device
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.data.batches.loader import pack_documents
from unigen_ds.data.records.records import Turn
from unigen_ds.data.samples.sample import LoadedSplit
from unigen_ds.data.samples.splits import TokenSplit
from unigen_ds.inference.generated import Generated, MaxLength, Picture, Request, Size, as_file, one_or_many_pictures
from unigen_ds.inference.prompts import Prompt, Sampling
from unigen_ds.models.attention import Attend, plan_attention
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

    def request(self, prompt: Prompt, *, seed: int, **options: Any) -> Request | None:
        """A call of ``unified_generate`` with these options as a request, which ``complete`` answers with others; None
        where it is refused."""
        if prompt.parts or options.get("think") or options.get("size") or (prompt.images and not self.reads_images):
            return None
        return Request(self.prompt(prompt.prompt, [Path(path) for path in prompt.images], ()), "text", seed)

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
    return logits.argmax(-1).tolist()


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
    return getattr(model, "compute_device", None) or next(model.parameters()).device


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
    cache: KVCache | None = None,
    begin: int = 0,
) -> list[list[int]]:
    """The ids that follow each prompt, up to and with an end id, or until the model has no more positions.

    Args:
        model: has ``next_token_logits(batch, attend=...)``; where it has ``max_document_tokens``, the limit of a
            document; where it has ``squeezes_beyond``, positions of longer documents depend on their length.
        processor: of the model; its tokenizer has the end ids.
        choose: picks the tokens.
        cached: keep keys and values; only where every token sees all earlier ones and no later one.
        cache: what the model has read before the one prompt, which begins at position ``begin``; it is extended.

    Raises ``DataError`` for a prompt that is longer than the model's positions.
    """
    device, limit, tokenizer = device_of(model), getattr(model, "max_document_tokens", None), processor.tokenizer
    end_ids: Collection[int] = getattr(tokenizer, "end_ids", (tokenizer.eos_id,))
    texts: list[list[int]] = [[] for _ in prompts]
    open_ones, batch = list(range(len(prompts))), pack_documents(prompts, processor).to(device)
    lengths, position_ids = batch.document_lengths, batch.position_ids + begin
    rest = [tokens_left(length, limit) for length in lengths]
    cached &= max(lengths, default=0) + max_new_tokens <= getattr(model, "squeezes_beyond", sys.maxsize)
    attend = None
    if cache is not None:
        attend = cache.attend(causal=True, keep=True)
    elif cached:
        attend = (cache := KVCache()).begin(batch)
    for _ in range(max_new_tokens if prompts else 0):
        logits = model.next_token_logits(replace(batch, position_ids=position_ids), attend=attend)[: len(open_ones)]
        for i, token in zip(open_ones, choose(logits, open_ones), strict=True):
            texts[i].append(int(token))
            if len(texts[i]) == rest[i] < max_new_tokens and texts[i][-1] not in end_ids:
                logger().warning(f"the text ends after {rest[i]} tokens: the model has no more than {limit} positions")
        rows = [k for k, i in enumerate(open_ones) if texts[i][-1] not in end_ids and len(texts[i]) < rest[i]]
        open_ones = [open_ones[k] for k in rows]
        if not rows:
            break
        if cache is None:
            documents = [[*prompts[i], TokenSplit.unlearned(texts[i])] for i in open_ones]
            batch = pack_documents(documents, processor).to(device)
            position_ids = batch.position_ids
            continue
        if batch.num_tokens > len(rows):  # packed where their number changes, not for each token
            last = torch.tensor(batch.document_lengths).cumsum(0)[rows] - 1
            position_ids = position_ids[to_device(last, device)]
            cache.select(rows)
            batch = pack_documents([[TokenSplit.unlearned((0,))]] * len(rows), processor).to(device)
        batch = replace(batch, text_ids=to_device(torch.tensor([texts[i][-1] for i in open_ones]), device))
        position_ids, attend = position_ids + 1, cache.attend(causal=True, keep=True)
    return texts


@dataclass
class KVCache:
    """``layers[i]``: keys and values ``[N, D, H, E]`` of layer i, of D documents, those of shorter ones filled up at
    their beginning; none before the first token. A copy is cheap: it shares the tensors, which are replaced and never
    written to."""

    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    fill_D: Tensor | None = None
    """By how many each is filled up; None: all have the same length."""

    def copy(self) -> KVCache:
        """Return a cache with the same tokens; later ones are added to one of the two alone."""
        return KVCache(list(self.layers), self.fill_D)

    def select(self, rows: Sequence[int]) -> None:
        if len(rows) < self.layers[0][0].shape[1]:
            self.layers = [(k[:, rows], v[:, rows]) for k, v in self.layers]
            self.fill_D = None if self.fill_D is None else self.fill_D[rows]

    def begin(self, batch: Any) -> Attend:
        """Return the attention of a forward pass over whole documents, which the cache keeps."""
        plan, lengths = plan_attention(batch, use_flex=False), batch.document_lengths
        if min(lengths) < max(lengths):
            self.fill_D = to_device(max(lengths) - torch.tensor(lengths), batch.document_ids.device)

        def attend(*qkv_THE: Tensor) -> Tensor:
            k, v = (pad_sequence(x.split(lengths), padding_side="left") for x in qkv_THE[1:])
            self.layers.append((k, v))
            return plan(*qkv_THE)

        return attend

    def attend(self, *, causal: bool, keep: bool) -> Attend:
        """Return the attention of one forward pass over new tokens, which the layers call once each, in order: one of
        each document, or any number of a single one. They see the cache and all new ones of their document
        (``causal``: up to themselves); ``keep`` adds them to it."""
        layer, mask = -1, None

        def attend(q_THE: Tensor, k_THE: Tensor, v_THE: Tensor) -> Tensor:
            nonlocal layer, mask
            layer += 1
            documents = self.layers[0][0].shape[1] if self.layers else 1
            shape, heads = (-1, documents, *k_THE.shape[1:]), k_THE.shape[1]
            k, v = k_THE.view(shape), v_THE.view(shape)
            new, groups = len(k), q_THE.shape[1] // heads
            if layer < len(self.layers):
                k, v = (torch.cat(pair) for pair in zip(self.layers[layer], (k, v), strict=True))
            if keep:
                self.layers[layer : layer + 1] = [(k, v)]
            if layer == 0 and self.fill_D is not None:
                mask = (torch.arange(len(k), device=k.device) >= self.fill_D[:, None])[:, None, None]
            elif layer == 0 and causal and new > 1:
                mask = torch.ones(new, len(k), dtype=torch.bool, device=k.device).tril(len(k) - new)
            if new == 1:  # the queries of a group are rows for its keys, which need no copy for each
                q = q_THE.unflatten(1, (heads, groups))
            else:
                q = q_THE.transpose(0, 1)[None]
                k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
            out = F.scaled_dot_product_attention(q, k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3), attn_mask=mask)
            return out.flatten(1, 2) if new == 1 else out[0].transpose(0, 1)

        return attend
