"""Real processes that run at the same time: the ranks of one job, without a launcher that ends all when one fails.

Their output is also read at the same time: a rank whose pipe is full would wait for its reader, and the others for it.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from unigen_ds.core.dist import free_port

ROOT = Path(__file__).resolve().parents[1]
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in _LAUNCHER} | {
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONPATH": str(ROOT),
}
"""The environment of a test's process: no variable of a launcher, no GPU."""


@dataclass(frozen=True)
class Ended:
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
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], *, timeout_s: float = 240.0
) -> list[Ended]:
    """Run commands at the same time, each with additional variables; after ``timeout_s`` they are killed.

    Raises ``AssertionError`` with the output of all, if one had to be killed.
    """
    started: list[subprocess.Popen[str]] = []
    end = time.monotonic() + timeout_s
    with ThreadPoolExecutor(max_workers=len(commands)) as readers:
        try:
            for command, environment in zip(commands, environments, strict=True):
                started.append(
                    subprocess.Popen(
                        list(command),
                        cwd=ROOT,
                        env={**ENVIRONMENT, **environment},
                        text=True,
                        errors="replace",
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                    )
                )
            printed = [readers.submit(process.communicate) for process in started]
            late = _wait(started, end)
        finally:
            for process in started:
                process.kill()
        ended = [Ended(process.returncode, *one.result()) for process, one in zip(started, printed, strict=True)]
    assert not late, f"not ended after {timeout_s:g} s: {late}\n" + "\n".join(one.ending for one in ended)
    return ended


def ranks(command: Sequence[str], *, world_size: int = 2, timeout_s: float = 240.0, **environment: str) -> list[Ended]:
    """The same command in every rank of one job, started as by torchrun on one node, but without torchrun."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    return together(
        [command] * world_size,
        [{**shared, **environment, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)],
        timeout_s=timeout_s,
    )


def _wait(started: Sequence[subprocess.Popen[str]], end: float) -> list[int]:
    """The numbers of those that have not ended in time. Another thread reads their output and waits for them."""
    while (running := [n for n, process in enumerate(started) if process.poll() is None]) and time.monotonic() < end:
        time.sleep(0.02)
    return running
