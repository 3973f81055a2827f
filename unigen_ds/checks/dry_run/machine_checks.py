"""The checks that every process of a launched job makes on its own machine: packages, devices, the variables of the
launcher, and the paths of the config, also of one with mistakes.
"""

from __future__ import annotations

import glob
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from unigen_ds.checkpoint.home import other_owner
from unigen_ds.checks.dry_run.context import Hardware, Known
from unigen_ds.checks.dry_run.result import Checked, ok, problem, problems_of, unchecked, warning
from unigen_ds.checks.memory.counted import in_processes
from unigen_ds.config.overrides import stated_world_size
from unigen_ds.config.paths import PATH_KEYS, expand, is_hub_name
from unigen_ds.core.choices import AUTO
from unigen_ds.core.errors import ConfigError, UnigenError
from unigen_ds.runner.settings.naming import PLACE
from unigen_ds.system import dist
from unigen_ds.system.machine import ALLOWED, installed, version_problems

_STARTED = {"pytorch": "RANK", "slurm": "SLURM_PROCID", "mpi": "OMPI_COMM_WORLD_RANK"}
"""Launcher -> a variable that each of its processes has."""


def check_packages(known: Known) -> Iterator[Checked]:
    """torch and transformers; DeepSpeed's version is checked with the engine that needs it."""
    found = [*version_problems()]
    yield from (result for error in found for result in problems_of(error))
    if not found:
        names = [*ALLOWED, "deepspeed"]
        yield ok(", ".join(f"{name} {version}" for name in names if (version := installed(name))))


def check_devices(known: Known) -> Iterator[Checked]:
    """Adds ``hardware``. Before anything else that asks torch for a device."""
    hardware = known.hardware = find_hardware()
    if not hardware.count:
        yield unchecked("this machine has no CUDA device: what a device must have is not checked, all else is")
        return
    gib = 2**30
    yield ok(
        f"{hardware.count} x {hardware.name}, {hardware.memory / gib:.1f} GiB each, {hardware.free / gib:.1f} of the"
        " first free"
    )


# The devices are asked by a process of its own: CUDA in this one would prevent it from being forked.


def find_hardware() -> Hardware:
    """Asked once: afterwards this process and its children use no device. Raises nothing."""
    hardware, _ = in_processes({"devices": _ask_devices}, jobs=1)["devices"]
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    return hardware or Hardware(0)


def _ask_devices() -> Hardware:
    if not torch.cuda.is_available():
        return Hardware(0)
    free, memory = torch.cuda.mem_get_info(0)
    return Hardware(
        torch.cuda.device_count(),
        name=torch.cuda.get_device_name(0),
        memory=memory,
        free=free,
        bf16=torch.cuda.is_bf16_supported(including_emulation=False),
    )


# ---- the job: what torchrun, MPI or SLURM has set in the environment -------------------------------------------------


def count_processes(known: Known) -> None:
    """Adds ``world_size`` and ``per_node``: as asked for, as started, or as the config has it.

    Raises ``ConfigError`` for variables of the launcher that are missing or wrong.
    """
    launcher, missing = str(known.given.get("launcher") or "none"), None
    if launcher in _STARTED and _STARTED[launcher] in os.environ:
        try:
            dist.launcher_environment(launcher)
        except ConfigError as error:
            missing = error
    started = launched_world_size(os.environ)
    known.world_size = known.asked.world_size or started or stated_world_size(known.given)
    on_node = dist.env_processes_per_node() if started == known.world_size and started > 1 else None
    known.per_node = min(known.asked.per_node or on_node or 8, known.world_size)
    if missing is not None:
        raise missing


def check_job(known: Known) -> Iterator[Checked]:
    """What the launcher has set, against the number of processes."""
    launcher = str(known.given.get("launcher") or "none")
    yield from (result for error in known.wrong_numbers for result in problems_of(error))
    try:
        count_processes(known)
    except ConfigError as error:
        yield from problems_of(error)
    yield from launcher_results(os.environ, launcher=launcher, world_size=known.world_size)
    loader = known.given.get("train_dataloader")
    workers = loader.get("num_workers") if isinstance(loader, Mapping) else 0
    num_workers = workers if isinstance(workers, int) else 0
    yield from slurm_results(os.environ, launcher=launcher, world_size=known.world_size, num_workers=num_workers)
    dist.check_port()


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


