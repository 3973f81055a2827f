"""DeepSpeed's files, read without deepspeed: correct numbers, nothing executed, damage reported."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.engines.launch import Outcome, want
from unigen_ds.checkpoint.layouts.deepspeed import DeepSpeedReader
from unigen_ds.core.errors import CheckpointError

runs = want("layouts")
pytestmark = pytest.mark.timeout(3600)

NAMES = [f"zero{stage}@2-{precision}" for stage in (1, 2, 3) for precision in ("fp32", "bf16")]


def run_of(name: str) -> Outcome:
    return runs().outcome(f"layouts/{name}")


@pytest.fixture
def checkpoint(tmp_path, request) -> Path:
    name = getattr(request, "param", "zero2@2-fp32")
    return Path(shutil.copytree(run_of(name).checkpoints[-1], tmp_path / "iter.pth"))


@pytest.mark.parametrize("name", NAMES)
def test_the_files_have_the_names_that_deepspeed_gives_them(name):
    bf16, zero3 = "bf16_" if name.endswith("bf16") else "", name.startswith("zero3")
    ranks = [f"zero_pp_rank_{rank}_mp_rank_00" for rank in range(2)]
    names = [f"{bf16}{rank}_optim_states.pt" for rank in ranks]
    names += [f"{rank}_model_states.pt" for rank in ranks] if zero3 else ["mp_rank_00_model_states.pt"]
    assert sorted(path.name for path in run_of(name).checkpoints[-1].glob("*.pt")) == sorted(names)


@pytest.mark.parametrize("name", NAMES)
def test_the_reader_returns_the_engines_tensors(name):
    """Every parameter (split at any element, frozen, tied) and buffer, bit by bit."""
    run = run_of(name)
    reader = DeepSpeedReader(run.checkpoints[-1])
    names, buffers = set(reader.names("master")), set(reader.names("buffer"))
    tensors = {key: value for key, value in run.state.items() if key != "head.weight"}  # tied to the embedding
    assert buffers == {"gain", "calls"} and names | buffers == set(tensors)
    for key, value in tensors.items():
        kind = "buffer" if key in buffers else "master"
        assert reader.numel(kind, key) == value.numel()
        assert torch.equal(reader.read(kind, key, 0, value.numel()).float(), value.flatten()), key


class Member:
    """Stored as Python stores ``ZeroStageEnum``: by its value; from 3.11.0 to 3.11.3 by its name."""

    def __init__(self, stage: int, *, has_name: bool) -> None:
        self.stage, self.named = stage, has_name

    def __reduce__(self) -> Any:
        from deepspeed.runtime.zero.config import ZeroStageEnum

        return (
            (getattr, (ZeroStageEnum, ZeroStageEnum(self.stage).name)) if self.named else (ZeroStageEnum, (self.stage,))
        )


@pytest.mark.parametrize("has_name", [False, True])
@pytest.mark.parametrize("checkpoint", [f"zero{stage}@2-fp32" for stage in (1, 2, 3)], indirect=True)
def test_files_of_every_python_are_read(checkpoint, has_name):
    stage = int(
        torch.load(next(checkpoint.glob("*_optim_states.pt")), weights_only=False)["optimizer_state_dict"]["zero_stage"]
    )
    for path in checkpoint.glob("*_optim_states.pt"):
        state = torch.load(path, weights_only=False)
        state["optimizer_state_dict"]["zero_stage"] = Member(stage, has_name=has_name)
        torch.save(state, path)
    assert DeepSpeedReader(checkpoint).zero_stage == stage


@pytest.mark.parametrize("name", ["zero1@2-fp32", "zero2@2-fp32", "zero2@2-bf16", "zero3@2-fp32", "zero3@2-bf16"])
def test_deepspeeds_own_script_writes_the_same(name):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    directory = run_of(name).checkpoints[-1]
    reader = DeepSpeedReader(directory)
    theirs = get_fp32_state_dict_from_zero_checkpoint(str(directory), tag=".")
    absent = {key for key in reader.names("master") if key not in theirs}
    assert absent <= {key for key in reader.names("master") if key.startswith("frozen.")}
    assert not absent or name.startswith("zero1")  # it omits frozen parameters there
    for key in set(reader.names("master")) - absent:
        ours = reader.read("master", key, 0, reader.numel("master", key))
        assert torch.equal(ours.float(), theirs[key].flatten().float()), key


@pytest.mark.parametrize("checkpoint", ["zero1@2-bf16", "zero2@2-fp32", "zero3@2-fp32"], indirect=True)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_rank_is_named(checkpoint, rank):
    """Also the last one, whose absence leaves no gap in the names."""
    (path,) = [p for p in checkpoint.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")]
    path.unlink()
    with pytest.raises(CheckpointError, match=f"of rank {rank}"):
        DeepSpeedReader(checkpoint)


@pytest.mark.parametrize("checkpoint", ["zero1@2-bf16", "zero3@2-fp32"], indirect=True)
def test_missing_model_files_are_noticed(checkpoint):
    sorted(checkpoint.glob("*model_states.pt"))[-1].unlink()
    with pytest.raises(CheckpointError, match="model"):
        DeepSpeedReader(checkpoint)
