"""Asynchronous saves of every engine have what blocking saves of the same updates have, and change nothing."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.engines.jobs import cases
from tests.end_to_end.engines.launch import different_values, tensors, unequal, want
from unigen_ds.checkpoint import store
from unigen_ds.core.shards import BUFFER, EMA, MASTER

runs = want("full_disk", "odd")
pytestmark = pytest.mark.timeout(3600)

ENGINES = [f"{engine}@{1 if engine == 'single' else 2}" for engine in cases.ASYNC_ENGINES]
KINDS = [*(("odd", name) for name in ("zero1@2", *ENGINES)), *(("async", name) for name in ENGINES)]


@pytest.mark.parametrize("name", ENGINES)
def test_an_asynchronous_checkpoint_is_the_blocking_one(name):
    """Training goes on at once, so a copy that came too late, or memory used again too early, would show."""
    run, blocking = runs().outcome(f"async/{name}"), runs().outcome(f"full_disk/{name}")
    assert len(run.checkpoints) == len(blocking.checkpoints) == cases.ODD_UPDATES // 2
    for one, other in zip(run.checkpoints, blocking.checkpoints, strict=True):
        assert one.name == other.name and unequal(tensors(one), tensors(other)) == []
        hooks = [json.loads((path / "hooks.json").read_text()) for path in (one, other)]
        assert hooks[0].keys() == hooks[1].keys()
        files = [{path.relative_to(folder) for path in folder.rglob("*")} for folder in (one, other)]
        assert files[0] == files[1]
    assert not list(run.folder.glob("*.tmp-*"))


@pytest.mark.parametrize("name", ["single@1", "zero2@2"])
def test_an_error_of_a_writers_disk_is_that_of_all_ranks(name):
    [attempt] = json.loads((runs().outcome(f"async/{name}").folder / "faults.json").read_text())
    text = "the writer of 1 rank(s) has failed" if name[-1] == "2" else "rank 0: OSError: [Errno 5] Input/output error"
    assert len(set(attempt["errors"])) == 1 and text in attempt["errors"][0] and attempt["left"] == []


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_milestones_are_kept_and_have_their_weights_alone(kind, name):
    """The weights are those of the checkpoint, to the bit, by the model's names; and so is their average."""
    run, counts = runs().outcome(f"{kind}/{name}"), cases.GEOMETRY[int(name[-1])][1]
    if kind == "odd":
        milestones = [f"iter_{n * counts}.pth" for n in (cases.MILESTONE, cases.ODD_UPDATES)]
        assert [path.name for path in run.checkpoints] == milestones
    folder = run.folder / store.WEIGHTS
    names = {f"iter_{cases.MILESTONE * counts}"}
    assert {path.name for path in folder.iterdir()} == names | {f"{name}_ema" for name in names}
    for name in names:
        state = tensors(run.folder / f"{name}.pth")
        raw, average = (load_file(folder / one / "model.safetensors") for one in (name, f"{name}_ema"))
        for (of, tensor), value in state.items():
            if of in (MASTER, BUFFER, EMA):
                assert torch.equal((average if of == EMA else raw)[tensor].flatten(), value.flatten()), (of, tensor)
        assert raw.keys() == average.keys() >= {tensor for of, tensor in state if of in (MASTER, BUFFER)}
        assert {path.name for path in (folder / name).iterdir()} == {"digests.json", "model.safetensors"}


@pytest.mark.parametrize("name", ENGINES)
def test_training_is_bit_equal(name):
    run, straight = runs().outcome(f"async/{name}"), runs().outcome(f"odd/{name}")
    assert len(run.lines) == len(straight.lines) == cases.ODD_UPDATES
    assert different_values(run, straight) == []
