"""PyTorch's distributed checkpoints, read without unpickling anything except known records."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.checkpoint.support import Evil
from tests.end_to_end.engines.launch import Outcome, want
from unigen_ds.checkpoint.layouts.dcp import DCPReader
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.core.errors import CheckpointError
from unigen_ds.core.json_values import STAMP

runs = want("layouts")
pytestmark = pytest.mark.timeout(3600)

NAMES = ["FULL_SHARD@2-fp32", "FULL_SHARD@2-bf16", "NO_SHARD@2-fp32"]


def run_of(name: str) -> Outcome:
    return runs().outcome(f"layouts/{name}")


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return Path(shutil.copytree(run_of("FULL_SHARD@2-fp32").checkpoints[-1], tmp_path / "iter.pth"))


@pytest.mark.parametrize("name", NAMES)
def test_the_reader_returns_the_engines_tensors_and_so_does_torchs(name, tmp_path):
    run = run_of(name)
    directory = run.checkpoints[-1]
    reader = DCPReader(directory)
    tensors = {key: value for key, value in run.state.items() if key != "head.weight"}  # tied to the embedding
    buffers = set(reader.names("buffer"))
    assert buffers == {"gain", "calls"} and set(reader.names("master")) | buffers == set(tensors)
    for key, value in tensors.items():
        kind = "buffer" if key in buffers else "master"
        assert torch.equal(reader.read(kind, key, 0, reader.numel(kind, key)).float(), value.flatten()), key
    names = {key for key in tensors if not key.startswith("frozen.") and key not in buffers}
    assert set(reader.names("exp_avg")) == set(reader.names("step")) == names
    assert {float(reader.read("step", key, 0, 1)) for key in names} == {2.0}
    dcp_to_torch_save(str(directory), str(tmp_path / "whole.pt"))
    theirs = torch.load(tmp_path / "whole.pt")
    assert {bytes(theirs.pop(f"{STAMP}|{rank}").tolist()) for rank in (0, 1)} == {
        Manifest.read(directory).stamp.encode()
    }
    ours = {f"{kind}|{key}" for kind in reader.kinds() for key in reader.names(kind)}
    assert ours == set(theirs)
    for entry, value in theirs.items():
        kind, _, key = entry.partition("|")
        assert torch.equal(reader.read(kind, key, 0, reader.numel(kind, key)), value.flatten()), entry


def test_crafted_metadata_is_refused_and_not_executed(checkpoint, tmp_path):
    """The real records with one additional object, whose unpickling runs a command."""
    path, mark = checkpoint / ".metadata", tmp_path / "executed"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = Evil(mark)
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"system.*not allowed"):
        DCPReader(checkpoint)
    assert not mark.exists()
    pickle.loads(path.read_bytes())  # the payload works: ordinary unpickling runs it
    assert mark.exists()


def test_a_crafted_tensor_file_is_refused_and_not_executed(checkpoint, tmp_path):
    mark, metadata = tmp_path / "executed", pickle.loads((checkpoint / ".metadata").read_bytes())
    torch.save(Evil(mark), checkpoint / "__0_0.distcp")
    size = (checkpoint / "__0_0.distcp").stat().st_size
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, size
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    reader = DCPReader(checkpoint)
    with pytest.raises(CheckpointError, match="__0_0"):
        reader.read("master", "emb.weight", 0, 5)
    assert not mark.exists()
    torch.load(checkpoint / "__0_0.distcp", weights_only=False)
    assert mark.exists()


@pytest.mark.parametrize("damage", ["missing", "empty", "half", "noise"])
def test_damaged_metadata_is_named(checkpoint, damage):
    path = checkpoint / ".metadata"
    whole = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes({"empty": b"", "half": whole[: len(whole) // 2], "noise": b"\x80\x04not a pickle"}[damage])
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        DCPReader(checkpoint)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_rank_is_named_before_anything_is_read(checkpoint, rank):
    (checkpoint / f"__{rank}_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=f"__{rank}_0"):
        DCPReader(checkpoint)
