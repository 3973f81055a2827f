"""Attention from a description of the sequence (document, split, mode), not from a mask.

``plan_attention`` is called once per micro-batch; every layer then calls the plan with its queries, keys, values. On
CUDA the plan is FlexAttention (``flex.py``). Elsewhere it is SDPA, bucket by bucket: documents of similar length are
padded into one batch, so the cost follows the documents (sum of length squared), not the square of the micro-batch: 64
samples of 25 tokens cost 40 k scores per head instead of 2.6 M. Text alone needs no mask: it is causal, and padding
follows it.

What a token attends to inside a document (BAGEL's rules): all earlier positions; all positions of its own image split;
but positions of a NOISE split only where it is its own split.

Shape suffixes: T tokens, H heads, E head width, B documents of a bucket, N their padded length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from unigen_ds.core.batch import CAUSAL, NOISE, PackedBatch, to_device
from unigen_ds.models.flex import FlexPlan, plan_flex

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(queries, keys, values) of the present tokens -> what they attend to; every layer calls it once, in order."""

_MIN_FILL = 0.75  # a document joins a bucket when it fills this share of its padded length


@dataclass(frozen=True)
class Bucket:
    """Documents attended together, padded to one length."""

    shape: tuple[int, ...]
    mask: Tensor | None = None
    """[B, 1, N, N] bool, true where a row may look; None: a row sees all; with ``is_causal``, not what follows."""
    is_causal: bool = False


@dataclass(frozen=True)
class SDPAPlan:
    """Calls scaled dot-product attention bucket by bucket."""

    buckets: tuple[Bucket, ...]
    slot_T: Tensor | None
    """Index of each token in the concatenated buckets; None: the buckets have the tokens in their order."""

    def __call__(self, q_THE: Tensor, k_THE: Tensor, v_THE: Tensor) -> Tensor:
        """``[T, H, E]`` each (k and v may have fewer heads, a divisor) -> ``[T, H, E]``."""
        groups = q_THE.shape[1] // k_THE.shape[1]
        if not self.buckets:  # no token at all: keep the graph, so that every parameter gets a (zero) gradient
            return q_THE + 0.0 * (k_THE + v_THE).repeat_interleave(groups, 1)
        sizes = [rows * length for rows, length in (bucket.shape for bucket in self.buckets)]
        queries, keys, values = (self._padded(x, sum(sizes)).split(sizes) for x in (q_THE, k_THE, v_THE))
        parts = []
        for bucket, *qkv in zip(self.buckets, queries, keys, values, strict=True):
            q, k, v = (x.unflatten(0, bucket.shape).transpose(1, 2) for x in qkv)
            if groups > 1:
                k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bucket.mask, is_causal=bucket.is_causal)
            parts.append(out.transpose(1, 2).flatten(0, 1))
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined if self.slot_T is None else joined.index_select(0, self.slot_T)

    def _padded(self, x_THE: Tensor, num_slots: int) -> Tensor:
        if self.slot_T is None:
            return x_THE
        return x_THE.new_zeros((num_slots, *x_THE.shape[1:])).index_copy(0, self.slot_T, x_THE)


AttentionPlan = SDPAPlan | FlexPlan


def plan_attention(batch: PackedBatch, row_of: Tensor | None = None, *, use_flex: bool | None = None) -> AttentionPlan:
    """Plan for the language model.

    Args:
        batch: defines what each token attends to.
        row_of: ``row_of[t]`` is the row of token ``t`` in the hidden states; None: row ``t``.
        use_flex: FlexAttention or SDPA; None: by the batch's device.
    """
    modes_T = batch.split_modes[batch.split_ids]
    device = batch.document_ids.device
    if device.type == "cuda" if use_flex is None else use_flex:
        number = torch.arange(len(batch.document_ids), device=device)
        token = number if row_of is None else torch.empty_like(number).index_copy(0, row_of, number)
        image_T = batch.split_ids.masked_fill(modes_T == CAUSAL, -1)
        return plan_flex(
            batch.document_ids[token],
            token,
            image_T[token],
            (modes_T == NOISE)[token],
            num_documents=len(batch.document_lengths),
            num_images=len(batch.split_modes),
        )

    def bucket(tokens: Tensor, valid: Tensor) -> Bucket:
        split, mode = batch.split_ids[tokens], modes_T[tokens]  # [B, N]
        if not (mode != CAUSAL).any():
            return Bucket(tuple(tokens.shape), is_causal=True)
        same = split[:, :, None] == split[:, None, :]
        length = tokens.shape[1]
        earlier = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        visible = earlier | (same & (mode != CAUSAL)[:, None, :])
        hidden = (mode == NOISE)[:, None, :] & ~same
        alone = torch.eye(length, dtype=torch.bool, device=device)  # padding rows: something to look at
        return Bucket(tuple(tokens.shape), ((visible & ~hidden & valid[:, None, :]) | alone)[:, None])

    return plan_sdpa(batch.document_lengths, device, row_of, bucket)


def plan_full_attention(lengths: Sequence[int], device: torch.device, *, use_flex: bool | None = None) -> AttentionPlan:
    """Plan where all positions of a document attend to each other: the ViT, one document per image."""
    if device.type == "cuda" if use_flex is None else use_flex:
        number = torch.arange(sum(lengths), device=device)
        on_host = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
        image = to_device(on_host, device)
        noise, count = torch.zeros_like(image, dtype=torch.bool), len(lengths)
        return plan_flex(image, number, image, noise, num_documents=count, num_images=count)

    def bucket(tokens: Tensor, valid: Tensor) -> Bucket:
        if valid.all():
            return Bucket(tuple(tokens.shape))
        alone = torch.eye(tokens.shape[1], dtype=torch.bool, device=device)
        return Bucket(tuple(tokens.shape), (valid[:, None, :] | alone)[:, None])

    return plan_sdpa(lengths, device, None, bucket)


BucketOf = Callable[[Tensor, Tensor], Bucket]
"""(token numbers [B, N], which of them are real [B, N]) -> the bucket."""


def plan_sdpa(lengths: Sequence[int], device: torch.device, row_of: Tensor | None, bucket_of: BucketOf) -> SDPAPlan:
    """Documents of these lengths in buckets. ``row_of``: as of ``plan_attention``."""
    starts = [0, *accumulate(lengths)]
    # on the CPU, where the lengths are: a device would be waited for
    buckets, slots, num_slots = [], torch.empty(starts[-1], dtype=torch.int64), 0
    for members in _group(lengths):
        longest = lengths[members[0]]
        start = torch.tensor([starts[m] for m in members])[:, None]
        size = torch.tensor([lengths[m] for m in members])[:, None]
        offset = torch.arange(longest)[None]
        valid = offset < size  # [B, N]
        tokens = torch.where(valid, start + offset, start)
        buckets.append(bucket_of(to_device(tokens, device), to_device(valid, device)))
        slots[tokens[valid]] = num_slots + valid.flatten().nonzero().squeeze(1)
        num_slots += valid.numel()
    if row_of is not None:
        slots = torch.empty_like(slots).index_copy(0, row_of.cpu(), slots)
    in_order = num_slots == len(slots) and bool((slots[1:] > slots[:-1]).all())
    return SDPAPlan(tuple(buckets), None if in_order else to_device(slots, device))


def _group(lengths: Sequence[int]) -> list[list[int]]:
    """Document numbers, longest first, in groups split where padding would waste too much."""
    groups: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        if groups and lengths[number] >= _MIN_FILL * lengths[groups[-1][0]]:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups
