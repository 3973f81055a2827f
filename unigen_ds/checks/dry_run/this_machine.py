"""Checks that a config with mistakes does not prevent: devices, the launcher's variables, paths read and written."""

from __future__ import annotations

import glob
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from unigen_ds.checks.dry_run.known import Checked, Hardware, Known, not_checked, ok, problem, results_of, warning
from unigen_ds.checks.memory.counted import in_processes
from unigen_ds.config.overrides import stated_world_size
from unigen_ds.config.paths import PATH_KEYS, is_hub_name, paths_in
from unigen_ds.core.choices import AUTO
from unigen_ds.core.errors import ConfigError
from unigen_ds.runner.settings.naming import PLACE
from unigen_ds.system import dist

_RANK_VARIABLES = {"pytorch": "RANK", "slurm": "SLURM_PROCID", "mpi": "OMPI_COMM_WORLD_RANK"}
"""Launcher -> a variable that each of its processes has."""


def check_devices(known: Known) -> Iterator[Checked]:
    """Adds ``hardware``."""
    hardware = find_and_hide_devices()
    if not hardware:
        yield not_checked("this machine has no CUDA device: what a device must have is not checked, all else is")
        return
    known.hardware = hardware
    memory, free = hardware.memory / 2**30, hardware.free / 2**30
    yield ok(f"{hardware.count} x {hardware.name}, {memory:.1f} GiB each, {free:.1f} of the first free")


def find_and_hide_devices() -> Hardware | None:
    """The CUDA devices, asked for in a process of its own: CUDA here would prevent forks. Then all are hidden."""
    ((_, (hardware, _)),) = in_processes({"devices": _ask_devices}, jobs=1)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    return hardware  # type: ignore[no-any-return]


def _ask_devices() -> Hardware | None:
    if not torch.cuda.is_available():
        return None
    free, memory = torch.cuda.mem_get_info(0)
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return Hardware(torch.cuda.device_count(), torch.cuda.get_device_name(0), memory, free, bf16)


def check_job(known: Known) -> Iterator[Checked]:
    """Adds ``world_size`` and ``per_node``: as asked for, as torchrun, MPI or SLURM started, or as in the config."""
    launcher, options = str(known.config.values.get("launcher") or "none"), known.options
    if launcher in _RANK_VARIABLES and _RANK_VARIABLES[launcher] in os.environ:
        try:
            dist.launcher_environment(launcher)
        except ConfigError as error:
            yield from results_of(error)
    num_started = dist.env_world_size() if "WORLD_SIZE" in os.environ else None
    known.world_size = options.world_size or num_started or stated_world_size(known.config.values)
    on_node = dist.env_processes_per_node() if num_started == known.world_size and num_started > 1 else None
    known.per_node = min(options.per_node or on_node or 8, known.world_size)
    if num_started is None:
        yield not_checked(f"no launcher has started this process; {known.world_size} process(es) are planned")
    elif num_started != known.world_size:
        yield warning(f"{num_started} processes were started, and --world-size {known.world_size} is what is checked")
    else:
        yield ok(f"{num_started} process(es), launcher {launcher!r}")
    yield from slurm_results(os.environ, launcher=launcher, world_size=known.world_size)
    dist.check_port()


def slurm_results(env: Mapping[str, str], *, launcher: str, world_size: int) -> Iterator[Checked]:
    """The variables of a SLURM job; outside of one nothing is known."""
    if "SLURM_JOB_ID" not in env:
        if launcher == "slurm":
            yield not_checked("launcher is 'slurm' and this is no SLURM job: its variables are not there")
        return
    tasks = int(env.get("SLURM_NTASKS", "1"))
    devices, on_node = int(env.get("SLURM_GPUS_ON_NODE", "0")), int(env.get("SLURM_NTASKS_PER_NODE", "0"))
    if launcher == "slurm" and tasks != world_size:
        yield problem(
            f"SLURM has {tasks} tasks (SLURM_NTASKS), and {world_size} processes are planned",
            remedy=f"sbatch --ntasks={world_size}, or --world-size {tasks}",
        )
    elif launcher == "none" and "SLURM_PROCID" in env and tasks > 1 and "WORLD_SIZE" not in env:
        yield problem(
            f"SLURM has started {tasks} tasks, and launcher is 'none': each would train alone, in the same work dir",
            remedy="--launcher slurm; or one task for each node, which starts torchrun",
        )
    else:
        yield ok(f"SLURM job {env['SLURM_JOB_ID']}, {tasks} tasks")
    if devices and on_node > devices and launcher == "slurm":
        yield problem(
            f"SLURM has {on_node} tasks and {devices} GPUs on a node",
            allowed="a GPU for each task",
            remedy=f"sbatch --gpus-per-node={on_node}, or --ntasks-per-node={devices}",
        )


_READ = PATH_KEYS - {"work_dir", "checkpoint_dir", "cache_dir", "save_dir", "root", "config", "resume"}
"""Keys whose files must be there. ``root`` is made by the demo's data set, ``config`` may be the name of a preset."""


def check_paths(known: Known) -> Iterator[Checked]:
    """Files and folders that are read."""
    paths = [(name, node[key]) for node, key, name in paths_in(known.config.values, _READ) if node[key]]
    if isinstance(resume := known.config.values.get("resume"), str) and resume != AUTO:
        paths.append(("resume", resume))
    for where, text in paths:
        path = os.path.expanduser(os.path.expandvars(text))
        is_remote = "://" in path or (is_hub_name(path.partition("@")[0]) and not Path(path).suffix)
        if is_remote and not Path(path).exists():
            yield not_checked(f"{where} {path}: whether the server has it is not asked")
        elif not (os.access(path, os.R_OK) or glob.glob(path)):
            remedy = f"check the path and its permissions; a relative one begins at {Path.cwd()}"
            yield problem(f"{where} is {path!r}, and it is not there or cannot be read", remedy=remedy)
    yield ok(f"{len(paths)} paths of the config were looked for")


def check_folders(known: Known) -> Iterator[Checked]:
    """Folders that are written: permissions, and whether another run uses them."""
    for key in ("work_dir", "checkpoint_dir"):
        if not isinstance(text := known.config.values.get(key), str):
            continue
        folder = Path(os.path.expanduser(os.path.expandvars(text.partition(PLACE)[0] or ".")))
        option = f"choose another --{key.replace('_', '-')}"
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        try:
            if not existing.is_dir():
                raise NotADirectoryError(f"{existing} is not a folder")
            with tempfile.TemporaryFile(dir=existing) as stream:  # without a name: gone when it is closed
                stream.write(b"1")
                stream.flush()
        except OSError as error:
            remedy = f"{option}, free disk space, or change the permissions of {existing}"
            yield problem(f"{key} {folder} cannot be written: {error}", remedy=remedy)
        else:
            yield ok(f"{key} {folder} can be written")
