"""Any checkpoint into any engine at any process count: what is loaded is saved again at once and compared bit by bit;
then five further updates against a run that was never stopped.

The model has tied weights, a frozen tower, odd sizes, two groups and buffers. All 72 pairs: ``make matrix``.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.end_to_end.engines.jobs import cases
from tests.end_to_end.engines.launch import Tensors, metric_deviation, tensors, unequal, want, weight_deviation
from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.core.shards import LOSS_SCALE
from unigen_ds.optim.optimizer import LossScale

runs = want("elastic")
pytestmark = pytest.mark.timeout(3600)

BOUND = 1e-5
JOBS = [job for job in cases.elastic(full=False) if job.resumes]
PAIRS = [job.name for job in JOBS if "/fp32-" in job.name]
BF16 = [job.name for job in JOBS if "/bf16-" in job.name]
FP16 = [job.name for job in JOBS if "/fp16-" in job.name]
RESUMES = {job.name: job.resumes for job in JOBS}


def saved_and_loaded(name: str) -> tuple[Tensors, Tensors]:
    """Every tensor as the one engine saved it, and as the other had it before its first update."""
    return runs().outcome(RESUMES[name]).final, tensors(runs().outcome(name).folder / "loaded.pth")


def trained_names(name: str) -> list[str]:
    """Names of the parameters that are not frozen: they have moments."""
    return sorted(tensor for kind, tensor in saved_and_loaded(name)[0] if kind == "exp_avg")


@pytest.mark.parametrize("name", PAIRS)
def test_every_tensor_arrives_bit_equal_by_name(name):
    before, after = saved_and_loaded(name)
    assert unequal(before, after) == []
    kinds = Counter(kind for kind, _ in after)
    number = len(trained_names(name))
    assert kinds == {
        "master": number + 4,
        "buffer": 2,
        **dict.fromkeys(("exp_avg", "exp_avg_sq", "step", "ema"), number),
    }
    assert {float(value) for (kind, _), value in after.items() if kind == "step"} == {float(cases.ELASTIC_SAVED)}


@pytest.mark.parametrize("name", sorted({RESUMES[name] for name in RESUMES}))
def test_the_consolidated_files_beside_the_engines_have_the_same_bits(name):
    """``form='both'``: ``full/`` is a checkpoint of its own, also of a half-precision run with its loss scale."""
    checkpoint = runs().outcome(name).checkpoints[-1]
    manifest = Manifest.read(checkpoint)
    inside = [entry.path for entry in manifest.files if entry.path.startswith("full/")]
    if manifest.layout == "safetensors":  # of one process: it is consolidated already
        assert inside == [] and not (checkpoint / "full").exists()
        return
    whole = Manifest.read(checkpoint / "full")
    assert (
        store.verify(checkpoint, manifest, hashes=True) is None is store.verify(checkpoint / "full", whole, hashes=True)
    )
    assert whole.layout == "safetensors" and whole.progress == manifest.progress
    assert sorted(inside) == sorted(["full/manifest.json", *(f"full/{entry.path}" for entry in whole.files)])
    assert unequal(tensors(checkpoint), tensors(checkpoint / "full")) == []


@pytest.mark.parametrize("name", PAIRS)
def test_further_updates_are_those_of_a_run_never_stopped(name):
    run, straight = runs().outcome(name), runs().outcome("elastic/straight")
    assert [line["update"] for line in run.lines] == [*range(cases.ELASTIC_SAVED + 1, cases.ELASTIC_UPDATES + 1)]
    assert metric_deviation(run, straight, after=cases.ELASTIC_SAVED) <= BOUND
    assert weight_deviation(run.final, straight.final).relative_l2 <= BOUND


def test_state_that_stayed_as_it_was_would_be_noticed():
    """A moment, average or weight that was not loaded, or loaded from elsewhere, is not bit-equal to the saved one."""
    straight, before = runs().outcome("elastic/straight"), runs().outcome(f"elastic/fp32-{cases.COVER[0][0]}").final
    assert len(unequal(before, straight.final)) > 0.95 * len([key for key in before if "frozen" not in key[1]]) - 1


@pytest.mark.parametrize("name", BF16)
def test_bf16_masters_arrive_unrounded(name):
    """Frozen parameters alone may be rounded: DeepSpeed keeps them in the precision of computation only."""
    before, after = saved_and_loaded(name)
    different = [key.partition("|")[2] for key in unequal(before, after)]
    assert all(tensor.startswith("frozen.") for tensor in different)
    assert all(before["master", t].bfloat16().equal(after["master", t].bfloat16()) for t in different)
    rounded_names = [t for t in trained_names(name) if after["master", t].equal(after["master", t].bfloat16().float())]
    assert rounded_names == []
    assert metric_deviation(runs().outcome(name), runs().outcome("elastic/straight"), after=cases.ELASTIC_SAVED) < 0.1


@pytest.mark.parametrize("name", FP16)
def test_the_loss_scale_arrives_and_goes_on(name):
    """After an overflow in update 2 and one good update: the scale, and how many good ones were since."""
    before, after = saved_and_loaded(name)
    key = (LOSS_SCALE, LOSS_SCALE)
    scale, good = before[key].tolist()
    assert good == cases.ELASTIC_SAVED - cases.OVERFLOW_AT
    assert after[key].tolist() == [scale, good]
    expected = LossScale(scale, int(good))  # one rule for all engines: halved by each overflow
    for line in runs().outcome(name).lines:
        expected.record(applied=line["applied"])
    assert runs().outcome(name).final[key].tolist() == [expected.scale, expected.good_updates]
    different = {entry.partition("|")[2] for entry in unequal(before, after)}
    assert not different & set(trained_names(name))


def test_fp16_under_deepspeed_is_that_of_one_process():
    """Its own optimizer and loss scaler: the same update is skipped, the scale is halved, the losses agree.

    The split of the batch differs, so products are rounded otherwise: 1e-5 would be fp32.
    """
    run, single = (runs().outcome(f"elastic/fp16-{engine}") for engine in ("zero2@2", "single@1"))
    for one in (run, single):
        assert [line["applied"] for line in one.lines] == [u != cases.OVERFLOW_AT for u in (1, 2, 3)]
    scales = [one.final[LOSS_SCALE, LOSS_SCALE].tolist() for one in (run, single)]
    assert scales[0] == scales[1] == [2.0**15, cases.ELASTIC_SAVED - cases.OVERFLOW_AT]
    for a, b in zip(run.lines, single.lines, strict=True):
        if a["applied"]:
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
    rounding = weight_deviation(run.final, single.final, kinds=("master",)).relative_l2
    assert 1e-5 < rounding < 0.1
    names = [path.name for path in run.checkpoints[-1].glob("*optim_states.pt")]
    assert names and all(name.startswith("zero_pp_rank_") for name in names)
