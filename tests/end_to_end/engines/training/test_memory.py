"""Per rank: the bytes of all live tensors, counted, against what ZeRO's and FSDP's formulas promise."""

from __future__ import annotations

import pytest

from tests.end_to_end.engines.jobs import cases
from tests.end_to_end.engines.launch import want
from tests.tiny import tiny_config
from unigen_ds.checks.memory.planned import plan_memory

runs = want("memory")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SLACK = 200_000
"""Bytes: two communication buckets of 80 kB, of weights of 6 MB; and 3 % for padding and whole rows (FSDP)."""


def expected(engine: str, world: int, trainable: int, frozen: int) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer state of a rank, in fp32; ZeRO-1's gradients are whole at first."""
    t, f = 4.0 * trainable, 4.0 * frozen
    if engine in ("single", "zero1", "zero2"):
        masters = 0.0 if engine == "single" else t / world
        return t + f + masters, t / world if engine == "zero2" else t, 2 * t / world
    shared = 2 if engine == "HYBRID_SHARD" else world
    return (t + f + t * (engine == "zero3")) / shared, t / shared, 2 * t / shared


@pytest.mark.parametrize(("engine", "world"), cases.MEMORY)
def test_each_part_is_what_the_formula_says(engine, world):
    """ZeRO-3 reserves its gradients' memory at the start: there only the sum can be told."""
    ranks = runs().outcome(f"memory/{engine}@{world}").memory()
    assert len(ranks) == world
    for rank in ranks:
        formula = expected(engine, world, rank["trainable"], rank["frozen"])
        sizes = (rank["parameters"], max(rank["sharded"], rank["gradients"]), rank["optimizer"])
        parts = [*zip(sizes, formula, strict=True)] if engine != "zero3" else []
        for size, formula_size in (*parts, (sum(sizes), sum(formula))):
            assert 0.98 * formula_size <= size <= 1.03 * formula_size + SLACK, (rank, formula)


def test_shard_grad_op_keeps_weights_gathered_for_the_backward_pass_and_full_shard_does_not():
    grad_op, full = (runs().outcome(f"memory/{name}@2").memory() for name in ("SHARD_GRAD_OP", "FULL_SHARD"))
    for with_weights, without in zip(grad_op, full, strict=True):  # both have the same activations
        whole = 4 * (without["trainable"] + without["frozen"])
        assert with_weights["gathered"] - without["gathered"] == pytest.approx(whole, rel=0.03)
        assert without["gathered"] < whole / 4


@pytest.mark.slow
def test_a_plan_is_what_is_counted(tmp_path):
    """``checks/memory/`` on the same config: the highest sum of tensor bytes of any rank, and what is held between
    updates.

    ZeRO-2's last rank begins to keep gradients while all activations are there. More: ``benchmarks/plan_memory.py``.
    """
    job = next(job for job in cases.memory() if job.name == "memory/zero2@2")
    ranks = runs().outcome(job.name).counted_bytes()
    source = {"type": "UnifiedGenerationDataset", "data_path": str(runs().out / "data" / job.phases[0].data)}
    options = {**job.phases[0].config, "train_dataloader__dataset": source, "train_cfg__max_epochs": 2}
    config = tiny_config(tmp_path, runs().out, **{**options, "custom_hooks": []})
    (plan,) = plan_memory(config, world_size=2, alternatives=False).plans
    assert plan.problem is None and plan.memory is not None
    assert 0.98 <= plan.memory.peak["step"] / max(rank["peak"] for rank in ranks) <= 1.05
    assert plan.memory.held == pytest.approx(max(rank["held"] for rank in ranks), rel=0.005)
    assert plan.memory.masters == pytest.approx(2 * plan.memory.trainable, rel=0.01)
    first, last = plan.ranks[0], plan.ranks[1]
    assert plan.memory.peak["step"] == last > first and len(plan.ranks) == 2