# ---- paths of the config ---------------------------------------------------------------------------------------------


def check_paths(known: Known) -> Iterator[Checked]:
    """Files and folders that are read."""
    missing = []
    for result, path in path_results(known.given):
        missing += [path] if path else []
        yield result
    known.paths = missing


def check_folders(known: Known) -> Iterator[Checked]:
    """Folders that are written: permissions, and whether another run uses them."""
    folders = {key: known.given.get(key) for key in ("work_dir", "checkpoint_dir")}
    for key, text in folders.items():
        if not isinstance(text, str):
            continue
        folder = Path(os.path.expanduser(os.path.expandvars(text.partition(PLACE)[0] or ".")))
        yield from writable_results(folder, key=key)
        if owner := other_owner(folder):
            yield problem(
                f"another process trains in {key} {folder} ({owner})",
                remedy=f"wait until it has ended, stop it, or choose another --{key.replace('_', '-')}",
            )


_READ = PATH_KEYS - {"work_dir", "checkpoint_dir", "cache_dir", "save_dir", "root", "config", "resume"}
"""Keys whose files must be there. ``root`` is made by the demo's data set, ``config`` may be the name of a preset."""


def read_paths(config: Any, *, where: str = "", is_path: bool = False) -> Iterator[tuple[str, str]]:
    """(dotted key, path) of every path that is read, at any depth."""
    pairs = config.items() if isinstance(config, Mapping) else enumerate(config)
    for key, value in pairs:
        name = f"{where}.{key}" if where else str(key)
        path = is_path or key in _READ
        if isinstance(value, (Mapping, list, tuple)):
            yield from read_paths(value, where=name, is_path=path)
        elif path and isinstance(value, str) and value:
            yield name, value
    if not where and isinstance(config.get("resume"), str) and config["resume"] != AUTO:
        yield "resume", config["resume"]


def path_results(config: Mapping[str, Any]) -> Iterator[tuple[Checked, str | None]]:
    """A result, and the path where it is missing."""
    there = 0
    for where, text in read_paths(config):
        try:
            path = expand(text, where=where)
        except UnigenError as error:
            yield problems_of(error)[0], text
            continue
        if "://" in path:
            yield unchecked(f"{where} {path}: the server is not asked"), None
        elif os.access(path, os.R_OK) or glob.glob(path):
            there += 1
        elif Path(path).exists():
            yield problem(f"{where} {path} cannot be read", remedy="change its permissions"), path
        elif is_hub_name(path.partition("@")[0]) and not Path(path).suffix:
            yield _of_hub(where, path), None
        else:
            yield (
                problem(
                    f"{where} is {path!r}, and there is no such file or folder",
                    remedy=f"check the path; a relative one begins at {Path.cwd()}",
                ),
                path,
            )
    if there:
        yield ok(f"{there} path{'s' * (there != 1)} of the config can be read"), None


def _of_hub(where: str, name: str) -> Checked:
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE

    name = name.partition("@")[0]
    if (Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}").is_dir():
        return ok(f"{where} {name} is in the hub's cache")
    if HF_HUB_OFFLINE:
        return problem(
            f"{where} {name} is neither a folder here nor in the hub's cache, and HF_HUB_OFFLINE is set",
            remedy=f"where there is a network: hf download {name}",
        )
    return unchecked(f"{where} {name} is of the hub and not in its cache: a start downloads it")


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def writable_results(folder: Path, *, key: str) -> Iterator[Checked]:
    """Write a file without a name where ``folder`` is, or will be made: it is gone when it is closed."""
    where = existing(folder)
    try:
        if not where.is_dir():
            raise NotADirectoryError(f"{where} is not a folder")
        with tempfile.TemporaryFile(dir=where) as stream:
            stream.write(b"1")
            stream.flush()
    except OSError as error:
        yield problem(
            f"{key} {folder} cannot be written: {error}",
            remedy=f"choose another --{key.replace('_', '-')}, free disk space, or change the permissions of {where}",
        )
    else:
        yield ok(f"{key} {folder} can be written" + ("" if where == folder else f" (it is made in {where})"))
