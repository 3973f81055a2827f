"""Attention by documents: both plans compared with one dense mask of the rules; the cost of the plans."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
import torch.nn.attention.flex_attention
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask

from tests.models.batches import packed, random_documents
from unigen_ds.core.batch import CAUSAL, FULL, NOISE, PackedBatch
from unigen_ds.data.order.packing import BestFitPacking
from unigen_ds.models.attention import (
    BLOCK,
    VARIANTS,
    AttentionPlan,
    FlexPlan,
    SDPAPlan,
    compiled_attention,
    plan_attention,
    plan_full_attention,
)

TEXT_ALONE = [[(CAUSAL, 9)], [(CAUSAL, 4), (CAUSAL, 5)], [(CAUSAL, 2)], [(CAUSAL, 1)]]
ONE_DOCUMENT = [[(CAUSAL, 5), (FULL, 6), (NOISE, 4), (CAUSAL, 3), (NOISE, 4)]]
CASES = {
    "all modes": random_documents(0, 9),
    "all modes, beyond a block": random_documents(1, 12, longest=22),
    "text alone": TEXT_ALONE,
    "one document": ONE_DOCUMENT,
    "equal lengths": [[(CAUSAL, 3), (FULL, 4)]] * 4,
    "nothing": [],
}
Heads = tuple[int, int, int]
"""Query heads, key and value heads, head width."""
HEADS: Heads = (6, 2, 16)


@pytest.fixture(autouse=True)
def _flex_backward_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses it, as its fused kernels have no backward pass there; its dense reference has one."""
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *_: None)


def shuffled(number: int) -> Tensor:
    return torch.randperm(number, generator=torch.Generator().manual_seed(3))


def visibility(batch: PackedBatch) -> Tensor:
    """``[T, T]``: the rules for each pair of positions: the row attends to the column."""
    modes = batch.split_modes[batch.split_ids].tolist()
    documents, splits = batch.document_ids.tolist(), batch.split_ids.tolist()
    table = torch.zeros(len(modes), len(modes), dtype=torch.bool)
    for q in range(len(modes)):
        for k in range(len(modes)):
            if documents[q] != documents[k]:
                continue
            same = splits[q] == splits[k]
            if modes[k] == NOISE:
                table[q, k] = same
            else:
                table[q, k] = k <= q or (same and modes[k] == FULL)
    return table


def inputs(number: int, heads: Heads = HEADS, *, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads, width = heads
    shapes = [(number, num_heads, width), *[(number, num_kv_heads, width)] * 2]
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("qhe,khe->hqk", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("hqk,khe->qhe", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


def outcome(attend, tensors: list[Tensor]) -> list[Tensor]:
    """Output, and the gradients of a loss with a different weight for every number of the output."""
    out = attend(*tensors)
    weight = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), tensors)]


