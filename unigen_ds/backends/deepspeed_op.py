"""The operator that DeepSpeed compiles on a machine without CUDA: sums through shared memory.

torch marks a build with a file named ``lock``, which remains after a killed process: every later start would wait for
ever. Here one process of a machine builds at a time, under a lock that the kernel releases, and deletes what a killed
one left. Source: torch 2.13 ``FileBaton``; pytorch issue 189245.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import time
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from unigen_ds.core.errors import ConfigError
from unigen_ds.core.locks import held
from unigen_ds.core.log import logger

NAME = "deepspeed_shm_comm"
_OURS = "unigen_ds.lock"
QUIET_S = 120.0
"""A build that has written nothing for so long is considered killed: a complete build needs about 30 s."""


def check_build_tools() -> None:
    """Raises ``ConfigError`` where the operator was not built yet and cannot be."""
    if torch.cuda.is_available():
        return
    built = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions"))
    if any(built.glob(f"**/{NAME}/*.so")):
        return
    beside = str(Path(sys.executable).parent)
    missing = [tool for tool in ("g++", "ninja") if not shutil.which(tool) and not shutil.which(tool, path=beside)]
    if missing:
        raise ConfigError(
            f"DeepSpeed must compile its shared-memory operator and {' and '.join(missing)} cannot be found",
            remedy="install them (apt-get install g++ ninja-build), or use --backend fsdp:FULL_SHARD",
        )


def load_shared_memory_op(*, quiet_s: float = QUIET_S) -> None:
    """Compile (30 s to two minutes, once per machine) and load the operator; DeepSpeed then finds it loaded.

    Rank 0 logs it before it waits for another process that may compile, too. Nothing to do with CUDA. The build of
    another process is waited for until it has written nothing for ``quiet_s``.
    """
    # DeepSpeed compiles with ninja, which pip puts beside the interpreter
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    if torch.cuda.is_available():
        return
    from torch.utils.cpp_extension import _get_build_directory

    deepspeed_comm: Any = import_module("deepspeed.comm.torch")  # ``deepspeed.comm`` has torch itself under that name
    folder = Path(_get_build_directory(NAME, False))
    if not any(folder.glob("*.so")):
        kept = os.environ.get("TORCH_EXTENSIONS_DIR") or folder.parents[1]
        logger().info("DeepSpeed compiles its shared-memory operator: once, up to two minutes; it is kept in"
                      " TORCH_EXTENSIONS_DIR=%s.", kept)  # fmt: skip
    with held(folder / _OURS) as problem:
        if problem is not None:
            logger().warning(
                "No lock at %s (%s): do not start two runs before DeepSpeed's operator is built", folder, problem
            )
        _clear_abandoned(folder / "lock", quiet_s)
        with redirect_stdout(io.StringIO()):  # a line that it was built, also where it was there
            operator = deepspeed_comm.build_shm_op()
    deepspeed_comm.build_shm_op = lambda: operator


def _clear_abandoned(lock: Path, quiet_s: float) -> None:
    """Wait while a process that does not use this function builds; remove ``lock`` when none builds any more."""
    logged = False
    while lock.exists():
        try:
            quiet = time.time() - max(path.stat().st_mtime for path in lock.parent.iterdir() if path.name != _OURS)
        except FileNotFoundError:  # deleted by another process
            continue
        if quiet > quiet_s:
            logger().warning("%s was left by a build that was killed: removed", lock)
            lock.unlink(missing_ok=True)
        elif not logged:
            logged = True
            logger().info("another process may be building %s: waiting up to %.0f s", NAME, quiet_s - quiet)
        else:
            time.sleep(0.1)
