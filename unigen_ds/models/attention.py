"""Attention from a description of the sequence (document, split, mode), not from a mask.

``plan_attention`` is called once per micro-batch; every layer then calls the plan with its queries, keys, values. On
CUDA the plan is FlexAttention, one fused kernel over the whole micro-batch. Elsewhere it is SDPA, bucket by bucket:
documents of similar length are padded into one batch, so the cost follows the documents (sum of length squared), not
the square of the micro-batch: 64 samples of 25 tokens cost 40 k scores per head instead of 2.6 M. Text alone needs no
mask: it is causal, and padding follows it.

What a token attends to inside a document (BAGEL's rules): all earlier positions; all positions of its own image split;
but positions of a NOISE split only where it is its own split.

Shape suffixes: T tokens, P positions of whole blocks, H heads, E head width, B documents of a bucket, N padded length.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from unigen_ds.core.batch import CAUSAL, NOISE, PackedBatch, to_device

_LEAST_SHARE = 0.75
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(queries, keys, values) of the present tokens -> what they attend to; every layer calls it once, in order. A model's
argument ``attend`` replaces the attention within the batch: for inference on top of cached tokens."""

BLOCK = 128
"""Positions of a side of a block, FlexAttention's default. Padding to whole ones also saves bounds checks."""


@dataclass(frozen=True)
class Bucket:
    """Documents attended together, padded to one length."""

    shape: tuple[int, ...]
    mask: Tensor | None = None
    """[B, 1, N, N] bool, true where a row may look; None: a row sees all; with ``is_causal``, not what follows."""
    is_causal: bool = False


@dataclass(frozen=True)
class SDPAPlan:
    buckets: tuple[Bucket, ...]
    slot_T: Tensor | None
    """Index of each token in the concatenated buckets; None: the buckets have the tokens in their order."""

    def __call__(self, q_THE: Tensor, k_THE: Tensor, v_THE: Tensor) -> Tensor:
        """``[T, H, E]`` each (k and v may have fewer heads, a divisor) -> ``[T, H, E]``."""
        groups = q_THE.shape[1] // k_THE.shape[1]
        if not self.buckets:  # no token at all: keep the graph, so that every parameter gets a (zero) gradient
            return q_THE + 0.0 * (k_THE + v_THE).repeat_interleave(groups, 1)
        sizes = [rows * length for rows, length in (bucket.shape for bucket in self.buckets)]
        qkv_THE: tuple[Tensor, ...] = (q_THE, k_THE, v_THE)
        if self.slot_T is not None:
            qkv_THE = tuple(x.new_zeros((sum(sizes), *x.shape[1:])).index_copy(0, self.slot_T, x) for x in qkv_THE)
        queries, keys, values = (x.split(sizes) for x in qkv_THE)
        parts = []
        for bucket, *qkv in zip(self.buckets, queries, keys, values, strict=True):
            q, k, v = (x.unflatten(0, bucket.shape).transpose(1, 2) for x in qkv)
            if groups > 1:
                k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bucket.mask, is_causal=bucket.is_causal)
            parts.append(out.transpose(1, 2).flatten(0, 1))
        out_THE = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out_THE if self.slot_T is None else out_THE.index_select(0, self.slot_T)


@dataclass(frozen=True)
class FlexPlan:
    block_mask: BlockMask
    attention: Callable[..., Tensor]

    def __call__(self, q_THE: Tensor, k_THE: Tensor, v_THE: Tensor) -> Tensor:
        """``[T, H, E]`` each (k and v may have fewer heads, a divisor) -> ``[T, H, E]``."""
        num_tokens, _, width = q_THE.shape
        wide = max(width, 16)  # the kernels' lower limit: narrower heads are filled up with zeros
        if wide > width:
            q_THE = q_THE * math.sqrt(wide / width)  # the kernel divides by the root of the width that it sees
        fill = (0, wide - width, 0, 0, 0, self.block_mask.shape[-1] - num_tokens)
        q, k, v = (F.pad(x, fill).transpose(0, 1)[None] for x in (q_THE, k_THE, v_THE))
        out = self.attention(q, k, v, block_mask=self.block_mask, enable_gqa=True)
        return out[0].transpose(0, 1)[:num_tokens, :, :width]


AttentionPlan = SDPAPlan | FlexPlan


