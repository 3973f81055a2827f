"""What may be done with parameters under every engine: non-finite gradients, freezing, tying, groups, recomputation."""

from __future__ import annotations

import pytest
import torch

from tests.end_to_end.engines.jobs import cases
from tests.end_to_end.engines.jobs.groups import GROUPS
from tests.end_to_end.engines.launch import metric_deviation, tensors, unequal, want, weight_deviation

runs = want("faulty", "packed", "odd", "recompute")
pytestmark = pytest.mark.timeout(3600)


def names(group: str) -> list[str]:
    return [job.name for job in GROUPS[group](full=False)]


@pytest.mark.parametrize("name", names("faulty"))
def test_a_gradient_that_is_not_finite_on_one_rank_changes_nothing(name):
    """Skipped on all ranks: weights, moments, steps, buffers and the average are those of the checkpoint before."""
    run = runs().outcome(name)
    assert [line["applied"] for line in run.lines] == [u != cases.BAD_UPDATE for u in range(1, cases.BAD_UPDATES + 1)]
    first = cases.BAD_UPDATE - 1
    before, after, later = (tensors(run.folder / f"iter_{2 * u}.pth") for u in range(first, first + 3))
    assert unequal(before, after) == []
    assert len(unequal(after, later)) > 0.9 * len(after) / 2


@pytest.mark.parametrize("name", [n for n in names("faulty") if n.endswith("fp32")])
def test_training_goes_on_as_if_the_bad_update_had_not_been(name):
    """Nothing of it is left in an accumulation buffer: all later updates are those of one process."""
    run, single = runs().outcome(name), runs().outcome("faulty/single@1-fp32")
    good = [line["update"] for line in run.lines if line["applied"]]
    assert len(good) == cases.BAD_UPDATES - 1
    for a, b in zip(run.lines, single.lines, strict=True):
        if a["applied"]:
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)
    assert weight_deviation(run.final, single.final).relative_l2 <= 1e-5


def test_packed_weights_under_every_engine():
    """Saved by each engine and resumed by the next: packed bytes never change, losses are those of one process."""
    run, single = runs().outcome("packed/engines"), runs().outcome("packed/single")
    expected = {key: tensor for key, tensor in single.final.items() if key[0] == "buffer"}
    assert {tensor.dtype for tensor in expected.values()} == {torch.uint8, torch.int8, torch.int32}
    assert len(run.checkpoints) == len(cases.PACKED_CHAIN)
    for checkpoint in run.checkpoints:
        state = tensors(checkpoint)
        assert all(torch.equal(state[key], tensor) for key, tensor in expected.items()), checkpoint
        assert not any(key[1].endswith("q_proj.weight") for key in state)
    fp32 = cases.PACKED_UPDATES * sum(precision == "fp32" for _, precision in cases.PACKED_CHAIN)
    assert metric_deviation(run, single, updates=fp32) <= 1e-5
    assert 1e-5 < metric_deviation(run, single, after=fp32) < 0.1
    assert any(not torch.equal(single.final["master", name], t.flatten()) for name, t in single.initial.items()
               if name.startswith("connector."))  # fmt: skip


@pytest.mark.parametrize("name", [n for n in names("odd") if not n.endswith("-resumed")])
def test_a_users_own_model_with_tied_weights_and_two_groups(name):
    """Odd sizes that no process count divides, a tied head, a frozen tower, a buffer, two parameter groups."""
    run, single = runs().outcome(name), runs().outcome("odd/single@1")
    assert metric_deviation(run, single) <= 1e-5
    assert weight_deviation(run.final, single.final).relative_l2 <= 1e-5
    assert {line["lr/connector"] for line in run.lines} == {5e-3} and {line["lr"] for line in run.lines} == {cases.LR}
    assert run.final["buffer", "gain"].tolist() == [0.5, 1.5, 2.5]
    assert int(run.final["buffer", "calls"]) == 2 * cases.ODD_UPDATES
    assert ("master", "head.weight") not in run.final and ("master", "emb.weight") in run.final
    for parameter in ("frozen.0.weight", "frozen.1.bias"):
        assert torch.equal(run.final["master", parameter].flatten(), run.initial[parameter].flatten())


@pytest.mark.parametrize("name", sorted({n.rpartition("-")[0] for n in names("recompute")}))
def test_activation_checkpointing_changes_nothing(name):
    """Dropout included: the recomputed forward draws the same numbers."""
    off, on = (runs().outcome(f"{name}-{value}") for value in (False, True))
    assert metric_deviation(on, off) <= 1e-6
    assert weight_deviation(on.final, off.final).relative_l2 <= 1e-6
