"""Training as users start it: scripts for torchrun, DeepSpeed's launcher and SLURM, and variables of MPI.

Two nodes are two agents on this machine; SLURM's commands are small stand-ins on PATH (``srun``, ``squeue``,
``scontrol``). Every run must end as the others do.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.support.processes import ROOT, Exit, forked_python, together
from tests.tiny import tiny_config
from tools import checkpoints, report, resume, train, zero_to_fp32
from unigen_ds.checkpoint.store import Lineage, list_checkpoints
from unigen_ds.config.python_text import config_text
from unigen_ds.runner import Runner
from unigen_ds.runner.open.trained import open_model
from unigen_ds.system.dist import free_port
from unigen_ds.system.journals import read_lines

UPDATES = 3
TRAIN = str(ROOT / "tools" / "train.py")


def written_config(folder: Path, digits: Path, **overrides: object) -> str:
    """A config file: eight sequences an update in two processes."""
    options = {"train_dataloader__batch_size": 2, "optim_wrapper__accumulative_counts": 2, "param_scheduler": []}
    config = tiny_config(folder, digits, **options, **overrides)
    path = folder / "given.py"
    path.write_text(config_text(config.to_dict()), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def losses(tmp_path_factory, digits) -> list[float]:
    """The same training in one process."""
    folder = tmp_path_factory.mktemp("single")
    config = tiny_config(folder, digits, train_dataloader__batch_size=8, param_scheduler=[])
    Runner.from_cfg(config, max_updates=UPDATES).train()
    return [line["loss"] for line in read_lines(folder / "metrics.jsonl")]


def assert_trained(folder: Path, processes: Sequence[Exit], losses: Sequence[float]) -> None:
    assert all(one.status == 0 for one in processes), "\n".join(one.ending for one in processes)
    assert [line["loss"] for line in read_lines(folder / "metrics.jsonl")] == pytest.approx(losses, rel=1e-5)


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> str:
    return forked_python(tmp_path_factory.mktemp("python"))


def agents(
    number: int, arguments: Sequence[str], *, per_node: int = 1, python: str = sys.executable
) -> list[list[str]]:
    """The torchrun command of every node."""
    port = str(free_port())
    torchrun = [
        python,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        str(number),
        "--nproc_per_node",
        str(per_node),
    ]
    torchrun += ["--master_addr", "127.0.0.1", "--master_port", port]
    return [[*torchrun, "--node_rank", str(node), TRAIN, *arguments] for node in range(number)]


def script(name: str, *arguments: str) -> list[str]:
    return ["bash", str(ROOT / "scripts" / name), *arguments]


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory, digits, losses, python) -> Path:
    """The work dir of a run on two nodes, whose checkpoints are elsewhere and of both forms."""
    folder = tmp_path_factory.mktemp("nodes")
    saving = {"checkpoint_dir": str(folder / "elsewhere" / "checkpoints"), "default_hooks__checkpoint__form": "both"}
    config = written_config(folder, digits, world_size=2, optim_wrapper__precision="fp32", **saving)
    command = script("train_torchrun.sh", config, "--backend", "fsdp", "--max-updates", str(UPDATES))
    environment = {"num_nodes": "2", "master_addr": "127.0.0.1", "master_port": str(free_port()), "nproc_per_node": "1"}
    environment |= {"PYTHON": python, "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_CPP_LOG_LEVEL": "INFO"}
    processes = together([command] * 2, [{**environment, "node_rank": str(rank)} for rank in range(2)])
    assert_trained(folder, processes, losses)
    assert any("DETAIL" in one.text for one in processes), "the debug variable reached torch"
    return folder


def test_two_nodes_under_torchrun(two_nodes):
    log = (two_nodes / "train.log").read_text(encoding="utf-8")
    assert "FSDP2 FULL_SHARD (2 shard(s)) over 2 process(es)" in log


def test_every_tool_finds_the_checkpoints_by_the_work_dir(two_nodes, tmp_path, capsys):
    """``checkpoint_dir`` has them, their hints and a lock; logs and ledger are in the work dir."""
    home = two_nodes / "elsewhere" / "checkpoints"
    assert {path.name for path in home.iterdir()} == {"iter_6.pth", "last_checkpoint", ".lock", "work_dir.txt"}
    assert not list(two_nodes.glob("*.pth")) and (two_nodes / "ledger.jsonl").is_file()
    assert (two_nodes / "checkpoint_dir.txt").read_text() == f"{home}\n"
    assert checkpoints.main(["list", str(two_nodes)]) == 0 and "iter_6.pth" in capsys.readouterr().out
    assert checkpoints.main(["verify", str(two_nodes)]) == 0
    assert zero_to_fp32.main([str(two_nodes), str(tmp_path / "merged")]) == 0
    assert zero_to_fp32.main([str(home / "iter_6.pth" / "full"), str(tmp_path / "again")]) == 0
    state, again = (torch.load(tmp_path / name / "pytorch_model.bin") for name in ("merged", "again"))
    assert state.keys() == again.keys() and all(torch.equal(state[name], again[name]) for name in state)
    assert report.main([str(two_nodes), "--out", str(tmp_path / "report.html")]) == 0
    assert "iter_6.pth" in (tmp_path / "report.html").read_text(encoding="utf-8")
    capsys.readouterr()
    options = ["--work-dir", str(two_nodes), "--json"]
    assert resume.main([str(two_nodes / "given.py"), *options, "--world-size", "1", "--backend", "fsdp"]) == 2
    assert "world_size is 2, and 1 process was started" in capsys.readouterr().err
    assert resume.main([str(two_nodes / "given.py"), *options, "--backend", "fsdp"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"] == str(home / "iter_6.pth")
    assert open_model(two_nodes)[0].vocab_size == open_model(home / "iter_6.pth" / "full")[0].vocab_size


def test_a_run_goes_on_from_the_consolidated_files(two_nodes, tmp_path, digits):
    """By one process, in a copy of the run: the work dir and its checkpoints were moved, and both files say so."""
    work_dir, home = tmp_path / "run", tmp_path / "run" / "checkpoints"
    shutil.copytree(two_nodes, work_dir, ignore=shutil.ignore_patterns("elsewhere"))
    shutil.copytree(two_nodes / "elsewhere" / "checkpoints", home)
    (home / "work_dir.txt").unlink()
    (work_dir / "checkpoint_dir.txt").write_text(f"{home}\n")
    one = {"train_dataloader__batch_size": 8, "param_scheduler": [], "checkpoint_dir": str(home)}
    config = tiny_config(work_dir, digits, **one, resume=str(home / "iter_6.pth" / "full"))
    progress = Runner.from_cfg(config, max_updates=UPDATES + 1).train()
    assert progress.updates == UPDATES + 1
    manifests = {one.path.name: one.manifest for one in list_checkpoints(home)}
    assert manifests["iter_4.pth"].parent == "iter_6.pth", "full/ is a part of it"
    assert Lineage.read(home) == Lineage()
    log = (work_dir / "train.log").read_text(encoding="utf-8")
    assert "Continuity: the last update's losses are the recorded ones" in log


def test_torchrun_starts_the_processes_of_one_node(tmp_path, digits, losses, python):
    """``torchrun --nproc_per_node=2 tools/train.py ... --backend fsdp``, as FSDP trainers document it."""
    arguments = [written_config(tmp_path, digits), "--backend", "fsdp:FULL_SHARD", "--max-updates", str(UPDATES)]
    assert_trained(tmp_path, together(agents(1, arguments, per_node=2, python=python), [{}]), losses)
    log = (tmp_path / "train.log").read_text(encoding="utf-8")
    assert "FSDP2 FULL_SHARD (2 shard(s)) over 2 process(es)" in log
    assert re.search(r"rank 0: [\d,]+ \(5\d\.\d %\), rank 1: [\d,]+ \(4\d\.\d %\)", log)


def test_the_deepspeed_launcher(tmp_path, digits, losses, python):
    """Of two hosts of a hostfile, started without ssh."""
    (tmp_path / "hosts.txt").write_text("node-a slots=1\nnode-b slots=1\n")
    arguments = [written_config(tmp_path, digits), "--backend", "deepspeed:zero2", "--max-updates", str(UPDATES)]
    environment = {"hostfile": str(tmp_path / "hosts.txt"), "master_addr": "127.0.0.1", "master_port": str(free_port())}
    nodes = [{**environment, "PYTHON": python, "node_rank": str(rank)} for rank in range(2)]
    assert_trained(tmp_path, together([script("train_deepspeed.sh", *arguments)] * 2, nodes), losses)


SIGNALLED = """
import os, signal
from unigen_ds.system import dist
from unigen_ds.config.registry import HOOKS
from unigen_ds.hooks.base import Hook

