"""Attention of documents in one row for models of transformers, without a mask of all pairs of the row's tokens.

Of a row with several documents transformers makes a mask of T x T tokens, of which SDPA makes one of numbers in every
layer: at 32 k tokens 2 GB in bf16, kept for the backward pass. Here a mask function and an attention are registered
with transformers under ``NAME``. The mask function evaluates the model's own rule (causal, windows, images that see
themselves) inside of each document alone; where the rule is plainly causal there is no mask. What it returns goes
through the layers in place of a mask; the attention calls transformers' SDPA with each bucket of documents
(``models/attention.py``).

Outside of ``documents`` both are transformers' SDPA.

Shape suffixes: B documents of a bucket, N their padded length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from unigen_ds.models.attention import Bucket, SDPAPlan, plan_sdpa

NAME = "unigen_documents"
_LENGTHS: ContextVar[Sequence[int] | None] = ContextVar("lengths", default=None)
_PAIRS = 1 << 24
"""Pairs of tokens for which the rule is evaluated at once."""

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(row, head, token, token that it may look at) -> whether it does; of transformers' ``masking_utils``."""


@contextmanager
def documents(lengths: Sequence[int]) -> Iterator[None]:
    """Inside, a row of ``sum(lengths)`` tokens holds documents of these lengths.

    The model must be called with an ``attention_mask`` of ones: without one transformers looks for documents itself.
    """
    token = _LENGTHS.set(lengths)
    try:
        yield
    finally:
        _LENGTHS.reset(token)


def use_documents(model: Any, *, on: bool) -> None:
    """Switch the attention of the language model to this one (``on``) or to transformers' SDPA."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    for config in _text_configs(model):
        config._attn_implementation = NAME if on else "sdpa"


def has_sdpa(model: Any) -> bool:
    """Whether the language model has transformers' SDPA, and no layer whose rule depends on where a row begins."""
    configs = _text_configs(model)
    chunks = any(getattr(config, "attention_chunk_size", None) for config in configs)
    return not chunks and all(config._attn_implementation == "sdpa" for config in configs)


def _text_configs(model: Any) -> list[Any]:
    """Parts of a model may have copies of it."""
    kind = type(model.get_decoder().config)
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    texts = [config.get_text_config() for config in configs if hasattr(config, "get_text_config")]
    return [*{id(config): config for config in texts if type(config) is kind}.values()]


def _mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Rule,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    **options: Any,
) -> Any:
    """As ``sdpa_mask`` of transformers; for the documents of a row an ``SDPAPlan``.

    Args:
        allow_is_causal_skip: the rule is that of all earlier tokens, of which ``local_size`` limits the number.
    """
    from transformers.masking_utils import sdpa_mask

    lengths = _LENGTHS.get()
    if lengths is None or (batch_size, q_length, kv_length) != (1, sum(lengths), sum(lengths)):
        return sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, mask_function=mask_function,
            allow_is_causal_skip=allow_is_causal_skip, local_size=local_size, **options,
        )  # fmt: skip

    def bucket(tokens: Tensor, valid: Tensor) -> Bucket:
        length = tokens.shape[1]
        if allow_is_causal_skip and (local_size is None or length < local_size):
            return Bucket(tuple(tokens.shape), is_causal=True)
        number = torch.arange(length, device=tokens.device)
        rows = number.split(max(1, _PAIRS // tokens.numel()))
        visible = torch.cat([_seen(mask_function, tokens, some) for some in rows], 2)
        return Bucket(tuple(tokens.shape), visible & valid[:, None, None])  # a row of padding sees the first token

    return plan_sdpa(lengths, torch.device(options["device"]), None, bucket)


def _seen(rule: Rule, tokens: Tensor, rows: Tensor) -> Tensor:
    """Evaluate the rule for some rows of each document: ``[B, 1, rows, N]``, true where a row sees a token."""
    first = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=tokens.device)
    visible = rule(first, first, tokens[:, None, rows, None], tokens[:, None, None])
    return visible.expand(len(tokens), 1, len(rows), tokens.shape[1])


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """As ``sdpa_attention_forward`` of transformers, ``[1, H, T, E]`` each -> ``[1, T, H, E]``."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if not isinstance(attention_mask, SDPAPlan):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    options.pop("is_causal", None)

    def attend(bucket: Bucket, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, _ = sdpa_attention_forward(module, q, k, v, bucket.mask, is_causal=bucket.is_causal, **options)
        return out

    return attention_mask.through(attend, *(x[0].transpose(0, 1) for x in (query, key, value)))[None], None
