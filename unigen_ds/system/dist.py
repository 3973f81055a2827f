"""Processes: start, sums, objects, also of one process alone. Objects and counts use gloo: no device sync."""

from __future__ import annotations

import atexit
import os
import re
import socket
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as td

from unigen_ds.core.errors import ConfigError, UnigenError
from unigen_ds.system.machine import env_number

T = TypeVar("T")
_timeout: timedelta | None = None
"""The timeout of the process groups, as ``init`` got it."""
_store: Any = None
_TCP: Any = td.TCPStore  # type: ignore[attr-defined]  # documented, and missing in its stubs
_PREFIX: Any = td.PrefixStore  # type: ignore[attr-defined]
_ENV = {
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    "mpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
}
_PROCESSES_OF_A_NODE = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE")
"""The variables of torchrun, the deepspeed launcher, MPI and SLURM (``4`` or ``4(x2)``)."""


def launcher_environment(launcher: str) -> None:
    """Set RANK, WORLD_SIZE and LOCAL_RANK from the launcher's own variables. ``none`` and ``pytorch`` keep them."""
    if launcher == "pytorch" and "RANK" not in os.environ:
        raise ConfigError(
            "launcher 'pytorch' needs RANK and WORLD_SIZE", remedy="start it with torchrun, or use --launcher none"
        )
    if launcher in _ENV:
        missing = [name for name in _ENV[launcher] if name not in os.environ]
        if missing:
            raise ConfigError(f"launcher {launcher!r} needs {', '.join(missing)} in the environment")
        for name, source in zip(("RANK", "WORLD_SIZE", "LOCAL_RANK"), _ENV[launcher], strict=True):
            os.environ[name] = os.environ[source]
        address, port = "127.0.0.1", "29500"
        if launcher == "slurm":  # the node of rank 0: ``gpu03-ib`` of ``gpu[03-04,7]-ib,n1``
            nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or ""
            if match := re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes):
                address = "".join(match.groups(""))
            if (job := os.environ.get("SLURM_JOB_ID", "")).isdecimal():  # jobs that share a node have different ports
                port = str(20000 + int(job) % 20000)
        os.environ.setdefault("MASTER_ADDR", address)
        os.environ.setdefault("MASTER_PORT", port)


def env_rank() -> int:
    """Rank as the launcher announces it, before any process group exists."""
    return env_number("RANK", 0)


def env_processes_per_node() -> int | None:
    """Processes of a node as the launcher announces them; None where it does not, or where nodes differ."""
    for name in _PROCESSES_OF_A_NODE:
        if number := os.environ.get(name):
            match = re.fullmatch(r"(\d+)(?:\(x\d+\))?", number)
            return int(match[1]) if match else None
    return 1 if env_world_size() == 1 else None


def env_world_size() -> int:
    """Process count as the launcher announces it, before any process group exists."""
    return env_number("WORLD_SIZE", 1)


def is_joined() -> bool:
    """Whether this process is in a process group: collectives work."""
    return td.is_initialized()


def init(*, timeout_s: float = 1800.0) -> None:
    """Join the process group that the environment describes; nothing to do for a single plain process."""
    if td.is_initialized() or "WORLD_SIZE" not in os.environ:
        return
    backend = "gloo"
    if torch.cuda.is_available():
        index, count = env_number("LOCAL_RANK", 0), torch.cuda.device_count()
        if count > 1 and index >= count:
            raise ConfigError(
                f"LOCAL_RANK is {index} and there are {count} CUDA devices",
                remedy=f"start at most {count} processes on a machine, one for each device",
            )
        torch.cuda.set_device(index if count > 1 else 0)  # the only one that a scheduler lets the process see
        backend = "cpu:gloo,cuda:nccl"
    global _timeout
    _timeout = timedelta(seconds=timeout_s)
    of_job: dict[str, Any] = {}
    if _store is not None:
        of_job = {"store": _PREFIX("group", _store), "rank": env_rank(), "world_size": env_world_size()}
    td.init_process_group(backend, timeout=_timeout, **of_job)
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):  # of the groups that DeepSpeed creates
        setattr(td.distributed_c10d, name, _timeout)


