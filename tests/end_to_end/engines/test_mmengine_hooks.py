"""A hook written for mmengine sees the same run under each engine, and stops it on all ranks alike."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.end_to_end.engines.launch import want
from unigen_ds.checkpoint import store
from unigen_ds.system.journals import read_lines

runs = want("mmengine_hooks")
pytestmark = pytest.mark.timeout(3600)
STOPPED_AT = 3


def seen(engine: str) -> list[list[dict[str, Any]]]:
    """What each rank's hook saw, micro-batch by micro-batch."""
    folder = runs().outcome(f"mmengine/{engine}").folder
    return [[json.loads(line) for line in path.open()] for path in sorted(folder.glob("seen_*.jsonl"))]


@pytest.mark.parametrize(("engine", "world"), [("single", 1), ("zero2", 2), ("SHARD_GRAD_OP", 2)])
def test_every_rank_sees_the_run(engine: str, world: int) -> None:
    ranks = seen(engine)
    assert len(ranks) == world
    for rank, lines in enumerate(ranks):
        assert [line["iter"] for line in lines] == [line["batch_idx"] for line in lines] == [0, 1, 2, 3, 4, 5]
        for line in lines:
            assert (line["rank"], line["of"]) == (rank, world)
            assert line["hub"] == [line["iter"], line["max_iters"], line["lr"][0]]
            assert line["outputs"]["loss"] > 0 and line["parameters"] > 10 and line["length"] == 26


@pytest.mark.parametrize("engine", ["zero2", "SHARD_GRAD_OP"])
def test_the_engines_show_the_same(engine: str) -> None:
    [single] = seen("single")
    for lines in seen(engine):
        for mine, wanted in zip(lines, single, strict=True):
            assert all(mine[key] == wanted[key] for key in ("iter", "epoch", "max_iters", "lr", "batch_idx", "length"))


@pytest.mark.parametrize("engine", ["single", "zero2", "SHARD_GRAD_OP"])
def test_one_rank_asks_for_a_checkpoint_and_stops_all_with_another(engine: str) -> None:
    run = runs().outcome(f"mmengine/{engine}")
    updates = [line["update"] for line in read_lines(run.folder / "metrics.jsonl") if "loss" in line]
    assert updates == [1, 2, STOPPED_AT]
    found = [checkpoint.manifest for checkpoint in store.list_checkpoints(run.folder)]
    assert sorted(manifest.progress.updates for manifest in found if manifest) == [1, STOPPED_AT]


@pytest.mark.parametrize("engine", ["single", "zero2", "SHARD_GRAD_OP"])
def test_a_hook_that_changes_what_is_trained_is_refused_on_every_rank(engine: str) -> None:
    """Also after an update and an evaluation, which leave gathered weights in place under SHARD_GRAD_OP; what is added
    there is found at the epoch's end.
    """
    files = sorted(runs().outcome(f"mmengine/{engine}").folder.glob("changes_*.jsonl"))
    assert len(files) == (1 if engine == "single" else 2)
    for file in files:
        at_start, later = map(json.loads, file.open())
        assert [change.split()[1] for change in at_start] == ["sets", "replaces", "adds"]
        assert len(later) == 2 and " sets " in later[0] and " replaces " in later[1]
        for point, changes in (("before_train", at_start), ("after_update", later)):
            assert all(f"ChangingHook.{point}" in change and "weight" in change for change in changes)
