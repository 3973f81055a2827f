"""Real processes that run at the same time: the ranks of one job, without a launcher that ends all when one fails.

Their output is also read at the same time: a rank whose pipe is full would wait for its reader, and the others for it.

Most tests need a process, not a new interpreter. ``popen`` and ``run`` fork it from a server that has imported torch
and other large packages (``fork_server.py``), which saves 4 to 6 s of CPU time: a process with its own pid,
environment, working directory and files, which ends, is signalled and is killed like any other. What could differ is
started by exec: another interpreter, options of the interpreter, and variables that packages read when they are
imported. A test of what is imported, or printed while it is, uses ``subprocess``; so does one of two processes whose
results are compared to the last bit, because all forks have one seed for hashes of strings.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.support.fork_server import SIZE
from unigen_ds.system.dist import free_port

ROOT = Path(__file__).resolve().parents[2]
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SET_BY_IMPORTS = (
    "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK",  # scikit-learn
    "QT_QPA_FONTDIR", "QT_QPA_PLATFORM_PLUGIN_PATH", "LD_LIBRARY_PATH",  # OpenCV
    "TORCHINDUCTOR_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK",
    "PYTORCH_CUDA_ALLOC_CONF",  # a run in this process
)  # fmt: skip
"""What packages set in this process when they are imported, and a run when it starts."""
_STARTED = Path("/proc/self/environ")
_STARTED_WITH = dict(
    entry.split("=", 1) for entry in (_STARTED.read_text() if _STARTED.exists() else "").split("\0") if "=" in entry
)


def as_of_a_user(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what imports have set here: a process that a user starts has none of it."""
    rest = {name: value for name, value in environment.items() if name not in SET_BY_IMPORTS}
    return rest | {name: _STARTED_WITH[name] for name in SET_BY_IMPORTS if name in _STARTED_WITH}


ENVIRONMENT = {k: v for k, v in as_of_a_user(os.environ).items() if k not in _LAUNCHER} | {
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONPATH": str(ROOT),
}
"""The environment of a test's process: no variable of a launcher, no GPU."""
_FREE = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR",
    "KILL_AT", "SLOW", "WANDB_MODE", "PYTHONPATH", "PYTEST_CURRENT_TEST", "PWD", "OLDPWD", "SHLVL", "_",
}  # fmt: skip
"""Variables that nothing which the server imports reads at its import: they may differ from the server's."""
_FREE_BEGINNINGS = ("SLURM_", "OMPI_")
_SERVER_OF_HUB = ("HF_ENDPOINT", "HF_HOME", "HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_XET", "NO_PROXY")
"""Where a server is given: a fork reads huggingface_hub's own variables anew (``fork_server.become``)."""


def forkable(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether a fork of the server is the same for the program as a new interpreter."""
    if len(command) < 2 or command[0] != sys.executable or not hasattr(os, "pidfd_open"):
        return False
    if command[1] not in ("-m", "-c") and not command[1].endswith(".py"):
        return False
    free = _FREE if torch.cuda.is_available() else _FREE | {"CUDA_VISIBLE_DEVICES"}
    if torch.cuda.is_available():
        free = free - {"DS_ACCELERATOR"}
    elif environment.get("DS_ACCELERATOR", "cpu") != "cpu":
        return False  # DeepSpeed has chosen when it was imported: the only one there is
    if "HF_ENDPOINT" in environment:
        free = free.union(_SERVER_OF_HUB)
    names = {name for name in environment.keys() | ENVIRONMENT.keys() if not name.startswith(_FREE_BEGINNINGS)} - free
    return all(environment.get(name) == ENVIRONMENT.get(name) for name in names)


def popen(command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, **how: Any) -> subprocess.Popen[Any]:
    """``subprocess.Popen``; a fork of the server where that is the same."""
    texts = [os.fspath(part) for part in command]
    environment = as_of_a_user(os.environ if env is None else env)
    kind = ForkedProcess if forkable(texts, environment) else subprocess.Popen
    return kind(texts, env=environment, **how)


def run(command: Sequence[str | Path], *, timeout: float | None = None, **how: Any) -> subprocess.CompletedProcess[Any]:
    """``subprocess.run`` that captures the output; a fork of the server where that is the same."""
    with popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


class ForkedProcess(subprocess.Popen):  # type: ignore[type-arg]
    """A process forked by the server, which waits for it and sends its exit status."""

    _parameters = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]

    def _execute_child(self, *positional: Any) -> None:
        arguments = self._parameters.bind(self, *positional).arguments
        pipes = [arguments[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        files = [own if own != -1 else number for number, own in enumerate((pipes[0], pipes[3], pipes[5]))]
        environment = os.environ if arguments["env"] is None else arguments["env"]
        request = {
            "executable": os.fspath(arguments["args"][0]),
            "command": [os.fspath(part) for part in arguments["args"]][1:],
            "environment": dict(environment),
            "folder": os.path.abspath(arguments["cwd"] or "."),
            "new_session": bool(arguments["start_new_session"]),
            "interruptible": signal.getsignal(signal.SIGINT) is not signal.SIG_IGN,
        }
        try:
            self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._server.connect(server().address)
            body = json.dumps(request).encode()
            socket.send_fds(self._server, [len(body).to_bytes(SIZE, "big")], files)
            self._server.sendall(body)
            self.pid = int(self._line())
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _line(self) -> str:
        """What the server sends next: the pid, then the exit status."""
        text = b""
        while not text.endswith(b"\n"):
            if not (more := self._server.recv(1)):
                raise RuntimeError("the server of forks has ended")
            text += more
        return text.decode()

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._wait(0.0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self.returncode is None:
                if not select.select([self._server], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
                self.returncode = int(self._line())
                self._server.close()
            return self.returncode

    def send_signal(self, sig: int) -> None:
        """To the process itself; a process that has ended gets none."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)


class Server:
    """The server's process, and where it listens."""

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix="forks-")
        self.address = f"{folder}/address"
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(self.address)
            listening.listen(64)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server", str(listening.fileno())],
                cwd=ROOT, env=ENVIRONMENT, stdin=subprocess.PIPE, pass_fds=[listening.fileno()],
            )  # fmt: skip
        self.pid = self._process.pid
        atexit.register(self._stop, os.getpid(), folder)

    def _stop(self, owner: int, folder: str) -> None:
        if os.getpid() == owner:  # not a process that was forked since
            self._process.kill()
            self._process.wait()
            shutil.rmtree(folder, ignore_errors=True)


