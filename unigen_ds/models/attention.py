"""Attention from a description of the sequence (document, split, mode), not from a mask.

``plan_attention`` is called once per micro-batch; every layer then calls the plan with its queries, keys, values.
Documents of similar length are padded into one batch, so the cost follows the documents (sum of length squared), not
the square of the micro-batch: 64 samples of 25 tokens cost 40 k scores per head instead of 2.6 M.

Who sees whom inside a document (BAGEL's rules): earlier places always; all places of the same image split; but a
place of a NOISE split is seen by its own split alone.

Shape suffixes: T tokens, H heads, E head width, B documents of a bucket, N their padded length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from unigen_ds.core.batch import CAUSAL, NOISE, PackedBatch

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(queries, keys, values) of the present tokens -> what they attend to; every layer calls it once, in order."""

_MIN_FILL = 0.75  # a document joins a bucket when it fills this share of its padded length


@dataclass(frozen=True)
class Bucket:
    """Documents attended together: where their tokens stand, and the padded slot of each."""

    token_index: Tensor
    slot: Tensor
    shape: tuple[int, int]
    mask: Tensor | None
    """[B, 1, N, N] bool, true where a row may look; None: all places see each other."""


@dataclass(frozen=True)
class AttentionPlan:
    """Calls scaled dot-product attention bucket by bucket."""

    buckets: tuple[Bucket, ...]

    def __call__(self, q_THE: Tensor, k_THE: Tensor, v_THE: Tensor) -> Tensor:
        """``[T, H, E]`` each (k and v may have fewer heads, a divisor) -> ``[T, H, E]``."""
        groups = q_THE.shape[1] // k_THE.shape[1]
        if groups > 1:
            k_THE, v_THE = k_THE.repeat_interleave(groups, 1), v_THE.repeat_interleave(groups, 1)
        if not self.buckets:  # no token at all: keep the graph, so that every parameter gets a (zero) gradient
            return q_THE + 0.0 * (k_THE + v_THE)
        parts = [_attend(bucket, q_THE, k_THE, v_THE) for bucket in self.buckets]
        if len(parts) == 1:
            order = self.buckets[0].token_index
            joined = parts[0]
        else:
            order = torch.cat([bucket.token_index for bucket in self.buckets])
            joined = torch.cat(parts)
        return torch.empty_like(joined).index_copy(0, order, joined)


def _attend(bucket: Bucket, q_THE: Tensor, k_THE: Tensor, v_THE: Tensor) -> Tensor:
    rows, length = bucket.shape

    def pad(x_THE: Tensor) -> Tensor:
        taken = x_THE.index_select(0, bucket.token_index)
        padded = taken.new_zeros((rows * length, *taken.shape[1:])).index_copy(0, bucket.slot, taken)
        return padded.unflatten(0, (rows, length)).transpose(1, 2)

    out = F.scaled_dot_product_attention(pad(q_THE), pad(k_THE), pad(v_THE), attn_mask=bucket.mask)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, bucket.slot)


def plan_attention(batch: PackedBatch, place_of: Tensor | None = None) -> AttentionPlan:
    """Plan for the language model. ``place_of[t]`` is where token ``t`` stands in the hidden states; None: at ``t``."""
    modes_T = batch.split_modes[batch.split_ids]

    def mask(tokens: Tensor, valid: Tensor, uniform: bool) -> Tensor:
        split, mode = batch.split_ids[tokens], modes_T[tokens]  # [B, N]
        same = split[:, :, None] == split[:, None, :]
        length = tokens.shape[1]
        earlier = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        seen = earlier | (same & (mode != CAUSAL)[:, None, :])
        hidden = (mode == NOISE)[:, None, :] & ~same
        alone = torch.eye(length, dtype=torch.bool, device=tokens.device)  # padding rows: something to look at
        return ((seen & ~hidden & valid[:, None, :]) | alone)[:, None]

    return _plan(batch.document_lengths, batch.document_ids.device, place_of, mask)


def plan_full_attention(lengths: Sequence[int], device: torch.device) -> AttentionPlan:
    """Plan where all places of a document see each other: the ViT, one document per image."""

    def mask(tokens: Tensor, valid: Tensor, uniform: bool) -> Tensor | None:
        if uniform:
            return None
        alone = torch.eye(tokens.shape[1], dtype=torch.bool, device=device)
        return (valid[:, None, :] | alone)[:, None]

    return _plan(lengths, device, None, mask)


_MaskOf = Callable[[Tensor, Tensor, bool], Tensor | None]
"""(token numbers [B, N], which of them are real [B, N], whether all are) -> the bucket's mask."""


def _plan(lengths: Sequence[int], device: torch.device, place_of: Tensor | None, mask_of: _MaskOf) -> AttentionPlan:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    buckets = []
    for members in _group(lengths):
        longest = lengths[members[0]]
        start = torch.tensor([starts[m] for m in members], device=device)[:, None]
        size = torch.tensor([lengths[m] for m in members], device=device)[:, None]
        place = torch.arange(longest, device=device)[None]
        valid = place < size  # [B, N]
        uniform = lengths[members[-1]] == longest
        tokens = torch.where(valid, start + place, start)
        flat = valid.flatten().nonzero().squeeze(1)
        token_index = tokens.flatten()[flat]
        mask = mask_of(tokens, valid, uniform)
        if place_of is not None:
            token_index = place_of[token_index]
        buckets.append(Bucket(token_index, flat, (len(members), longest), mask))
    return AttentionPlan(tuple(buckets))


def _group(lengths: Sequence[int]) -> list[list[int]]:
    """Document numbers, longest first, cut where padding would waste too much."""
    groups: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        if groups and lengths[number] >= _MIN_FILL * lengths[groups[-1][0]]:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups
