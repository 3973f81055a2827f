"""New processes that measure themselves, and the anonymous memory of one."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unigen_ds.system import dist

SAMPLED_S = 0.005


class Memory(threading.Thread):
    """The largest ``RssAnon`` of this process inside the context, and the value before it. Bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._done = threading.Event()
        self.before = self.highest = 0

    @staticmethod
    def now() -> int:
        text = Path("/proc/self/status").read_text()
        return 1024 * int(text.partition("RssAnon:")[2].split()[0])

    @staticmethod
    def settle() -> int:
        """After freed memory is returned to the system: blocks kept by malloc would hide later allocations."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        return Memory.now()

    def run(self) -> None:
        while not self._done.wait(SAMPLED_S):
            self.highest = max(self.highest, self.now())

    def __enter__(self) -> Memory:
        self.before = self.highest = self.settle()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.highest = max(self.highest, self.now())
        self._done.set()
        self.join()


def launch(script: str, task: Mapping[str, Any], *, world: int, name: str) -> list[dict[str, Any]]:
    """Run ``script --worker TASK`` in ``world`` processes; each ends with ``finish``. Returns every rank's result."""
    with tempfile.TemporaryDirectory() as results:
        task = {**task, "result": f"{results}/{{rank}}.json"}
        port, processes = dist.free_port(), []
        for rank in range(world):
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            variables = {key: str(value) for key, value in {**ranks, **address}.items() if world > 1}
            log = open(Path(results) / f"{rank}.log", "w+")  # noqa: SIM115 - read below
            command = [sys.executable, script, "--worker", json.dumps(task)]
            processes.append((subprocess.Popen(command, env={**os.environ, **variables}, stdout=log, stderr=log), log))
        for process, log in processes:
            if process.wait(timeout=1800):
                log.seek(0)
                raise SystemExit(f"{name} failed:\n{log.read()[-4000:]}")
        return [json.loads((Path(results) / f"{rank}.json").read_text()) for rank in range(world)]


def finish(task: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    """Write a worker's result and end the process."""
    Path(task["result"].format(rank=dist.rank())).write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # an ordinary exit with DeepSpeed sometimes aborts