@HOOKS.register_module()
class TimeLimitHook(Hook):
    def before_run(self, run):
        if os.environ.get("SLURM_RESTART_COUNT") == "0" and dist.rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    def before_train_iter(self, run, index, batch):
        if os.environ.get("SLURM_RESTART_COUNT") == "1" and index == 0 and run.progress.updates == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
        if "SLURM_RESTART_COUNT" not in os.environ and dist.rank() == 1 and index == 0 and run.progress.updates == 1:
            os.kill(os.getppid(), signal.SIGTERM)
"""


def signalled_config(folder: Path, digits: Path) -> str:
    (folder / "time_limit.py").write_text(SIGNALLED, encoding="utf-8")
    imports = {"imports": ["unigen_ds.examples.digits", "time_limit"]}
    return written_config(folder, digits, custom_imports=imports, custom_hooks=[{"type": "TimeLimitHook"}])


SRUN = """#!/usr/bin/env bash
# The stand-in of SLURM's: the tasks of a step, and the highest of their exit statuses.
while [[ "$1" == --* ]]; do shift; done
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_STEP_NODELIST="localhost,n[2-3]" "$@" &
    tasks[$task]=$!
done
highest=0
for task in "${tasks[@]}"; do
    status=0; wait "$task" || status=$?
    ((status <= highest)) || highest=$status
