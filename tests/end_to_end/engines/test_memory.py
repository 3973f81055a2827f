"""Per rank: the bytes of all live tensors, counted, against what ZeRO's and FSDP's formulas promise."""

from __future__ import annotations

import pytest

from tests.end_to_end.engines import cases
from tests.end_to_end.engines.formula import expected
from tests.end_to_end.engines.launch import want
from tests.tiny import tiny_config
from unigen_ds.checks.memory.planned import plan_memory

runs = want("memory")
pytestmark = pytest.mark.timeout(3600)

SLACK = 200_000
"""Bytes: two communication buckets of 80 kB, of weights of 6 MB; and 3 % for padding and whole rows (FSDP)."""
NAMES = [job.name for job in cases.memory(full=False)]


def close(counted: float, formula: float) -> bool:
    return 0.98 * formula <= counted <= 1.03 * formula + SLACK


def parse(name: str) -> tuple[str, int, str]:
    engine, _, rest = name.removeprefix("memory/").partition("@")
    world, _, precision = rest.partition("-")
    return engine, int(world), precision


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_holds_what_the_formula_says(name):
    engine, world, precision = parse(name)
    ranks = runs().outcome(name).memory()
    assert len(ranks) == world
    for counted in ranks:
        sizes = {key: counted[key] for key in ("trainable", "frozen", "largest")}
        formula = expected(engine, world, precision, **sizes)
        assert close(counted["total"], formula.total), (counted, formula)


@pytest.mark.parametrize("name", [n for n in NAMES if "offload" not in n and "zero3" not in n])
def test_each_part_is_what_the_formula_says(name):
    """ZeRO-3 and offload reserve their gradients' memory at the start: there only the sum can be told."""
    engine, world, precision = parse(name)
    for counted in runs().outcome(name).memory():
        sizes = {key: counted[key] for key in ("trainable", "frozen", "largest")}
        formula = expected(engine, world, precision, **sizes)
        assert close(counted["parameters"], formula.parameters), (counted, formula)
        assert close(max(counted["sharded"], counted["gradients"]), formula.gradients), (counted, formula)
        assert close(counted["optimizer"], formula.optimizer), (counted, formula)


def test_the_ranks_together_hold_one_model():
    """Optimizer state is nowhere twice: the ranks' parts add up to one process's."""
    (single,) = runs().outcome("memory/single@1-fp32").memory()
    for engine in ("zero1", "zero2", "zero3", "FULL_SHARD", "SHARD_GRAD_OP"):
        ranks = runs().outcome(f"memory/{engine}@2-fp32").memory()
        assert sum(m["optimizer"] for m in ranks) == pytest.approx(single["optimizer"], rel=0.01)


def test_shard_grad_op_keeps_weights_gathered_for_the_backward_pass_and_full_shard_does_not():
    kept, freed = (runs().outcome(f"memory/{name}@2-fp32").memory() for name in ("SHARD_GRAD_OP", "FULL_SHARD"))
    for with_weights, without in zip(kept, freed, strict=True):  # both have the same activations
        whole = 4 * (without["trainable"] + without["frozen"])
        assert with_weights["gathered"] - without["gathered"] == pytest.approx(whole, rel=0.03)
        assert without["gathered"] < whole / 4


def test_hybrid_shard_holds_one_part_in_num_shard():
    """On 4 processes in groups of 2: half of the state of one process, not a quarter."""
    (single,) = runs().outcome("memory/single@1-fp32").memory()
    ranks = runs().outcome("memory/HYBRID_SHARD@4-fp32").memory()
    assert len(ranks) == 4
    for counted in ranks:
        assert counted["optimizer"] == pytest.approx(single["optimizer"] / 2, rel=0.03)


@pytest.mark.parametrize("engine", ["zero2"])
def test_a_plan_is_what_is_counted(engine, tmp_path):
    """``checks/memory/`` on the same config: the highest sum of tensor bytes of any rank, and what is held between
    updates.

    ZeRO-2's last rank begins to keep gradients while the activations of all layers are there, so it is planned, too.
    Every engine and three models: ``benchmarks/plan_memory.py``.
    """
    job = next(job for job in cases.memory(full=False) if job.name == f"memory/{engine}@2-fp32")
    counted = runs().outcome(job.name).counted()
    source = {"type": "UnifiedGenerationDataset", "data_path": str(runs().out / "data" / job.phases[0].data)}
    given = {**job.phases[0].config, "train_dataloader__dataset": source, "train_cfg__max_epochs": 2}
    config = tiny_config(tmp_path, runs().out, **{**given, "custom_hooks": []})
    (plan,) = plan_memory(config, world_size=2, alternatives=False).plans
    assert plan.problem is None and plan.traced is not None
    assert 0.98 <= plan.traced.peak["step"] / max(rank["peak"] for rank in counted) <= 1.05
    assert plan.traced.held == pytest.approx(max(rank["held"] for rank in counted), rel=0.005)
    assert plan.traced.masters == pytest.approx(2 * plan.traced.trainable, rel=0.01)
    first, last = plan.ranks[0], plan.ranks[1]
    assert plan.traced.peak["step"] == last > first and len(plan.ranks) == 2