def assert_same(plan: AttentionPlan, tensors: list[Tensor], mask: Tensor) -> None:
    expected = outcome(lambda q, k, v: dense(q, k, v, mask), tensors)
    for ours, theirs in zip(outcome(plan, tensors), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("use_flex", [False, True], ids=["sdpa", "flex"])
@pytest.mark.parametrize("moved", [False, True], ids=["in order", "moved"])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_the_rules(case: str, moved: bool, use_flex: bool) -> None:
    batch = packed(CASES[case])
    index_of = shuffled(batch.num_tokens) if moved else None
    plan = plan_attention(batch, index_of, use_flex=use_flex)
    assert isinstance(plan, FlexPlan if use_flex else SDPAPlan)
    mask = visibility(batch)
    if index_of is not None:
        token = torch.argsort(index_of)
        mask = mask[token][:, token]
    assert_same(plan, inputs(batch.num_tokens), mask)


@pytest.mark.parametrize("use_flex", [False, True], ids=["sdpa", "flex"])
@pytest.mark.parametrize("lengths", [(4, 4, 4), (5, 9, 8, 1), (), (1,)])
def test_full_attention(lengths: tuple[int, ...], use_flex: bool) -> None:
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    plan = plan_full_attention(lengths, torch.device("cpu"), use_flex=use_flex)
    assert_same(plan, inputs(sum(lengths)), number[:, None] == number)


@pytest.mark.parametrize("heads", [(4, 4, 8), (4, 1, 8), (15, 5, 64)], ids=str)
def test_heads_of_any_number_and_width(heads: Heads) -> None:
    """Narrower than FlexAttention's kernels support; groups of three, as in SmolLM2."""
    batch = packed(CASES["all modes"])
    for use_flex in (False, True):
        assert_same(plan_attention(batch, use_flex=use_flex), inputs(batch.num_tokens, heads), visibility(batch))


@pytest.mark.parametrize("moved", [False, True], ids=["in order", "in expert order"])
@pytest.mark.parametrize(("number", "longest"), [(12, 25), (12, 220), (50, 30)])
def test_blocks_that_flex_attention_computes(number: int, longest: int, moved: bool) -> None:
    """As torch's own, made from the whole mask; on a CPU the kernel does not use them, so no other test sees them."""
    batch = packed(random_documents(number, number, longest=longest))
    noise_mask = batch.split_modes[batch.split_ids] == NOISE
    index_of = torch.argsort(torch.argsort(noise_mask.int(), stable=True)) if moved else None
    plan = plan_attention(batch, index_of, use_flex=True)
    assert isinstance(plan, FlexPlan)
    mask = plan.block_mask
    exact = create_block_mask(mask.mask_mod, None, None, *mask.shape[-2:], device="cpu", BLOCK_SIZE=BLOCK)
    side = mask.shape[-1] // BLOCK
    assert side >= 2 and mask.shape[-1] - batch.num_tokens < BLOCK

    def table(number: Tensor | None, columns: Tensor | None) -> Tensor:
        assert number is not None and columns is not None
        blocks = torch.zeros(side, side, dtype=torch.bool)
        for row in range(side):
            blocks[row, columns[0, 0, row, : int(number[0, 0, row])].long()] = True
        return blocks

    ours = table(mask.full_kv_num_blocks, mask.full_kv_indices), table(mask.kv_num_blocks, mask.kv_indices)
    theirs = table(exact.full_kv_num_blocks, exact.full_kv_indices), table(exact.kv_num_blocks, exact.kv_indices)
    assert not (ours[0] & ours[1]).any(), "a block computed twice"
    assert not (ours[0] & ~theirs[0]).any(), "unmasked, but it has a hidden pair"
    assert not ((theirs[0] | theirs[1]) & ~(ours[0] | ours[1])).any(), "missing, but it has a visible pair"
    count, least = ((full | partial).sum().item() for full, partial in (ours, theirs))
    print(f"{count} of {side**2} blocks, {least} needed; {ours[0].sum()} of {theirs[0].sum()} without a mask")
    assert count <= 1.3 * least


def long_tailed(number: int) -> list[int]:
    draw = random.Random(0)
    return [min(1000, int(draw.lognormvariate(4.5, 0.9)) + 8) for _ in range(number)]


@pytest.mark.slow
def test_the_compiled_function_serves_all_that_a_run_asks_of_it() -> None:
    """More variants than torch's own limit of 8, beyond which it would run uncompiled without a message."""
    torch._dynamo.reset()  # without this, graphs compiled by another test would be used
    compiled = compiled_attention(backend="aot_eager")
    before = counters["stats"]["unique_graphs"]
    lengths = [max(2, n % 60) for n in long_tailed(64)]
    rows = BestFitPacking().plan(lengths, [0] * len(lengths), 200, 0)
    texts = [[lengths[i] for i in row] for row in (rows[0], rows[1], rows[-1][:2])]
    language = [plan_attention(packed([[(CAUSAL, n)] for n in row]), use_flex=True) for row in texts]
    patches = [(16,) * 9, (40, 70, 90), (4,)]
    vision = [plan_full_attention(sizes, torch.device("cpu"), use_flex=True) for sizes in patches]
    for dtype, grad in ((torch.float32, True), (torch.float32, False), (torch.bfloat16, False)):
        for heads, plans in ((HEADS, language), ((4, 4, 24), vision)):
            for plan in plans:
                assert isinstance(plan, FlexPlan)
                number = plan.block_mask.shape[-1] - 1
                tensors = [x.detach().to(dtype).requires_grad_(grad) for x in inputs(number, heads)]
                with torch.set_grad_enabled(grad):
                    assert dataclasses.replace(plan, attention=compiled)(*tensors).shape == tensors[0].shape
    variants = counters["stats"]["unique_graphs"] - before
    print(f"{variants} variants")
    assert 8 < variants <= VARIANTS / 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(4, 2, 8), (6, 2, 64), (4, 4, 72)], ids=str)
def test_the_compiled_kernel_on_cuda(heads: Heads, dtype: torch.dtype) -> None:
    """Several micro-batches, so that the kernel compiled for one serves another size, and an empty one."""
    bound = 2e-2 if dtype == torch.bfloat16 else 2e-3
    for number in (30, 7, 61, 0):
        batch = packed(random_documents(number, number, longest=60)).to("cuda")
        index_of = shuffled(batch.num_tokens).cuda()
        tensors = [x.detach().to("cuda", dtype).requires_grad_() for x in inputs(batch.num_tokens, heads)]
        flex, sdpa = (plan_attention(batch, index_of, use_flex=choice) for choice in (None, False))
        assert isinstance(flex, FlexPlan)
        for ours, theirs in zip(outcome(flex, tensors), outcome(sdpa, tensors), strict=True):
            assert (ours - theirs).float().norm() <= bound * theirs.float().norm()
