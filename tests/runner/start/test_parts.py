"""Ranks that are given other settings, data, versions or code end at the start, all of them, with what differs."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.runner.start.differing_ranks import DIFFERENT, SAME
from tests.support.processes import ranks

Found = list[dict[str, str]]
NAMED = {
    "lr": "optim_wrapper.optimizer.lr: rank 0: 0.005; rank 1: 0.25",
    "line": r'data train: fingerprint: rank 0: "\w{32}"; rank 1: "\w{32}"',
    "fewer": "data train: records: rank 0: 96; rank 1: 90",
    "batch": "train_dataloader.batch_size: rank 0: 2; rank 1: 3",
    "accumulation": "optim_wrapper.accumulative_counts: rank 0: 1; rank 1: 2",
    "engine": 'backend.type: rank 0: "fsdp"; rank 1: "deepspeed"',
    "limit": "train_cfg.max_epochs: rank 0: 1; rank 1: 7",
    "argument": "max_updates: rank 0: 2; rank 1: 5",
    "mixture": r"train_dataloader.dataset\[1\].weight: rank 0: 1; rank 1: 3",
    "sources": r'train_dataloader.dataset\[1\].name: rank 0: "b"; rank 1: not there',
    "filters": r"train_dataloader.dataset\[0\].filters\[0\].max_images: rank 0: not there; rank 1: 0",
    "adapters": "lora.r: rank 0: 2; rank 1: 4",
    "tokenizer": r'tokenizer.words: rank 0: \["zero", .*\]; rank 1: \["zero", "one"\]',
    "hooks": r'custom_hooks\[0\].type: rank 0: not there; rank 1: "KeepBatches"',
    "seed": "randomness.seed: rank 0: 1; rank 1: 9",
    "validation": r'validation data data: fingerprint: rank 0: "\w{32}"; rank 1: "\w{32}"',
    "version": r'version of torch: rank 0: ".*"; rank 1: "2.6.0"',
    "code": r'code of unigen_ds: rank 0: "\w{16}"; rank 1: "0123456789abcdef"',
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Of each rank: case -> what its run raised."""
    out = tmp_path_factory.mktemp("ranks")
    processes = ranks([sys.executable, "-m", "tests.runner.start.differing_ranks", str(out)])
    assert [one.status for one in processes] == [0, 0], "\n".join(one.ending for one in processes)
    return [json.loads((out / f"found_{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", DIFFERENT)
def test_both_ranks_end_with_the_key_and_both_values(outcomes: Found, name: str) -> None:
    first, second = (one.get(name, "not reached") for one in outcomes)
    assert first == second and first.startswith("RanksDiffer: the processes differ:\n"), (first, second)
    assert re.search(f"^  {NAMED[name]}", first, re.MULTILINE), first


@pytest.mark.parametrize("name", SAME)
def test_what_a_node_has_of_its_own_may_differ(outcomes: Found, name: str) -> None:
    """Folders, caches, threads, workers, and what only rank 0 writes: the runs train."""
    assert [one.get(name, "not reached") for one in outcomes] == ["", ""]