done
exit "$highest"
"""
OTHERS = {"squeue": "#!/bin/sh\necho $JOB_STATE\n", "scontrol": '#!/bin/sh\necho "$@" >> "$CALLS"\n'}


def free_job() -> int:
    """Number of a job whose port is free."""
    while True:
        job = random.randrange(20000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", 20000 + job))
            except OSError:
                continue
        return job


def test_slurm_requeues_a_job_at_its_time_limit(tmp_path, digits, losses, python):
    """SIGUSR1 before the time limit: a checkpoint, status 143, back into the queue, and a resume without a name."""
    (tmp_path / "bin").mkdir()
    for name, text in {"srun": SRUN, **OTHERS}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    command = script("train_slurm.sh", signalled_config(tmp_path, digits), "--backend", "fsdp:NO_SHARD")
    job = {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHON": python,
        "CALLS": str(tmp_path / "calls"), "JOB_STATE": "RUNNING", "SLURM_JOB_ID": str(free_job()),
        "SLURM_NTASKS": "2", "SLURM_SUBMIT_DIR": str(ROOT), "RANK": "0", "WORLD_SIZE": "1",
    }  # fmt: skip
    command += ["--max-updates", str(UPDATES)]
    [process] = together([command], [{**job, "SLURM_RESTART_COUNT": "0"}])
    assert process.status == 143 and not list_checkpoints(tmp_path), process.ending
    assert "rank 1 has ended: SIGUSR1 received outside of the training" in (tmp_path / "train.log").read_text()
    [process] = together([command], [{**job, "SLURM_RESTART_COUNT": "1"}])
    assert process.status == 143, process.ending
    assert (tmp_path / "calls").read_text() == 2 * f"requeue {job['SLURM_JOB_ID']}\n"
    [checkpoint] = list_checkpoints(tmp_path)
    assert checkpoint.problem is None and checkpoint.manifest.progress.updates < UPDATES
    [again] = together([command], [{**job, "SLURM_RESTART_COUNT": "2"}])
    assert_trained(tmp_path, [again], losses)
    assert [line["update"] for line in read_lines(tmp_path / "ledger.jsonl")] == [*range(1, UPDATES + 1)]
    assert (tmp_path / "calls").read_text().count("\n") == 2


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_a_launcher_passes_sigterm_on(tmp_path, digits, losses, launcher):
    """Rank 1 sends it to its launcher during the second update: all end after the third, with one checkpoint."""
    (tmp_path / "hosts.txt").write_text("here slots=2\n")
    backend = "fsdp" if launcher == "torchrun" else "deepspeed:zero2"
    arguments = [signalled_config(tmp_path, digits), "--backend", backend]
    environment = {"nproc_per_node": "2", "node_rank": "0", "master_addr": "127.0.0.1", "master_port": str(free_port())}
    environment |= {"PYTHON": sys.executable, "hostfile": str(tmp_path / "hosts.txt")}
    [run] = together([script(f"train_{launcher}.sh", *arguments)], [environment])
    assert run.status != 0 and "SIGTERM received: saving a checkpoint, then stopping" in run.text, run.ending
    [checkpoint] = list_checkpoints(tmp_path)
    updates = checkpoint.manifest.progress.updates
    assert checkpoint.problem is None and updates in (2, 3)
    assert [line["loss"] for line in read_lines(tmp_path / "metrics.jsonl")] == pytest.approx(
        losses[:updates], rel=1e-5
    )


@pytest.mark.parametrize(("state", "calls"), [("RUNNING", 1), ("COMPLETING", 0), ("", 0)])
@pytest.mark.parametrize("status", [143, 1, 0])
def test_only_a_stopped_job_that_nobody_cancelled_is_requeued(tmp_path, state, calls, status):
    (tmp_path / "srun").write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" .\nexit {status}\n")
    for name, text in OTHERS.items():
        (tmp_path / name).write_text(text)
    for name in ("srun", *OTHERS):
        (tmp_path / name).chmod(0o755)
    job = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "JOB_STATE": state,
        "CALLS": str(tmp_path / "calls"),
        "SLURM_JOB_ID": "7",
    }
    cases = {"0": ["--resume=a CKPT"], "2": ["--resume=a CKPT"], "": ["--load-from=X", "--resu", "CKPT"]}
    jobs = {count: {**job, "SLURM_RESTART_COUNT": count} if count else job for count in cases}
    processes = [together([script("train_slurm.sh", *more, "a.py")], [jobs[count]])[0]
             for count, more in cases.items()]  # fmt: skip
    assert [one.status for one in processes] == [status] * 3
    words = [one.out.partition("tools/train.py\n")[2].partition("\n.\n")[0].splitlines() for one in processes]
    arguments = [train.parser().parse_args(one) for one in words]
    assert [one.resume for one in arguments] == ["a CKPT", "auto", "CKPT"], "the last option of a name counts"
    assert [one.cfg_options for one in arguments] == [[], ["resume=auto"], []]
    assert {(one.config, one.launcher) for one in arguments} == {("a.py", "slurm")} and arguments[2].load_from == "X"
    call_lines = (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []
    assert call_lines == ["requeue 7"] * (3 * calls if status == 143 else 0)


@pytest.mark.parametrize(
    ("name", "environment", "text"),
    [
        ("train_torchrun.sh", {"num_nodes": "2"}, "num_nodes is 2, and master_addr is not set"),
        ("train_torchrun.sh", {"num_nodes": "two"}, "num_nodes is 'two'; allowed: 1 or more"),
        ("train_torchrun.sh", {"num_nodes": "2", "node_rank": "2"}, "node_rank is '2', of num_nodes 2; allowed: 0 to"),
        ("train_torchrun.sh", {"nproc_per_node": "0"}, "nproc_per_node is '0'; allowed: 1 or more"),
        ("train_deepspeed.sh", {"hostfile": "no/such"}, "hostfile no/such cannot be read"),
        (
            "train_deepspeed.sh",
            {"hostfile": "setup.py", "node_rank": "0"},
            "node_rank is 0, and master_addr is not set",
        ),
        ("train_slurm.sh", {}, ""),
    ],
)
def test_scripts_refuse_what_cannot_work(name, environment, text):
    [without, process] = together([script(name), script(name, "a.py")][: 2 if text else 1] + [["true"]] * (not text),
                                [environment, environment])  # fmt: skip
    assert without.status == 2 and f"scripts/{name} CONFIG" in without.err and "PYTHON" in without.err
    assert "set -" not in without.err and "#SBATCH" not in without.err
    assert not text or (process.status == 2 and text in process.err)


def torchrun(*arguments: str) -> Exit:
    """Two processes of one torchrun."""
    [command] = agents(1, arguments, per_node=2)
    [process] = together([command], [{}])
    return process


def errors(process: Exit) -> list[str]:
    return [line for line in process.text.splitlines() if "error: " in line and "raise" not in line]


ALONE = "import os\nif os.environ['RANK'] == '1':\n    train_cfg = dict(max_epoch=1)\n"


def test_an_error_that_only_another_rank_has_is_reported_by_it(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("_base_ = ['" + written_config(tmp_path, tmp_path / "data") + "']\n" + ALONE)
    run = torchrun(str(tmp_path / "wrong.py"), "--backend", "fsdp")
    assert len(errors(run)) == 1 and "train_cfg.max_epoch'" in errors(run)[0] and run.status == 1, run.ending
