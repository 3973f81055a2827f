"""What a model of text writes after each of several prompts, all in one forward pass a token.

In: prompts as the collator accepts them. Out: token ids. Each prompt has a key/value cache, so a new token costs its
own row of attention; where a document may become longer than the model's positions, which are then squeezed by its
length (all of them, again for each token), the documents are computed anew instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unigen_ds.data.batches.loader import pack_documents
from unigen_ds.data.samples.sample import Loaded
from unigen_ds.data.samples.splits import TokenSplit
from unigen_ds.inference.kv_cache import CachedDocuments, KVCache
from unigen_ds.inference.sampling import Sampling
from unigen_ds.system.seeding import generator

Choose = Callable[[Tensor, Sequence[int]], Sequence[int]]
"""Logits ``[documents, vocabulary]`` and the number of each document among the prompts -> a token for each."""


def likeliest(logits: Tensor, documents: Sequence[int] = ()) -> Sequence[int]:
    """The greedy choice."""
    ids: list[int] = logits.argmax(-1).tolist()
    return ids


def drawn(logits: Tensor, sampling: Sampling, random: torch.Generator) -> int:
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

    def choose(logits: Tensor, documents: Sequence[int]) -> Sequence[int]:
        return [drawn(row, sampling, randoms[i]) for row, i in zip(logits, documents, strict=True)]

    return choose


def device_of(model: Any) -> torch.device:
    """The device on which a model computes. Of one that an engine shards, parameters may be elsewhere."""
    device: torch.device = getattr(model, "compute_device", None) or next(model.parameters()).device
    return device


def idle_arguments(model: Any, processor: Any) -> tuple[Any, ...]:
    """Return arguments of a pass over one token, for a rank without work while others have some (``together.py``)."""
    document = [TokenSplit((processor.tokenizer.eos_id,), (-100,))]
    return (pack_documents([document], processor).to(device_of(model)),)


@torch.no_grad()
def continue_prompts(
    model: Any,
    processor: Any,
    prompts: Sequence[Sequence[Loaded]],
    *,
    max_new_tokens: int,
    max_positions: float,
    choose: Choose = likeliest,
) -> list[list[int]]:
    """The ids that follow each prompt, up to and with the first end id.

    Args:
        model: has ``next_token_logits(batch, attend=...)``.
        processor: of the model; its tokenizer has the end id.
        max_positions: length up to which the model's positions are not squeezed.
        choose: picks the tokens.
    """
    device = device_of(model)
    texts: list[list[int]] = [[] for _ in prompts]
    caches, begin = [KVCache() for _ in prompts], torch.zeros(len(prompts), dtype=torch.int64)
    unread: list[list[Loaded]] = [[*prompt] for prompt in prompts]
    open_ones, cached = list(range(len(prompts))), True
    for step in range(max_new_tokens if prompts else 0):
        batch = pack_documents([unread[i] for i in open_ones], processor)
        lengths = batch.document_lengths
        if step == 0:
            cached = max(lengths) + max_new_tokens <= max_positions
        attend = None
        if cached:
            sizes = torch.tensor(lengths)
            batch = replace(batch, position_ids=batch.position_ids + begin[open_ones].repeat_interleave(sizes))
            begin[open_ones] = batch.position_ids[sizes.cumsum(0) - 1] + 1
            attend = CachedDocuments([caches[i] for i in open_ones], lengths)
        chosen = choose(model.next_token_logits(batch.to(device), attend=attend), open_ones)
        for i, token in zip(open_ones, chosen, strict=True):
            texts[i].append(int(token))
            unread[i] = ([] if cached else unread[i]) + [TokenSplit((int(token),), (-100,))]
        open_ones = [i for i in open_ones if texts[i][-1] != processor.tokenizer.eos_id]
        if not open_ones:
            break
    return texts
