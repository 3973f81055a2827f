"""Settings that cannot work are refused by the real command line, before any process is joined and before any file."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest
import torch

from tests.support.processes import ROOT, run
from tests.tiny import tiny_config
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.progress import Geometry, split_global_batch
from unigen_ds.runner import Runner


def refusal(tmp_path: Path, *arguments: str, **environment: str) -> str:
    """Run the tool; it must exit with 2, and leave no work dir. Returns what it said."""
    command = [sys.executable, str(ROOT / "tools" / "train.py"), "unified_digits"]
    command += ["--work-dir", str(tmp_path / "run"), *arguments]
    process = run(command, env={**os.environ, **environment}, text=True, timeout=120)
    assert process.returncode == 2, process.stderr
    assert not (tmp_path / "run").exists()
    return process.stderr


@pytest.fixture
def busy_port():
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_port_in_use_is_named_with_a_free_one(tmp_path, busy_port):
    processes = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    message = refusal(tmp_path, "--backend", "fsdp", MASTER_PORT=str(busy_port), **processes)
    assert f"MASTER_PORT {busy_port} cannot be opened" in message and "is free just now" in message


@pytest.mark.parametrize(
    ("launcher", "variables", "message"),
    [
        ("none", {"LOCAL_WORLD_SIZE": "4"}, "num_shard is 4 and there are 6 process"),
        ("mpi", {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "num_shard is 4 and there are 6 process"),
        ("slurm", {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, "num_shard is 4 and there are 6 process"),
        ("none", {}, "does not report the processes of a node.* Remedy: num_shard=N"),
    ],
)
def test_the_processes_of_a_node_under_every_launcher(tmp_path, monkeypatch, launcher, variables, message):
    """What HYBRID_SHARD shards over where ``num_shard`` is left out; here no divisor of the 6 processes."""
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK",
                 "OMPI_COMM_WORLD_LOCAL_RANK"):  # fmt: skip
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.setenv(name, "6")
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", **variables}.items():
        monkeypatch.setenv(name, value)
    backend = {"type": "fsdp", "sharding_strategy": "HYBRID_SHARD"}
    config = tiny_config(tmp_path / "run", tmp_path / "digits", backend=backend, launcher=launcher)
    with pytest.raises(ConfigError, match=message):
        Runner.from_cfg(config)


def test_fsdp_on_cpus_under_a_torch_that_adds_up_gradients(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.8.0+cpu"))
    with pytest.raises(ConfigError, match=r"PyTorch 2\.8\.0\+cpu .* Remedy: PyTorch 2\.9 or later"):
        Runner.from_cfg(tiny_config(tmp_path / "run", tmp_path / "digits", backend={"type": "fsdp"}))


def test_a_global_batch_that_cannot_be_split_names_the_nearest(tmp_path):
    options = ["train_dataloader.batch_size=null", "train_dataloader.global_batch_size=100"]
    message = refusal(
        tmp_path, "--backend", "fsdp", "--cfg-options", *options, "optim_wrapper.accumulative_counts=3", WORLD_SIZE="4"
    )
    assert "100" in message and "the nearest are 96 and 108" in message


def test_a_global_batch_is_split_evenly():
    assert split_global_batch(96, accumulative_counts=3, dp_size=4) == Geometry(8, 3, 4)
    assert split_global_batch(96, accumulative_counts=3, dp_size=4, batch_size=8) == Geometry(8, 3, 4)
    with pytest.raises(ConfigError, match="the nearest are 12 and 24"):
        split_global_batch(5, accumulative_counts=3, dp_size=4)
    with pytest.raises(ConfigError, match=r"make it 8"):
        split_global_batch(96, accumulative_counts=3, dp_size=4, batch_size=9)
