"""Saving and deciding with two real processes over gloo: all ranks succeed together or fail together."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support.processes import ranks
from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.manifest import Manifest

SCRIPT = '''
import json, sys
from pathlib import Path

sys.path.insert(0, ".")
import torch

from tests.checkpoint.support import make_manifest
from unigen_ds.checkpoint import saver, store
from unigen_ds.checkpoint.layouts.safetensors import restore_rng
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.system import dist
from unigen_ds.core.errors import ConfigError, UnigenError
from unigen_ds.system.outputs import Entry, Output, StateFiles, safetensors_output
from unigen_ds.core.shards import MASTER, Shard, shard_key


dist.init(timeout_s=60)
work_dir, rank = Path(sys.argv[1]), dist.rank()
report = {}


class Halves:
    """Each rank has and writes one half of ``w``."""

    broken = False

    def trained_tensors(self):
        return []

    def master_shards(self):
        return [Shard("w", (8,), 4 * rank, torch.arange(4.0) + 4 * rank)]

    def state_files(self):
        def write(stream):
            if self.broken and rank == 1:
                raise OSError(28, "No space left on device")
            entries = [Entry.of(shard_key(MASTER, s.name, s.flat_start), s.data) for s in self.master_shards()]
            safetensors_output("", entries, {"format": "pt"}).write(stream)

        return StateFiles("safetensors", [Output(f"model{rank}.safetensors", 100, write)])


def outcome(action):
    try:
        return action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def save(name):
    backend = Halves()
    manifest = make_manifest(dist.on_main(lambda: store.next_commit(work_dir)))
    shards = {"ema": backend.master_shards()}
    return str(saver.save(work_dir, name, backend=backend, manifest=manifest, hook_states={}, hook_shards=shards,
                          config_text=""))


def refuse():
    raise ConfigError("no such thing", remedy="another")


class Strange(Exception):
    def __init__(self, one, two):
        super().__init__(one)


def strange():
    raise Strange(1, 2)


received = []


def recorded(call):
    def receive(objects, *arguments, **keywords):
        call(objects, *arguments, **keywords)
        received.append(repr(objects))

    return receive


calls = {name: getattr(torch.distributed, name) for name in ("all_gather_object", "broadcast_object_list")}
for name, call in calls.items():
    setattr(torch.distributed, name, recorded(call))
torch.manual_seed(rank)
report["saved"] = save("iter_12.pth")
report["received"] = "".join(received)
for name, call in calls.items():
    setattr(torch.distributed, name, call)
expected = torch.rand(3).tolist()
Halves.broken = True
report["failed"] = outcome(lambda: save("iter_24.pth"))
first = Path(report["saved"])
report["restored"] = restore_rng(first, Manifest.read(first)) and torch.rand(3).tolist() == expected

report["refused"] = outcome(lambda: dist.on_main(refuse))
report["strange"] = outcome(lambda: dist.on_main(strange))

Path(sys.argv[2], f"{rank}.json").write_text(json.dumps(report))
dist.shutdown()
'''


@pytest.fixture(scope="module")
def outcome(tmp_path_factory) -> tuple[Path, list[dict]]:
    work_dir, reports = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("reports")
    processes = ranks([sys.executable, "-c", SCRIPT, str(work_dir), str(reports)], timeout_s=120)
    assert [one.status for one in processes] == [0, 0], processes
    return work_dir, [json.loads((reports / f"{rank}.json").read_text()) for rank in range(2)]


def test_every_rank_writes_its_part_and_one_manifest_lists_all(outcome):
    work_dir, reports = outcome
    path = work_dir / "iter_12.pth"
    assert [report["saved"] for report in reports] == [str(path)] * 2
    manifest = Manifest.read(path)
    assert store.verify(path, manifest, hashes=True) is None
    assert [entry.path for entry in manifest.files] == [
        "config.py", "ema/rank00000.safetensors", "ema/rank00001.safetensors", "hooks.json", "model0.safetensors",
        "model1.safetensors", "rng/rank00000.safetensors", "rng/rank00001.safetensors",
    ]  # fmt: skip


def test_a_failure_on_one_rank_fails_all_and_leaves_nothing(outcome):
    work_dir, reports = outcome
    assert reports[0]["failed"] == reports[1]["failed"]
    assert "could not write checkpoint" in reports[0]["failed"] and "rank 1: OSError" in reports[0]["failed"]
    assert sorted(os.listdir(work_dir)) == ["iter_12.pth", store.HINT]


def test_what_ranks_wrote_is_reported_to_rank_0_alone(outcome):
    """At 1,024 ranks the entries of all files are 160 MB: the other ranks receive only the names of the folders."""
    message = outcome[1][1]["received"]
    assert "iter_12.pth" in message and "safetensors" not in message and len(message) < 500


def test_each_rank_gets_its_own_random_state_back(outcome):
    assert [report["restored"] for report in outcome[1]] == [True, True]


def test_an_error_on_the_first_is_everybodys(outcome):
    for report in outcome[1]:
        assert report["refused"] == "ConfigError: no such thing. Remedy: another."
        assert report["strange"] == "RuntimeError: rank 0: Strange: 1"