def open_store(*, timeout_s: float) -> Any:
    """The store of the processes that a launcher has started; None for one process, or where they joined without it.

    At MASTER_ADDR:MASTER_PORT: torchrun's, which stays at a restart, else rank 0's. Raises after ``timeout_s``.
    """
    global _store
    several = env_world_size() > 1 and {"RANK", "MASTER_ADDR"} <= os.environ.keys()
    if _store is None and several and not td.is_initialized():
        check_port()
        address, port = os.environ["MASTER_ADDR"], env_number("MASTER_PORT", 29500)
        store = _TCP(address, port, is_master=has_store(), timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
        names = ("TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE") if _of_torchrun() else ()  # another one is new each time
        _store = _PREFIX("/".join(["unigen_ds", *(os.environ.get(name, "0") for name in names)]), store)
    return _store


def job_store() -> Any:
    """Return the store that ``open_store`` has opened, else None."""
    return _store


def has_store() -> bool:
    """Whether the store is in this process, and ends with it."""
    return env_rank() == 0 and not _of_torchrun()


def _of_torchrun() -> bool:
    """Whether the store is that of torchrun's agent, which remains when processes are started again."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def group(ranks: Sequence[int]) -> td.ProcessGroup:
    """The group of ``ranks``, this one among them. Collective among these ranks alone; its timeout is ``init``'s."""
    if len(ranks) == world_size():
        return td.group.WORLD  # type: ignore[return-value]
    return td.new_group(list(ranks), timeout=_timeout, use_local_synchronization=True)


def ensure_initialized() -> None:
    """Create a process group even for one plain process: sharding engines need one."""
    if td.is_initialized():
        return
    if env_world_size() == 1:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**alone, "MASTER_PORT": str(free_port())}.items():
            os.environ.setdefault(name, value)
    init()


def check_port() -> None:
    """Raise ``ConfigError`` where another job uses MASTER_PORT, which rank 0 opens unless torchrun has."""
    if not has_store() or "WORLD_SIZE" not in os.environ or _store is not None:
        return
    port = env_number("MASTER_PORT", 29500)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ConfigError(
                f"MASTER_PORT {port} cannot be opened: {error.strerror}",
                remedy=f"another job uses it; MASTER_PORT={free_port()} is free just now",
            ) from error


def free_port() -> int:
    """A TCP port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank() -> int:
    return td.get_rank() if td.is_initialized() else env_rank()


def world_size() -> int:
    return td.get_world_size() if td.is_initialized() else env_world_size()


def is_main() -> bool:
    return rank() == 0


def _alone() -> bool:
    return not td.is_initialized() or td.get_world_size() == 1


def barrier() -> None:
    """Wait for all ranks, over gloo: the device continues to work. Collective."""
    sum_floats([0.0])


class PendingSum:
    """``sum_floats`` in the background. Every rank creates these, and waits for them, in the same order."""

    def __init__(self, values: Sequence[float]) -> None:
        self._tensor = torch.tensor(values, dtype=torch.float64)
        self._work = None if _alone() else td.all_reduce(self._tensor, async_op=True)

    def wait(self) -> list[float]:
        """The sums over ranks. Collective."""
        if self._work is not None:
            self._work.wait()
        return self._tensor.tolist()


def sum_floats(values: Sequence[float]) -> list[float]:
    """Sums over ranks of a list of float64, on the CPU. Collective."""
    return PendingSum(values).wait()


def gather_objects(value: Any) -> list[Any]:
    """The value of every rank, on every rank. For small values of our own making. Collective."""
    if _alone():
        return [value]
    values: list[Any] = [None] * td.get_world_size()
    td.all_gather_object(values, value)
    return values


def gather_to_main(value: Any) -> list[Any] | None:
    """The value of every rank, by rank, on rank 0; None elsewhere. Collective."""
    if _alone():
        return [value]
    values: list[Any] | None = [None] * td.get_world_size() if is_main() else None
    td.gather_object(value, values, dst=0)
    return values


def broadcast_object(value: Any) -> Any:
    """Rank 0's value, on every rank. Collective."""
    if _alone():
        return value
    box = [value]
    td.broadcast_object_list(box, src=0)
    return box[0]


def on_main(action: Callable[[], T]) -> T:
    """Rank 0's ``action()``, its value on every rank; where it fails, it fails on every rank alike. Collective."""
    if _alone():
        return action()
    outcome: tuple[Any, Exception | None] = (None, None)
    if is_main():
        try:
            outcome = (action(), None)
        except (UnigenError, OSError) as error:
            outcome = (None, error)
        except Exception as error:  # others may not survive being pickled
            outcome = (None, RuntimeError(f"rank 0: {type(error).__name__}: {error}"))
    value, failure = broadcast_object(outcome)
    if failure is not None:
        raise failure
    return value


def shutdown(*, after_error: bool = False) -> None:
    """Leave the process group. Not collective. After an error NCCL's stays: to destroy it waits for other ranks."""
    global _store
    if td.is_initialized() and not (after_error and "nccl" in td.get_backend_config()):
        td.destroy_process_group()
        _store = _store and _PREFIX("next", _store)  # what this group has left there is not of another one


def leave(status: int) -> None:
    """End the process here if it is one of several, after what ``atexit`` has. Threads of gloo and DeepSpeed sometimes
    abort an ordinary exit: all is saved by then, but a launcher sees a failure and ends the other processes.
    """
    if env_world_size() > 1:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
