"""Published weights: the model is built without memory, sharded, and filled shard by shard from the files."""

from __future__ import annotations

import pytest
import torch

from tests.end_to_end.engines.jobs import cases
from tests.end_to_end.engines.launch import metric_deviation, unequal, want

runs = want("published")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
NAMES = [job.name for job in cases.published_jobs(full=False) if "resumed" not in job.name]
SINGLE = "published/single@1-fp32"


@pytest.mark.parametrize("name", [name for name in NAMES if name != SINGLE])
def test_every_engine_starts_from_the_same_weights(name):
    """Bit by bit, also those that no file has; tables are frozen, and DeepSpeed rounds what is frozen in bf16."""
    run, single = runs().outcome(name).initial, runs().outcome(SINGLE).initial
    assert run.keys() == single.keys()
    for key, tensor in single.items():
        if not ("bf16" in name and key.endswith("pos_embed")):
            assert torch.equal(run[key], tensor), key


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("fp32") and name != SINGLE])
def test_training_on_is_that_of_one_process(name):
    assert metric_deviation(runs().outcome(name), runs().outcome(SINGLE)) <= 1e-5


def test_a_resumed_run_does_not_start_from_them_again():
    straight, resumed_run = (runs().outcome(f"published/FULL_SHARD@2-{end}") for end in ("fp32", "resumed"))
    assert unequal(resumed_run.final, straight.final) == []


def test_every_engine_looks_at_the_same_values_before_the_first_update():
    """Tiny random weights: the losses are those of chance, and nothing else is wrong."""
    for name in NAMES:
        log = (runs().outcome(name).folder / "train.log").read_text().splitlines()
        info = [line.partition("First update: ")[2] for line in log if "First update: " in line]
        assert info[0] == f"the values of {len(runs().outcome(SINGLE).initial)} tensors are looked at.", name
        assert info[1].startswith("losses ") and all("the loss" in problem for problem in info[2:-1]), (name, info)
    log = (runs().outcome("published/FULL_SHARD@2-resumed").folder / "train.log").read_text()
    assert log.count("are looked at") == 1, "a resume is no first update"
