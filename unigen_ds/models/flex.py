"""FlexAttention over a whole micro-batch, from three numbers of every position: for CUDA, where it is one fused kernel.

Blocks of 128 x 128 positions without a visible pair are never computed, and those without a hidden one skip the mask,
so the cost follows the documents. The documents and images in each block decide which blocks these are (two small
products of tables; the mask of 32 k tokens would have a billion entries), without waiting for the device. Positions may
be in any order.

Shape suffixes: P positions, padded to whole blocks, H heads, E head width.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128
"""Positions of a side of a block, FlexAttention's default. Padding to whole ones also saves bounds checks."""
_MIN_HEAD_WIDTH = 16
"""The kernels' lower limit; narrower heads are filled up with zeros."""


@dataclass(frozen=True)
class FlexPlan:
    """Calls FlexAttention with one block mask."""

    block_mask: BlockMask
    attention: Callable[..., Tensor]

    def __call__(self, q_THE: Tensor, k_THE: Tensor, v_THE: Tensor) -> Tensor:
        """``[T, H, E]`` each (k and v may have fewer heads, a divisor) -> ``[T, H, E]``."""
        num_tokens, _, width = q_THE.shape
        wide = max(width, _MIN_HEAD_WIDTH)
        if wide > width:
            q_THE = q_THE * math.sqrt(wide / width)  # the kernel divides by the root of the width that it sees
        fill = (0, wide - width, 0, 0, 0, self.block_mask.shape[-1] - num_tokens)
        q, k, v = (F.pad(x, fill).transpose(0, 1)[None] for x in (q_THE, k_THE, v_THE))
        out = self.attention(q, k, v, block_mask=self.block_mask, enable_gqa=True)
        return out[0].transpose(0, 1)[:num_tokens, :, :width]


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
    mask = BlockMask.from_kv_blocks(*_listed(some & ~every), *_listed(every), BLOCK_SIZE=BLOCK, mask_mod=visible)
    return FlexPlan(mask, _attention(document.is_cuda))


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


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """A table of blocks as FlexAttention accepts it: how many each row has, and their columns, those first."""
    columns = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], columns.int()[None, None]


VARIANTS = 64
"""Compiled variants of the one function: its graph depends on heads, dtype and whether gradients are kept, so a ViT and
a language model in training and evaluation need several; not on lengths, but for those of a single block. torch's own
limit is 8, after which it would run the dense reference without a message."""


@cache
def _attention(compiled: bool) -> Callable[..., Tensor]:
    """Compiled at the first plan on CUDA, for any number of tokens; on a CPU the dense reference, for tests.

    ``fullgraph``: beyond ``VARIANTS`` torch raises instead of running uncompiled.
    """
    attention: Callable[..., Any] = flex_attention
    return compile_attention(attention) if compiled else attention


def compile_attention(attention: Callable[..., Any], **options: Any) -> Callable[..., Tensor]:
    """``torch.compile`` with our settings; ``options``: another backend, for tests."""
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options |= {"recompile_limit": VARIANTS, "isolate_recompiles": True}
    else:  # an older torch has one limit for the whole process
        torch._dynamo.config.recompile_limit = max(VARIANTS, torch._dynamo.config.recompile_limit)
    return torch.compile(attention, dynamic=True, fullgraph=True, **options)
