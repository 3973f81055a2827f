"""Attention inside of the documents of a row for causal language models of transformers, without a mask of all pairs.

Of a row with several documents transformers makes a mask of T x T tokens, of which SDPA makes one of numbers in every
layer: at 32 k tokens 2 GB in bf16, kept for the backward pass. Here a mask function and an attention are registered
with transformers under ``_NAME``. Inside of ``documents`` the layers get a ``Documents`` in place of a mask, and the
attention calls its plan (``models/attention.py``). Outside of it both are transformers' SDPA.

Shape suffixes: T tokens, H heads, E head width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unigen_ds.models.attention import Attend

_NAME = "unigen_documents"


@dataclass(frozen=True)
class Documents:
    """What the layers get in place of a mask."""

    lengths: Sequence[int]
    attend: Attend


_DOCUMENTS: ContextVar[Documents | None] = ContextVar("documents", default=None)


@contextmanager
def documents(lengths: Sequence[int], attend: Attend) -> Iterator[None]:
    """Inside, a row of ``sum(lengths)`` tokens holds documents of these lengths, and ``attend`` is its attention.

    The model must be called with an ``attention_mask`` of ones: without one transformers looks for documents itself.
    """
    token = _DOCUMENTS.set(Documents(lengths, attend))
    try:
        yield
    finally:
        _DOCUMENTS.reset(token)


def use_documents(model: Any, *, on: bool) -> None:
    """Switch the attention of the language model to this one (``on``) or to transformers' SDPA."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)
    for config in _text_configs(model):
        config._attn_implementation = _NAME if on else "sdpa"


def is_causal(model: Any) -> bool:
    """Whether the language model has transformers' SDPA, and no window or chunk that limits what a token sees."""
    limits = ("sliding_window", "attention_chunk_size")
    return all(
        config._attn_implementation == "sdpa" and not any(getattr(config, key, None) for key in limits)
        for config in _text_configs(model)
    )


def _text_configs(model: Any) -> list[Any]:
    """The configs of the language model: parts of a model may have copies of it."""
    kind = type(model.get_decoder().config)
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    texts = [config.get_text_config() for config in configs if hasattr(config, "get_text_config")]
    return [*{id(config): config for config in texts if type(config) is kind}.values()]


def _mask(**options: Any) -> Any:
    """Return the mask of documents where one is set, else that of ``sdpa_mask`` of transformers."""
    from transformers.masking_utils import sdpa_mask

    return _DOCUMENTS.get() or sdpa_mask(**options)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Compute attention like transformers' ``sdpa_attention_forward``: ``[1, H, T, E]`` each -> ``[1, T, H, E]``."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if not isinstance(attention_mask, Documents):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    scaling, width = options.get("scaling"), query.shape[-1]
    if scaling is not None and scaling != width**-0.5:
        query = query * (scaling * math.sqrt(width))
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    dropout = options.get("dropout", 0.0)
    if not dropout:
        return attention_mask.attend(q, k, v)[None], None
    # document by document: plans have no dropout on the scores, as FlexAttention cannot
    groups, parts = q.shape[1] // k.shape[1], []
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    for qkv in zip(*(x.split(list(attention_mask.lengths)) for x in (q, k, v)), strict=True):
        one_q, one_k, one_v = (x.transpose(0, 1)[None] for x in qkv)
        values = F.scaled_dot_product_attention(one_q, one_k, one_v, is_causal=True, dropout_p=dropout)
        parts.append(values[0].transpose(0, 1))
    return torch.cat(parts)[None], None
