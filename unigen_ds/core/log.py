"""One logger, rank-aware: console and file on rank 0, warnings with their rank elsewhere."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

NAME = "unigen_ds"


def logger() -> logging.Logger:
    """The project's logger. Usable before ``setup``."""
    return logging.getLogger(NAME)


LIBRARIES = ("torch", "bitsandbytes", "transformers", "deepspeed", "DeepSpeed", "mmengine")


def quiet_libraries(rank: int) -> None:
    """On every rank but 0, hide the warnings of libraries: each would be printed once for every process.

    Call it before torch is imported, which warns then, too. Errors, and warnings of this project, are shown everywhere.
    """
    if rank == 0:
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # those of torch's C++ part
    warnings.filterwarnings("ignore", module=rf"({'|'.join(LIBRARIES)})(\.|$)")
    for name in LIBRARIES:
        logging.getLogger(name).setLevel(logging.ERROR)


def setup(*, rank: int, log_file: Path | None = None, level: int = logging.INFO) -> logging.Logger:
    """Attach handlers once per process. Rank 0 writes to the console and appends to ``log_file``, which can be tailed.

    Other ranks print warnings and errors only, prefixed with their rank.
    """
    log = logger()
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    log.setLevel(level)
    log.propagate = False
    prefix = "" if rank == 0 else f"[rank {rank}] "
    form = logging.Formatter(f"%(asctime)s %(levelname)s {prefix}%(message)s", datefmt="%H:%M:%S")
    console = logging.StreamHandler(sys.stderr)
    console.setFormatter(form)
    console.setLevel(level if rank == 0 else logging.WARNING)
    log.addHandler(console)
    if rank == 0 and log_file is not None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(log_file, mode="a", encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(file)
    return log
