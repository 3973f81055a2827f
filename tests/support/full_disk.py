"""A disk on which the N-th change below a folder fails, for all code of a process: Python, torch's C++, Rust.

``library`` compiles ``full_disk.c``; a process started with ``LD_PRELOAD`` set to it, and its forks, can ``arm`` it.
"""

from __future__ import annotations

import ctypes
import errno
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


def library(folder: Path) -> Path:
    """Compile it into ``folder`` (half a second)."""
    path = folder / "full_disk.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(path), str(SOURCE), "-ldl"], check=True)
    return path


def arm(folder: Path, number: int, *, lasting: bool = False, error: int = errno.ENOSPC) -> None:
    """Let the ``number``-th change below ``folder`` fail; with ``lasting`` also every later one. Error 0: none fails,
    and every write accepts half of what it is given."""
    ctypes.CDLL(None).full_disk_arm(str(folder).encode(), ctypes.c_long(number), int(lasting), error)


def disarm() -> str:
    """Disable it. Returns the failed operation, ``"write /path"``; empty if none failed."""
    call = ctypes.CDLL(None).full_disk_disarm
    call.restype = ctypes.c_char_p
    return call().decode()
