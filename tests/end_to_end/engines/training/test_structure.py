"""What FSDP2 wraps, who holds what, what the log says of it, and ``torch.compile`` under it."""

from __future__ import annotations

import json
import re
from math import prod
from typing import Any

import pytest

from tests.end_to_end.engines.jobs.feature_cases import COMPILED_ENGINES
from tests.end_to_end.engines.launch import Outcome, metric_deviation, want
from unigen_ds.checkpoint.manifest import Manifest

runs = want("structure", "compiled")
pytestmark = pytest.mark.timeout(3600)

UNIFIED = ["language_model.model.layers.0", "language_model.model.layers.1", "vit_model.vision_model.encoder.layers.0"]
DECODER = ["model.layers.0", "model.layers.1"]
JOBS = {"structure/by_node": UNIFIED, "structure/FULL_SHARD@2": UNIFIED, "structure/decoder": DECODER}


def structures(run: Outcome) -> list[dict[str, Any]]:
    """What ``StructureHook`` found on each rank."""
    return [json.loads(path.read_text()) for path in sorted(run.folder.glob("structure_*.json"))]


@pytest.mark.parametrize("name", JOBS)
def test_every_block_of_the_model_is_a_unit(name):
    for structure in structures(runs().outcome(name)):
        assert sorted(structure["units"]) == ["", *JOBS[name]]


@pytest.mark.parametrize("name", JOBS)
def test_the_summary_lists_the_units_and_the_bytes_of_every_rank(name):
    run = runs().outcome(name)
    log = (run.folder / "train.log").read_text(encoding="utf-8")
    (text,) = re.findall(r"Bytes of fp32 masters \(and as many for each Adam moment\): (.*)\.$", log, re.MULTILINE)
    by_rank: dict[int, int] = {}
    for first, last, number in re.findall(r"ranks? (\d+)(?:-(\d+))?: ([\d,]+) \(", text):
        by_rank |= dict.fromkeys(range(int(first), int(last or first) + 1), int(number.replace(",", "")))
    pieces = [structure["pieces"].values() for structure in structures(run)]
    assert by_rank == {rank: sum(4 * (stop - start) for start, stop in own) for rank, own in enumerate(pieces)}
    (units,) = re.findall(r"Sharding units \((.*)\.$", log, re.MULTILINE)
    number, _, names = units.partition("): ")
    assert int(number) == len(JOBS[name]) + 1
    decoder = ["the root", "model.layers.* (2)"]
    unit_names = ["the root", "language_model.model.layers.* (2)", "vit_model.vision_model.encoder.layers.*"]
    assert names.split(", ") == (unit_names if JOBS[name] is UNIFIED else decoder)


def test_full_shard_cuts_over_all_processes():
    run = runs().outcome("structure/FULL_SHARD@2")
    first, second = (structure["pieces"] for structure in structures(run))
    assert_one_copy(run, first, second)


def test_hybrid_shard_cuts_within_a_node_and_copies_between_nodes():
    """Four processes, two a node as the launcher announces it; ``num_shard`` is left out."""
    run = runs().outcome("structure/by_node")
    pieces = [structure["pieces"] for structure in structures(run)]
    assert len(pieces) == 4 and pieces[0] == pieces[2] and pieces[1] == pieces[3]
    assert_one_copy(run, pieces[0], pieces[1])


def assert_one_copy(run: Outcome, first: dict[str, list[int]], second: dict[str, list[int]]) -> None:
    """Two ranks hold each weight once, and about half of all each."""
    (checkpoint,) = run.checkpoints
    table = Manifest.read(checkpoint).parameters
    whole = {entry["name"]: prod(entry["shape"]) for entry in table if entry["trainable"]}
    assert first.keys() | second.keys() == whole.keys()
    for name, numel in whole.items():
        cuts = [pieces[name] for pieces in (first, second) if name in pieces]
        assert (
            cuts[0][0] == 0 and cuts[-1][1] == numel and all(a[1] == b[0] for a, b in zip(cuts, cuts[1:], strict=False))
        )
    share = sum(stop - start for start, stop in first.values()) / sum(whole.values())
    assert 0.5 <= share < 0.53


@pytest.mark.parametrize("name", [f"{engine}@{world}" for engine, world in COMPILED_ENGINES])
def test_compiled_layers_agree_and_are_really_compiled(name):
    """``torch.compile`` of the layers that FSDP2 shards: it fuses and reorders, 1e-4."""
    off, on = (runs().outcome(f"compiled/{name}-{value}") for value in (False, True))
    assert {structure["graphs"] for structure in structures(off)} == {0}
    assert min(structure["graphs"] for structure in structures(on)) >= 1
    assert metric_deviation(on, off) <= 1e-4
