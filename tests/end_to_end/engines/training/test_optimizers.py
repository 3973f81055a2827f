"""Optimizers of whole matrices under real engines, Muon and a user's own: from equal gradients bit-equal to ``single``
under FSDP2, also where a run is resumed half way under the other of the two. An element-wise one: ``test_plugin.py``.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.end_to_end.engines.jobs import feature_cases as cases
from tests.end_to_end.engines.launch import Tensors, metric_deviation, tensors, unequal, want
from tests.support import needs

runs = want("optimizers")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), needs.MUON]
MATRICES = {"block.0.weight", "block.2.weight", "connector.weight", "mix"}
REST = {"emb.weight", "image_head.weight", "image_head.bias", "block.0.bias", "block.2.bias", "connector.bias"}
ENGINES = [f"{engine}@{world}" for engine, world in cases.MATRIX_ENGINES]


def kinds(state: Tensors) -> dict[str, set[str]]:
    names = defaultdict(set)
    for kind, name in state:
        if kind not in ("master", "buffer", "ema"):
            names[kind].add(name)
    return dict(names)


@pytest.mark.parametrize("engine", ENGINES)
def test_muon_from_equal_gradients_is_bit_equal_to_one_process(engine):
    single = runs().outcome("optimizers/equal/Muon/single@1").final
    state = runs().outcome(f"optimizers/equal/Muon/{engine}").final
    assert unequal(state, single) == []
    assert kinds(state) == {"momentum_buffer": MATRICES, **dict.fromkeys(("exp_avg", "exp_avg_sq", "step"), REST)}


@pytest.mark.parametrize("name", ["Muon", "NormalizedMomentum"])
def test_whole_matrices_resume_bit_equal_under_the_other_engine(name):
    base = f"optimizers/equal/{name}"
    half, resumed_run = runs().outcome(f"{base}/half"), runs().outcome(f"{base}/resumed")
    assert unequal(half.final, tensors(resumed_run.folder / "loaded.pth")) == []
    straight = runs().outcome(f"{base}/single@1").final
    assert unequal(resumed_run.final, straight) == []
    assert len(unequal(half.final, straight)) > 3 * len(MATRICES | REST), "the last updates changed everything"


def test_an_optimizer_of_whole_matrices_of_a_users_own_is_bit_equal_to_one_process():
    """Its step count is a plain number; a matrix that ``patterns`` names is AdamW's."""
    single = runs().outcome("optimizers/equal/NormalizedMomentum/single@1").final
    state = runs().outcome("optimizers/equal/NormalizedMomentum/FULL_SHARD@2").final
    assert unequal(state, single) == []
    adamws = REST | {"mix"}
    own = {"velocity": MATRICES - {"mix"}, "step": MATRICES | REST}
    assert kinds(state) == {**own, "exp_avg": adamws, "exp_avg_sq": adamws}


def test_muon_trains_from_real_gradients_as_one_process_does():
    """Gradients differ in rounding, and Muon multiplies in bf16."""
    runs_ = [runs().outcome(f"optimizers/Muon/{engine}") for engine in ("FULL_SHARD", "single")]
    assert metric_deviation(*runs_) <= 1e-3
    losses = [line["loss"] for line in runs_[1].lines]
    assert losses[-1] < losses[0]
