"""A small file system of its own (tmpfs), where the kernel lets this process mount one. Needs no test framework."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from pathlib import Path

NO_PERMISSION = "this process has no permission to mount a small disk"
MOUNTED = "mounted.json"
"""Where a process that mounts for others records on the disk, or in its place, whether it could: true or false."""
_MNT_DETACH = 2


def mount(folder: Path, *, kib: int) -> bool:
    """Mount an empty tmpfs of ``kib`` KiB on ``folder``; False where this process has no permission to mount.

    Any other failure raises ``OSError``: a test may skip itself for the permission alone.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(0), f"size={kib}k".encode()) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EPERM, errno.EACCES):
        return False
    raise OSError(number, os.strerror(number), str(folder))


def unmount(folder: Path) -> None:
    """Let go of it, also while files on it are open."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(folder), _MNT_DETACH):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(folder))


def fill(disk: Path) -> None:
    """Use up every byte."""
    with (disk / "ballast").open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        while stream.write(bytes(4096)):
            pass
