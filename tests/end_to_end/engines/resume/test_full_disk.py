"""A save that fails on any rank, at any write, fails on all, leaves nothing, and changes nothing of the training."""

from __future__ import annotations

import json
import os
import re

import pytest

from tests.end_to_end.engines.jobs import cases
from tests.end_to_end.engines.launch import different_values, unequal, want
from unigen_ds.checkpoint import store

runs = want("full_disk", "odd")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ENGINES = [f"{engine}@{1 if engine == 'single' else 2}" for engine in cases.ODD_ENGINES]
OWN_FILES = {
    "single@1": [{"model.safetensors", "optimizer.safetensors"}],
    "zero1@2": [{"mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"},
                {"zero_pp_rank_1_mp_rank_00_optim_states.pt"}],
    "zero3@2": [{"zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"},
                {"zero_pp_rank_1_mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"}],
    "FULL_SHARD@2": [{"__0_0.distcp", ".metadata"}, {"__1_0.distcp"}],
}  # fmt: skip
OWN_FILES["zero2@2"] = OWN_FILES["zero1@2"]


def attempts(name: str) -> list[dict]:
    return json.loads((runs().outcome(f"full_disk/{name}").folder / "faults.json").read_text())


def has_committed(attempt: dict) -> bool:
    """Whether what failed came after the commit: the hint and the flush of its name, which are only a warning."""
    of_folder = (
        attempt["failed"].startswith("fsync ") and attempt["failed"].endswith("/") and ".pth" not in attempt["failed"]
    )
    return store.HINT in attempt["failed"] or (of_folder and not attempt["errors"][0])


@pytest.mark.parametrize("name", ENGINES)
def test_every_failure_is_that_of_all_ranks_and_leaves_nothing(name):
    for attempt in attempts(name):
        errors = attempt["errors"]
        assert len(set(errors)) == 1 and len(errors) == int(name[-1]), attempt
        if not attempt["failed"] or has_committed(attempt):
            assert errors[0] == "" and attempt["left"] == ["try.pth"], attempt
            continue
        assert attempt["left"] == [], attempt
        number = attempt["errno"]
        assert f"try.pth: rank {attempt['rank']}: OSError: [Errno {number}] {os.strerror(number)}" in errors[0], attempt
        assert re.search(r"it needs [\d,]+ bytes,? and [\d,]+ (bytes )?are free", errors[0])


@pytest.mark.parametrize("name", ENGINES)
def test_every_file_and_every_call_had_its_turn(name):
    """Else the loop above could be short for a wrong reason."""
    for rank, own in enumerate(OWN_FILES[name]):
        calls = [attempt["failed"].split() for attempt in attempts(name) if attempt["rank"] == rank]
        assert calls[-2:] == [[], []], "in the last attempts of a rank nothing fails: one of them has short writes"
        del calls[-2:]
        failures = {(call, path.rpartition("/")[2]) for call, path in calls}
        files = (
            own
            | {f"rank0000{rank}.safetensors"}
            | ({"manifest.json", "hooks.json", "config.py"} if not rank else set())
        )
        assert files <= {file for _, file in failures} and {"open", "write", "fsync", "close"} <= {
            call for call, _ in failures
        }
        if rank == 0:
            assert {call for call, _ in calls} >= {"mkdir", "rename"}
            flushes = [a["errors"][0] for a in attempts(name) if a["failed"].endswith(f"{name}/")]
            assert flushes[-2] and not flushes[-1], "of the folder: after the rename, and after the hint"


@pytest.mark.parametrize("name", ENGINES)
def test_training_continues_bit_equal(name):
    run, straight = runs().outcome(f"full_disk/{name}"), runs().outcome(f"odd/{name}")
    assert len(run.lines) == len(straight.lines) == cases.ODD_UPDATES
    assert different_values(run, straight) == []
    assert unequal(run.final, straight.final) == []
