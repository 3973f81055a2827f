"""The job that this process is part of: what torchrun, MPI or SLURM has set in the environment. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from unigen_ds.checks.dry_run.result import Checked, ok, problem, unchecked, warning
from unigen_ds.core.errors import ConfigError

_JOB = "SLURM_JOB_ID"


def launcher_results(env: Mapping[str, str], *, launcher: str, world_size: int) -> Iterator[Checked]:
    """Variables of the launcher against each other and against ``world_size``, the processes that are planned."""
    numbers = {name: int(env[name]) for name in ("RANK", "WORLD_SIZE") if env.get(name, "").isdecimal()}
    started = numbers.get("WORLD_SIZE")
    if started is None:
        yield unchecked(f"no launcher has started this process; {world_size} process(es) are planned")
    elif numbers.get("RANK", 0) >= started:
        yield problem(f"RANK is {numbers['RANK']} and WORLD_SIZE {started}", allowed=f"RANK from 0 to {started - 1}")
    elif started > 1 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK") if name not in env]
        if missing:
            yield problem(
                f"{started} processes were started without {', '.join(missing)} in the environment",
                remedy="--launcher slurm or mpi sets them; or start with torchrun",
            )
    if started is not None and started != world_size:
        yield warning(f"{started} processes were started, and --world-size {world_size} is what is checked")
    elif started is not None:
        yield ok(f"{started} process{'es' * (started != 1)}, launcher {launcher!r}")


def slurm_results(env: Mapping[str, str], *, launcher: str, world_size: int, num_workers: int) -> Iterator[Checked]:
    """The variables of a SLURM job; outside of one nothing is known."""
    if _JOB not in env:
        if launcher == "slurm":
            yield unchecked("launcher is 'slurm' and this is no SLURM job: its variables are not there")
        return
    tasks = env.get("SLURM_NTASKS", "1")
    if not tasks.isdecimal():
        yield problem(f"SLURM_NTASKS is {tasks!r}", allowed="a whole number")
        return
    if launcher == "slurm" and int(tasks) != world_size:
        yield problem(
            f"SLURM has {tasks} tasks (SLURM_NTASKS), and {world_size} processes are planned",
            remedy=f"sbatch --ntasks={world_size}, or --world-size {tasks}",
        )
    elif launcher == "none" and "SLURM_PROCID" in env and int(tasks) > 1 and "WORLD_SIZE" not in env:
        yield problem(
            f"SLURM has started {tasks} tasks, and launcher is 'none': each would train alone, in the same work dir",
            remedy="--launcher slurm; or one task for each node, which starts torchrun",
        )
    else:
        yield ok(f"SLURM job {env[_JOB]}, {tasks} tasks")
    cores = env.get("SLURM_CPUS_PER_TASK", "")
    if cores.isdecimal() and launcher == "slurm" and int(cores) < num_workers + 1:
        yield warning(
            f"SLURM_CPUS_PER_TASK is {cores}: fewer than {num_workers} loading processes and the one that trains need"
            f" (sbatch --cpus-per-task={num_workers + 1}, or a smaller train_dataloader.num_workers)"
        )
    devices, on_node = env.get("SLURM_GPUS_ON_NODE", ""), env.get("SLURM_NTASKS_PER_NODE", "")
    if devices.isdecimal() and on_node.isdecimal() and launcher == "slurm" and int(on_node) > int(devices):
        yield problem(
            f"SLURM has {on_node} tasks and {devices} GPUs on a node",
            allowed="a GPU for each task",
            remedy=f"sbatch --gpus-per-node={on_node}, or --ntasks-per-node={devices}",
        )


def time_limit_s(env: Mapping[str, str], *, now: float) -> float | None:
    """Seconds until SLURM ends the job; None where it is not known."""
    end = env.get("SLURM_JOB_END_TIME", "")
    return float(end) - now if end.isdecimal() else None


def launched_world_size(env: Mapping[str, str]) -> int | None:
    """Processes that a launcher has started; None: none has. Raises ``ConfigError``."""
    if "WORLD_SIZE" not in env:
        return None
    if not env["WORLD_SIZE"].isdecimal() or int(env["WORLD_SIZE"]) < 1:
        raise ConfigError(f"the environment variable WORLD_SIZE is {env['WORLD_SIZE']!r}", allowed="1 or more")
    return int(env["WORLD_SIZE"])
