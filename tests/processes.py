"""Real processes that run at the same time: the ranks of one job, without a launcher that would end all when one fails.

Their output goes into files, not into pipes: a rank whose pipe is full would wait for its reader, and the others for
the rank.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
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
"""What a process of a test inherits: no variable of a launcher, no GPU."""


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    status: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """All that it printed."""
        return self.out + self.err

    @property
    def ending(self) -> str:
        """For a failed assertion."""
        return f"exit status {self.status}\n{self.out[-3000:]}\n{self.err[-5000:]}"


def together(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], *, timeout_s: float = 240.0
) -> list[Ended]:
    """Run commands at the same time, each with further variables; those that are late are killed.

    Raises ``AssertionError`` with the output of all, if one has not ended after ``timeout_s``.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [[Path(folder, f"{number}.{name}") for name in ("out", "err")] for number in range(len(commands))]
        started: list[subprocess.Popen[bytes]] = []
        try:
            for command, environment, (out, err) in zip(commands, environments, files, strict=True):
                with out.open("wb") as stdout, err.open("wb") as stderr:
                    started.append(
                        subprocess.Popen(
                            list(command), cwd=ROOT, env={**ENVIRONMENT, **environment}, stdout=stdout, stderr=stderr
                        )
                    )
            late = _wait(started, timeout_s)
        finally:
            for process in started:
                process.kill()
                process.wait()
        ended = [
            Ended(process.returncode, *(path.read_text(encoding="utf-8", errors="replace") for path in pair))
            for process, pair in zip(started, files, strict=True)
        ]
    assert not late, f"not ended after {timeout_s:g} s: {late}\n" + "\n".join(one.ending for one in ended)
    return ended


def ranks(command: Sequence[str], *, world_size: int = 2, timeout_s: float = 240.0, **environment: str) -> list[Ended]:
    """The same command in every rank of one job, as torchrun starts it on one node, but without torchrun."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    return together(
        [command] * world_size,
        [{**shared, **environment, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)],
        timeout_s=timeout_s,
    )


def _wait(started: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> list[int]:
    """The numbers of those that have not ended in time."""
    end = time.monotonic() + timeout_s
    while (running := [n for n, process in enumerate(started) if process.poll() is None]) and time.monotonic() < end:
        time.sleep(0.02)
    return running