def plan_attention(batch: PackedBatch, row_of: Tensor | None = None, *, use_flex: bool | None = None) -> AttentionPlan:
    """Plan for the language model. ``row_of[t]``: the row of token ``t`` in the hidden states; None: row ``t``.
    ``use_flex``: FlexAttention or SDPA; None: by the batch's device.
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
        other_noise = (mode == NOISE)[:, None, :] & ~same
        alone = torch.eye(length, dtype=torch.bool, device=device)  # padding rows: something to look at
        return Bucket(tuple(tokens.shape), ((visible & ~other_noise & valid[:, None, :]) | alone)[:, None])

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


def plan_sdpa(
    lengths: Sequence[int], device: torch.device, row_of: Tensor | None, bucket_of: Callable[[Tensor, Tensor], Bucket]
) -> SDPAPlan:
    """Documents of these lengths in buckets. ``row_of``: as of ``plan_attention``; ``bucket_of``: (token numbers
    [B, N], which of them are real [B, N]) -> the bucket.
    """
    starts = [0, *accumulate(lengths)]
    groups: list[list[int]] = []  # document numbers, longest first, divided where padding would waste too much
    for number in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        if groups and lengths[number] >= _LEAST_SHARE * lengths[groups[-1][0]]:  # it fills most of its padded length
            groups[-1].append(number)
        else:
            groups.append([number])
    # on the CPU, where the lengths are: a device would be waited for
    buckets, slots, num_slots = [], torch.empty(starts[-1], dtype=torch.int64), 0
    for members in groups:
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


# FlexAttention: blocks of 128 x 128 positions without a visible pair are never computed, and those without a hidden one
# skip the mask. The documents and images in each block decide which blocks these are (two small products of tables; the
# mask of 32 k tokens would have a billion entries), without waiting for the device. Positions may be in any order.


def plan_flex(
    document: Tensor, number: Tensor, image: Tensor, noise: Tensor, *, num_documents: int, num_images: int
) -> FlexPlan:
    """Plan from what is at each of the ``T`` positions.

    Args:
        document: which document, from 0 to ``num_documents`` - 1.
        number: the token's number; a position attends to lower ones of its document, and to itself.
        image: which split, below ``num_images``, where all of its positions attend to each other; -1 elsewhere.
        noise: whether only its own split attends to it.
    """
    padding = -len(document) % BLOCK or BLOCK * (not len(document))
    document = F.pad(document.int(), (0, padding), value=num_documents)  # padding is a document of its own
    number = F.pad(number.int(), (0, padding))
    image = F.pad(image.int(), (0, padding), value=-1)
    # the document whose tokens attend to a position by its number
    seen_by = document.masked_fill(F.pad(noise, (0, padding)), -1)

    def visible(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        causal = (document[q] == seen_by[k]) & (number[q] >= number[k])
        return causal | ((image[q] == image[k]) & (image[k] >= 0))

    documents, images = _Blocks.of(document, num_documents + 1), _Blocks.of(image, num_images)
    seen_bys = _Blocks.of(seen_by, num_documents + 1)
    first, last = number.unflatten(0, (-1, BLOCK)).aminmax(dim=1)
    some = documents.meets(seen_bys) & (last[:, None] >= first) | images.meets(images)
    every = documents.equals(seen_bys) & (first[:, None] >= last) | images.equals(images)
    mask = BlockMask.from_kv_blocks(*_kv_lists(some & ~every), *_kv_lists(every), BLOCK_SIZE=BLOCK, mask_mod=visible)
    # on a CPU the dense reference, for tests
    return FlexPlan(mask, compiled_attention() if document.is_cuda else flex_attention)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Blocks:
    """Which of the values from 0 on occur in each block; negative ones are ignored."""

    table: Tensor
    """[blocks, values] 1 where it occurs."""
    value: Tensor
    """[blocks] where it fills the whole block, else -1."""

    @classmethod
    def of(cls, x_P: Tensor, num_values: int) -> _Blocks:
        blocks = x_P.unflatten(0, (-1, BLOCK))
        low, high = blocks.aminmax(dim=1)
        table = torch.zeros(len(blocks), 1 + num_values, device=x_P.device).scatter_(1, 1 + blocks.long(), 1.0)
        return cls(table[:, 1:], low.where(low == high, -1))

    def meets(self, other: _Blocks) -> Tensor:
        """A row for each block of ``self``, a column for each of ``other``: whether they have a value in common."""
        return self.table @ other.table.T > 0

    def equals(self, other: _Blocks) -> Tensor:
        """Whether one value fills both."""
        return (self.value[:, None] == other.value) & (other.value >= 0)


def _kv_lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """A table of blocks as FlexAttention accepts it: how many each row has, and their columns, those first."""
    columns = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], columns.int()[None, None]


VARIANTS = 64
"""Compiled variants of the one function: its graph depends on heads, dtype and whether gradients are kept, so a ViT and
a language model in training and evaluation need several; not on lengths, but for those of a single block. torch's own
limit is 8, after which it would run the dense reference without a message."""


@cache
def compiled_attention(**options: Any) -> Callable[..., Tensor]:
    """FlexAttention, compiled for any number of tokens; beyond ``VARIANTS`` torch raises instead of running uncompiled
    (``fullgraph``). ``options``: another backend, for tests.
    """
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options |= {"recompile_limit": VARIANTS, "isolate_recompiles": True}
    else:  # an older torch has one limit for the whole process
        torch._dynamo.config.cache_size_limit = max(VARIANTS, torch._dynamo.config.cache_size_limit)
    return torch.compile(flex_attention, dynamic=True, fullgraph=True, **options)