@cache
def server() -> Server:
    """Of this process, and of those that it forks from now on."""
    return Server()


def forked_python(folder: Path) -> str:
    """A program in ``folder`` that is called as Python is and is a fork of the server (``forked_python.py``), for
    scripts and launchers that start Python themselves.

    The processes must end by themselves: one that is killed with SIGKILL leaves its fork."""
    program = folder / "python"
    first = f"#!/bin/sh\nexec {sys.executable} -S -E {Path(__file__).parent}/forked_python.py"
    program.write_text(f'{first} {server().address} {sys.executable} "$0" "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    return str(program)


@dataclass(frozen=True)
class Exit:
    """How a process ended."""

    status: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """Its whole output."""
        return self.out + self.err

    @property
    def ending(self) -> str:
        """For a failed assertion."""
        return f"exit status {self.status}\n{self.out[-3000:]}\n{self.err[-5000:]}"


def together(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    *,
    timeout_s: float = 240.0,
    cwd: Path = ROOT,
) -> list[Exit]:
    """Run commands at the same time, each with additional variables; after ``timeout_s`` they are killed.

    Raises ``AssertionError`` with the output of all, if one had to be killed."""
    processes: list[subprocess.Popen[Any]] = []
    end = time.monotonic() + timeout_s
    with ThreadPoolExecutor(max_workers=len(commands)) as readers:
        try:
            for command, environment in zip(commands, environments, strict=True):
                processes.append(
                    popen(
                        command,
                        cwd=cwd,
                        env={**ENVIRONMENT, **environment},
                        text=True,
                        errors="replace",
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                    )
                )
            outputs = [readers.submit(process.communicate) for process in processes]
            late = _wait(processes, end)
        finally:
            for process in processes:
                process.kill()
        results = [Exit(process.returncode, *one.result()) for process, one in zip(processes, outputs, strict=True)]
    assert not late, f"not ended after {timeout_s:g} s: {late}\n" + "\n".join(one.ending for one in results)
    return results


def ranks(
    command: Sequence[str], *, world_size: int = 2, timeout_s: float = 240.0, cwd: Path = ROOT, **environment: str
) -> list[Exit]:
    """The same command in every rank of one job, started as by torchrun on one node, but without torchrun."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    return together(
        [command] * world_size,
        [{**shared, **environment, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)],
        timeout_s=timeout_s,
        cwd=cwd,
    )


def _wait(processes: Sequence[subprocess.Popen[Any]], end: float) -> list[int]:
    """The numbers of those that have not ended in time. Another thread reads their output and waits for them."""
    while (running := [n for n, process in enumerate(processes) if process.poll() is None]) and time.monotonic() < end:
        time.sleep(0.02)
    return running
