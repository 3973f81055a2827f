"""Merging: bit-equal to DeepSpeed's script and to the engine's weights; the output is complete or absent."""

from __future__ import annotations

import json
import os
import signal
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoint import plain_deepspeed
from tests.checkpoint.plain_deepspeed import ZERO, AwkwardModel
from tests.checkpoint.support import make_backend, save
from tests.checkpoint.test_saver import fill
from tests.end_to_end.engines.jobs.users import OddModel
from tests.end_to_end.engines.launch import Outcome, tensors, want
from tests.support.processes import ROOT, run
from unigen_ds.checkpoint.convert import merge
from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.system.outputs import Entry, save_torch

runs = want("layouts")
pytestmark = pytest.mark.timeout(3600)
TAG = f"global_step{plain_deepspeed.STEPS}"


@pytest.fixture(scope="module")
def plain() -> Path:
    return plain_deepspeed.checkpoints()


def source_of(plain: Path, case: str) -> Path:
    return plain / case / ("iter_6.pth" if case == "mmengine" else TAG)


def load(out: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in sorted(out.iterdir()):
        if path.suffix in (".bin", ".safetensors"):
            tensors |= load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    return tensors


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Names, dtypes, shapes and bits."""
    return set(a) == set(b) and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def theirs(source: Path, out: Path, **arguments: object) -> dict[str, Tensor]:
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_state_dict

    convert_zero_checkpoint_to_state_dict(str(source.parent), str(out), tag=source.name, **arguments)
    return load(out)


# ---- compared with DeepSpeed's script ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ZERO)
def test_plain_deepspeed_is_merged_as_its_own_script_does_it(plain, tmp_path, case):
    expected = theirs(source_of(plain, case), tmp_path / "theirs")
    merge(source_of(plain, case), tmp_path / "ours")
    ours = load(tmp_path / "ours")
    if case.startswith("zero1"):  # it omits frozen parameters there
        assert ours.keys() - expected.keys() == {"frozen.weight", "frozen.bias"}
        ours = {name: ours[name] for name in expected}
    assert equal(ours, expected)
    assert list(ours) == list(expected)


@pytest.mark.parametrize("case", [*ZERO, "zero0"])
def test_the_model_loads_it(plain, tmp_path, case):
    """Strictly: tied names, buffers, frozen parameters; tied parameters are still one tensor."""
    merge(source_of(plain, case), tmp_path / "out")
    state = torch.load(tmp_path / "out" / "pytorch_model.bin")
    model = AwkwardModel()
    model.load_state_dict(state)
    assert torch.equal(model.head.weight, model.emb.weight) and torch.equal(model.calls, torch.arange(5))
    assert state["head.weight"].data_ptr() == state["emb.weight"].data_ptr()


def test_safetensors_have_every_name(plain, tmp_path):
    source = source_of(plain, "zero3")
    merge(source, tmp_path / "one")
    output = merge(source, tmp_path / "many", safe_serialization=True, max_shard_size="2KB")
    assert equal(load(tmp_path / "many"), load(tmp_path / "one"))
    AwkwardModel().load_state_dict(load(tmp_path / "many"))
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "many" / file)
    assert index["metadata"]["total_size"] == output.nbytes and len(output.files) > 2


# ---- this project's checkpoints --------------------------------------------------------------------------------------

ENGINES = ["zero1@2-bf16", "zero2@2-fp32", "zero3@2-bf16", "FULL_SHARD@2-fp32", "FULL_SHARD@2-bf16", "NO_SHARD@2-fp32"]


def run_of(name: str) -> Outcome:
    return runs().outcome(f"layouts/{name}")


@pytest.mark.parametrize("name", ENGINES)
def test_every_engines_weights(tmp_path, name):
    """The engine's weights, also under tied names, so that a new model loads them strictly."""
    run = run_of(name)
    merge(run.checkpoints[-1], tmp_path / "out")
    tensors = load(tmp_path / "out")
    assert set(tensors) == {*run.state, "head.weight"}
    for key, value in run.state.items():
        assert torch.equal(tensors[key], value.to(tensors[key].dtype)), key
    model = OddModel(vocab=len(tensors["emb.weight"]))
    model.load_state_dict(tensors)
    assert torch.equal(model.head.weight, tensors["emb.weight"])


@pytest.mark.parametrize("name", ENGINES)
def test_the_average(tmp_path, name):
    run = run_of(name)
    merge(run.checkpoints[-1], tmp_path / "weights")
    merge(run.checkpoints[-1], tmp_path / "average", ema=True)
    weights, average = load(tmp_path / "weights"), load(tmp_path / "average")
    averages = {name: value for (kind, name), value in tensors(run.checkpoints[-1]).items() if kind == "ema"}
    for key, value in average.items():
        name = "emb.weight" if key == "head.weight" else key
        assert torch.equal(value.flatten(), averages.get(name, weights[key]).flatten()), key
    assert not torch.equal(average["emb.weight"], weights["emb.weight"]) and average.keys() == weights.keys()


def test_a_folder_that_exists_is_no_output(tmp_path):
    path = save(tmp_path)
    before = (path / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="exists"):
        merge(path, path, safe_serialization=True)
    assert (path / "model.safetensors").read_bytes() == before


# ---- the files -------------------------------------------------------------------------------------------------------


def entries_of(state: dict[str, Tensor]) -> list[Entry]:
    """Unchanged; names of the same tensor are tied."""
    first: dict[int, str] = {}
    return [replace(Entry.of(name, t), source=first.setdefault(id(t), name)) for name, t in state.items()]


def odd_tensors() -> dict[str, Tensor]:
    tied = torch.randn(3, 5)
    return {
        "scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "flags": torch.tensor([True, False, True]),
        "bf16": torch.randn(7).bfloat16(), "long": torch.arange(3), "byte": torch.arange(5, dtype=torch.uint8),
        "double": torch.randn(2, 2, dtype=torch.float64), "tied.a": tied, "tied.b": tied, "naïve": torch.ones(1),
        "nan": torch.tensor([float("nan"), -0.0]), "large": torch.randn(5_000_000),
    }  # fmt: skip


@pytest.mark.parametrize("mmap", [False, True])
def test_the_archive_is_what_torch_writes(tmp_path, mmap):
    """Correct checksums, storages aligned for mapping; nothing is left beside it."""
    state = odd_tensors()
    save_torch(tmp_path / "model.bin", entries_of(state))
    content = torch.load(tmp_path / "model.bin", weights_only=True, mmap=mmap)
    assert list(content) == list(state) and [path.name for path in tmp_path.iterdir()] == ["model.bin"]
    for name, tensor in state.items():
        assert content[name].dtype == tensor.dtype and content[name].shape == tensor.shape
        assert torch.equal(content[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    assert content["tied.a"].data_ptr() == content["tied.b"].data_ptr() and content["large"].data_ptr() % 64 == 0
    with zipfile.ZipFile(tmp_path / "model.bin") as archive:
        assert archive.testzip() is None
    assert (tmp_path / "model.bin").stat().st_size < 21_000_000, "every storage once"


def test_pieces_are_bounded():
    large = torch.zeros(1).expand(10**9)  # 4 GB that are not allocated
    entry = Entry("x", (10**9,), torch.bfloat16, lambda start, stop: [large[start:stop]])
    for number, piece in enumerate(entry.pieces()):
        assert piece.nbytes <= 16 << 20 and piece.dtype == torch.bfloat16
        if number == 3:
            break


# ---- complete or absent ----------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from unigen_ds.checkpoint import convert
from unigen_ds.system import files

files.write_digests = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # all files are written, none is renamed
convert.merge(Path(sys.argv[1]), Path(sys.argv[2]), max_shard_size="1KB")
"""


def test_killed_half_way_it_leaves_no_output(plain, tmp_path):
    source, out = source_of(plain, "zero2"), tmp_path / "out"
    process = run([sys.executable, "-c", KILLED, str(source), str(out)], cwd=ROOT)
    assert process.returncode == -signal.SIGKILL
    assert not out.exists() and len(list(tmp_path.iterdir())) == 1
    merge(source, out, max_shard_size="1KB")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # the remaining files are removed
    assert equal(load(out), theirs(source, tmp_path / "theirs"))


def test_a_full_disk(small_disk, tmp_path):
    path = save(tmp_path, backend=make_backend(width=12_000))  # 190 KiB of weights
    fill(small_disk, leave=150 * 1024)
    with pytest.raises(CheckpointError, match=r"No space left on device, 0\.\d MiB.*Remedy: free disk space"):
        merge(path, small_disk / "out")
    assert os.listdir(small_disk) == ["ballast"]
