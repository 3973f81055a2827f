"""A hook written for mmengine sees the same run under each engine, and stops it on all ranks alike."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.end_to_end.engines.launch import want
from unigen_ds.checkpoint import store
from unigen_ds.system.journals import read_lines

runs = want("mmengine_hooks")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
STOPPED_AT = 3


def lines_of(engine: str) -> list[list[dict[str, Any]]]:
    """What each rank's hook saw, micro-batch by micro-batch."""
    folder = runs().outcome(f"mmengine/{engine}").folder
    return [[json.loads(line) for line in path.open()] for path in sorted(folder.glob("seen_*.jsonl"))]


@pytest.mark.parametrize(("engine", "world"), [("single", 1), ("zero2", 2), ("SHARD_GRAD_OP", 2)])
def test_every_rank_sees_the_run(engine: str, world: int) -> None:
    ranks = lines_of(engine)
    assert len(ranks) == world
    for rank, lines in enumerate(ranks):
        assert [line["iter"] for line in lines] == [line["batch_idx"] for line in lines] == [0, 1, 2, 3, 4, 5]
        for line in lines:
            assert (line["rank"], line["of"]) == (rank, world)
            assert line["hub"] == [line["iter"], line["max_iters"], line["lr"][0]]
            same = ("iter", "epoch", "max_iters", "lr", "batch_idx", "length")
            assert [line[key] for key in same] == [lines_of("single")[0][line["iter"]][key] for key in same]
            assert line["outputs"]["loss"] > 0 and line["parameters"] > 10 and line["length"] == 26


@pytest.mark.parametrize("engine", ["single", "zero2", "SHARD_GRAD_OP"])
def test_one_rank_asks_for_a_checkpoint_and_stops_all_with_another(engine: str) -> None:
    run = runs().outcome(f"mmengine/{engine}")
    updates = [line["update"] for line in read_lines(run.folder / "metrics.jsonl") if "loss" in line]
    assert updates == [1, 2, STOPPED_AT]
    manifests = [checkpoint.manifest for checkpoint in store.list_checkpoints(run.folder)]
    assert sorted(manifest.progress.updates for manifest in manifests if manifest) == [1, STOPPED_AT]
