"""Keys and values of every token so far, layer by layer, so that a new token costs its own row of attention alone.

A copy is cheap: it shares the tensors, which are replaced and never written to. Guidance keeps three of them.

Shape suffixes: T new tokens, N all tokens, H heads, E head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass
class KVCache:
    """``layers[i]``: keys and values ``[N, H, E]`` of layer i; none before the first token."""

    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __len__(self) -> int:
        """Tokens that are held."""
        return len(self.layers[0][0]) if self.layers else 0

    def copy(self) -> KVCache:
        """Return a cache with the same tokens; later ones are added to one of the two alone."""
        return KVCache(list(self.layers))

    def attend(self, *, causal: bool, keep: bool) -> CachedAttention:
        """Attention of one forward pass over new tokens; ``keep`` adds them to the cache."""
        return CachedAttention(self, causal=causal, keep=keep)


class CachedAttention:
    """New tokens see the whole cache and, if ``causal``, the new ones up to themselves, else all new ones.

    The layers of the model call it once each, in order.
    """

    def __init__(self, cache: KVCache, *, causal: bool, keep: bool) -> None:
        self._cache, self._causal, self._keep = cache, causal, keep
        self._layer = 0

    def __call__(self, q_THE: Tensor, k_THE: Tensor, v_THE: Tensor) -> Tensor:
        layers, layer = self._cache.layers, self._layer
        self._layer += 1
        if layer < len(layers):
            k_THE, v_THE = (torch.cat(pair) for pair in zip(layers[layer], (k_THE, v_THE), strict=True))
        if self._keep:
            layers[layer : layer + 1] = [(k_THE, v_THE)]
        new, total = len(q_THE), len(k_THE)
        mask = None
        if self._causal and new > 1:
            mask = torch.ones(new, total, dtype=torch.bool, device=q_THE.device).tril(total - new)
        groups = q_THE.shape[1] // k_THE.shape[1]
        q, k, v = (
            x.repeat_interleave(repeats, 1).transpose(0, 1)[None]
            for x, repeats in ((q_THE, 1), (k_THE, groups), (v_THE, groups))
        )
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1)


class CachedDocuments:
    """Attention of one causal forward pass over the next tokens of several documents, each with its own cache."""

    def __init__(self, caches: Sequence[KVCache], lengths: Sequence[int]) -> None:
        self._parts = [cache.attend(causal=True, keep=True) for cache in caches]
        self._lengths = list(lengths)

    def __call__(self, q_THE: Tensor, k_THE: Tensor, v_THE: Tensor) -> Tensor:
        split = (x.split(self._lengths) for x in (q_THE, k_THE, v_THE))
        return torch.cat([attend(q, k, v) for attend, q, k, v in zip(self._parts, *split, strict=True)])
