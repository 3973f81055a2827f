"""One logger, rank-aware: console and file on rank 0, warnings with their rank elsewhere."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from datetime import datetime
from pathlib import Path

from unigen_ds.core.errors import ConfigError
from unigen_ds.system.files import make_directory

NAME = "unigen_ds"


class _LogFile(logging.FileHandler):
    """A log that cannot be written (a full disk) is one line on the console, not a traceback for each message."""

    failed = False

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what is still collected cannot be written
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:
        if not self.failed:
            self.failed = True
            with contextlib.suppress(OSError):  # the console may be a file on the same disk
                print(f"{self.baseFilename} cannot be written ({sys.exc_info()[1]}): see the console.", file=sys.stderr)


class _Console(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what ``sys.stderr`` is at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def logger() -> logging.Logger:
    """The project's logger. Usable before ``setup``."""
    return logging.getLogger(NAME)


_waiting: dict[str, None] = {}
_notices: set[str] = set()


def notice(text: str) -> None:
    """Log a line about the config or an import, once. ``setup`` repeats the earlier ones, for its file."""
    if not logger().handlers:
        _waiting[text] = None
    if text not in _notices:
        _notices.add(text)
        logger().info(text)


def pending_notices() -> list[str]:
    """Texts of ``notice`` that no log has: of a tool, which makes none. Each once."""
    texts = [*_waiting]
    _waiting.clear()
    return texts


LIBRARIES = ("torch", "bitsandbytes", "transformers", "deepspeed", "DeepSpeed", "mmengine")
# Lines of libraries in which there is nothing to do are hidden where this module is imported: before the libraries,
# which print some at their import. DeepSpeed and FSDP call these names, which torch 2.13 has renamed.
_RENAME_WARNING = r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated"
warnings.filterwarnings("ignore", _RENAME_WARNING, FutureWarning, r"torch\.distributed\.c10d_logger")
_HARMLESS = ("Failed to load CPU gemm_4bit_forward", "Setting accelerator to CPU")
for _name in ("bitsandbytes.backends.cpu.ops", "DeepSpeed"):  # mmengine's hooks import both
    logging.getLogger(_name).addFilter(lambda record: not record.getMessage().startswith(_HARMLESS))


def quiet_libraries(rank: int) -> None:
    """Hide libraries' warnings on every rank but 0. Called before torch is imported, which warns then, too."""
    if rank:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # those of torch's C++ part
        warnings.filterwarnings("ignore", module=rf"({'|'.join(LIBRARIES)})(\.|$)")
        for name in LIBRARIES:
            logging.getLogger(name).setLevel(logging.ERROR)


_of_start: dict[Path, Path] = {}
"""Log of the run -> log of this start."""


def setup(
    *, rank: int, log_file: Path | None = None, level: int | str = logging.INFO, new_start: bool = False
) -> logging.Logger:
    """Attach handlers once. Rank 0 writes to the console, to ``log_file`` (for ``tail -f``) and, anew for each
    ``new_start``, to ``logs/<stem>_<date>_<time>.log`` beside it. Other ranks print warnings, with their rank.
    """
    log = logger()
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    log.setLevel(level)
    log.propagate = False
    prefix = "" if rank == 0 else f"[rank {rank}] "
    form = logging.Formatter(f"%(asctime)s %(levelname)s {prefix}%(message)s", datefmt="%H:%M:%S")
    console = _Console()
    console.setFormatter(form)
    console.setLevel(level if rank == 0 else logging.WARNING)
    log.addHandler(console)
    if rank == 0 and log_file is not None:
        if new_start or log_file not in _of_start:
            name = f"{log_file.stem}_{datetime.now():%Y%m%d_%H%M%S}{log_file.suffix}"
            _of_start[log_file] = log_file.parent / "logs" / name
        of_start = _of_start[log_file]
        try:
            make_directory(of_start.parent)
            files = [_LogFile(path, mode="a", encoding="utf-8") for path in (log_file, of_start)]
        except OSError as error:
            problem = f"work_dir {log_file.parent} cannot be written: {error}"
            raise ConfigError(problem, remedy="choose another --work-dir, or free disk space") from error
        for file in files:
            file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
            log.addHandler(file)
    _notices.clear()
    for text in pending_notices():
        notice(text)
    return log
