"""Two real processes under DeepSpeed and FSDP2 train as one does, and go on from each other's checkpoints.

A quick look; ``make matrix`` runs every engine, process count and precision.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import tiny_config
from unigen_ds.core.dist import free_port
from unigen_ds.core.metrics import read_lines
from unigen_ds.runner import Runner

ROOT = Path(__file__).resolve().parents[2]
FIRST, ALL = 6, 10
ENGINES = {
    "zero2": "{'type':'deepspeed','config':'zero2'}",
    "zero3": "{'type':'deepspeed','config':'zero3'}",
    "FULL_SHARD": "{'type':'fsdp'}",
}


def launch(folder: Path, data: Path, updates: int, backend: str, *options: str) -> None:
    """Two processes, two sequences each, two iterations an update: 8 sequences."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--master_port", str(free_port())]
    command += ["-m", "tests.backends.train_some", str(folder), str(data), str(updates), f"backend={backend}"]
    command += ["train_dataloader.batch_size=2", "optim_wrapper.accumulative_counts=2", "param_scheduler=[]"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("data") / "digits"


@pytest.fixture(scope="module")
def single(tmp_path_factory, data) -> list[dict]:
    folder = tmp_path_factory.mktemp("single")
    config = tiny_config(folder, data, train_dataloader__batch_size=8, param_scheduler=[])
    Runner.from_cfg(config, max_updates=ALL).train()
    return read_lines(folder / "metrics.jsonl")


@pytest.fixture(scope="module", params=sorted(ENGINES))
def trained(request, tmp_path_factory, data) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    launch(folder, data, FIRST, ENGINES[request.param])
    return request.param, folder


def assert_same(lines: list[dict], oracle: list[dict]) -> None:
    assert [line["update"] for line in lines] == [line["update"] for line in oracle]
    for line, other in zip(lines, oracle, strict=True):
        for key in ("loss", "loss/text", "loss/image", "grad_norm"):
            assert line[key] == pytest.approx(other[key], rel=1e-5), (line["update"], key)
        assert [line[k] for k in ("lr", "sequences", "tokens")] == [other[k] for k in ("lr", "sequences", "tokens")]


def test_two_processes_train_as_one(trained, single):
    assert_same(read_lines(trained[1] / "metrics.jsonl"), single[:FIRST])


def test_another_engine_goes_on_from_its_checkpoint(trained, single, data, tmp_path):
    name, folder = trained
    (checkpoint,) = folder.glob("iter_*.pth")
    if name == "zero2":
        launch(tmp_path, data, ALL, ENGINES["FULL_SHARD"], f"resume={checkpoint}")
    else:
        options = {"train_dataloader__batch_size": 8, "param_scheduler": [], "resume": str(checkpoint)}
        Runner.from_cfg(tiny_config(tmp_path, data, **options), max_updates=ALL).train()
    assert_same(read_lines(tmp_path / "metrics.jsonl"), single[FIRST:])
