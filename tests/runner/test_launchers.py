"""``tools/train.py`` as users start it: torchrun on two nodes, the deepspeed launcher, variables of SLURM and MPI.

Two nodes are two torchrun agents on this machine; SLURM and MPI are two processes with the variables that these set.
Every run must end as the others do.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.processes import ROOT, Ended, ranks, together
from tests.tiny import tiny_config
from unigen_ds.core.dist import free_port
from unigen_ds.core.metrics import read_lines
from unigen_ds.runner import Runner
from unigen_ds.runner.parts import config_text

UPDATES = 3
TRAIN = str(ROOT / "tools" / "train.py")

FAILING = """
import os
from unigen_ds.core.registry import HOOKS
from unigen_ds.hooks.base import Hook

@HOOKS.register_module()
class FailingHook(Hook):
    def before_train_iter(self, run, index, batch):
        if os.environ["RANK"] == "1" and run.progress.updates == 1:
            raise RuntimeError("rank 1 fails alone")
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("data") / "digits"


def written_config(folder: Path, data: Path, **overrides: object) -> str:
    """A config file: eight sequences an update in two processes."""
    given = {"train_dataloader__batch_size": 2, "optim_wrapper__accumulative_counts": 2, "param_scheduler": []}
    config = tiny_config(folder, data, **given, **overrides)
    path = folder / "given.py"
    path.write_text(config_text(config.to_dict()), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def losses(tmp_path_factory, data) -> list[float]:
    """The same training in one process."""
    folder = tmp_path_factory.mktemp("single")
    config = tiny_config(folder, data, train_dataloader__batch_size=8, param_scheduler=[])
    Runner.from_cfg(config, max_updates=UPDATES).train()
    return [line["loss"] for line in read_lines(folder / "metrics.jsonl")]


def assert_trained(folder: Path, ended: Sequence[Ended], losses: Sequence[float]) -> None:
    assert all(one.status == 0 for one in ended), "\n".join(one.ending for one in ended)
    assert [line["loss"] for line in read_lines(folder / "metrics.jsonl")] == pytest.approx(losses, rel=1e-5)


def agents(number: int, arguments: Sequence[str], *, per_node: int = 1) -> list[list[str]]:
    """The torchrun command of every node."""
    port = str(free_port())
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        str(number),
        "--nproc_per_node",
        str(per_node),
    ]
    torchrun += ["--master_addr", "127.0.0.1", "--master_port", port]
    return [[*torchrun, "--node_rank", str(node), TRAIN, *arguments] for node in range(number)]


def test_two_nodes_under_torchrun(tmp_path, data, losses):
    arguments = [written_config(tmp_path, data), "--backend", "fsdp", "--max-updates", str(UPDATES)]
    assert_trained(tmp_path, together(agents(2, arguments), [{}, {}]), losses)


def test_torchrun_starts_the_processes_of_one_node(tmp_path, data, losses):
    """``torchrun --nproc_per_node=2 tools/train.py ... --backend fsdp``, as FSDP trainers document it."""
    arguments = [written_config(tmp_path, data), "--backend", "fsdp:FULL_SHARD", "--max-updates", str(UPDATES)]
    assert_trained(tmp_path, together(agents(1, arguments, per_node=2), [{}]), losses)
    log = (tmp_path / "train.log").read_text(encoding="utf-8")
    assert "FSDP2 FULL_SHARD (2 shard(s)) over 2 process(es)" in log
    assert re.search(r"rank 0: [\d,]+ \(5\d\.\d %\), rank 1: [\d,]+ \(4\d\.\d %\)", log)


def test_the_deepspeed_launcher(tmp_path, data, losses):
    launcher = str(Path(sys.executable).parent / "deepspeed")
    command = [sys.executable, launcher, "--num_gpus", "2", "--master_port", str(free_port()), TRAIN]
    command += [written_config(tmp_path, data), "--backend", "deepspeed:zero2", "--max-updates", str(UPDATES)]
    assert_trained(tmp_path, together([command], [{}]), losses)


@pytest.mark.parametrize(
    ("launcher", "names"),
    [
        ("slurm", ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")),
        ("mpi", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")),
    ],
)
def test_variables_of_other_launchers(tmp_path, data, losses, launcher, names):
    command = [sys.executable, TRAIN, written_config(tmp_path, data), "--launcher", launcher]
    command += ["--backend", "fsdp:NO_SHARD", "--max-updates", str(UPDATES)]
    stale = {"MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}  # of a shell's own
    variables = [dict(zip(names, (str(rank), "2", str(rank)), strict=True)) | stale for rank in range(2)]
    assert_trained(tmp_path, together([command, command], variables), losses)


def test_one_rank_that_fails_ends_all_soon(tmp_path, data):
    """No deadlock, and the cause is in the log: rank 0 waits for rank 1 in a collective when that fails."""
    (tmp_path / "failing_hook.py").write_text(FAILING, encoding="utf-8")
    config = written_config(
        tmp_path,
        data,
        custom_imports={"imports": ["failing_hook"]},
        custom_hooks=[{"type": "FailingHook"}],
        env={"dist_timeout_s": 15.0},
    )
    command = [sys.executable, TRAIN, config, "--backend", "fsdp", "--max-updates", str(UPDATES)]
    ended = ranks(command, PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")  # no launcher that would kill the other
    assert all(one.status != 0 for one in ended)
    assert "rank 1 fails alone" in ended[1].text


def torchrun(*arguments: str) -> Ended:
    """Two processes of one torchrun."""
    [command] = agents(1, arguments, per_node=2)
    [ended] = together([command], [{}])
    return ended


def errors(ended: Ended) -> list[str]:
    return [line for line in ended.text.splitlines() if "error: " in line and "raise" not in line]


LATE = "import os, time\nif os.environ['RANK'] == {late!r}:\n    time.sleep(3)\ntrain_cfg = dict(max_epoch=1)\n"
ALONE = "import os\nif os.environ['RANK'] == '1':\n    train_cfg = dict(max_epoch=1)\n"


@pytest.mark.parametrize(("launcher", "late"), [("torchrun", "0"), ("none", "1")])
def test_a_wrong_config_is_reported_once(launcher: str, late: str, tmp_path: Path) -> None:
    """Whichever process is the first to find it: torchrun stops the others as soon as one has ended."""
    (tmp_path / "wrong.py").write_text(
        "_base_ = ['" + written_config(tmp_path, tmp_path) + "']\n" + LATE.format(late=late)
    )
    arguments = [str(tmp_path / "wrong.py"), "--backend", "fsdp"]
    if launcher == "torchrun":
        ended = torchrun(*arguments)
        assert len(errors(ended)) == 1 and "train_cfg.max_epoch'" in errors(ended)[0], ended.ending
        assert ended.status == 1 and re.search(r"exitcode\s*: 2 ", ended.text), (
            "torchrun's own, and the first process's"
        )
        return
    first, second = ranks([sys.executable, TRAIN, *arguments])
    assert (first.status, second.status) == (2, 2), first.ending + second.ending
    assert len(errors(first)) == 1 and "train_cfg.max_epoch'" in first.text and second.text == "", second.ending


def test_an_error_that_only_another_rank_has_is_reported_by_it(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("_base_ = ['" + written_config(tmp_path, tmp_path / "data") + "']\n" + ALONE)
    ended = torchrun(str(tmp_path / "wrong.py"), "--backend", "fsdp")
    assert len(errors(ended)) == 1 and "train_cfg.max_epoch'" in errors(ended)[0] and ended.status == 1, ended.ending
