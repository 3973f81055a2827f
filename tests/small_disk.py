"""A small separate file system (tmpfs), if this process may mount one. Independent of the test framework."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from pathlib import Path

NO_PERMISSION = "this process has no permission to mount a small disk"
_MNT_DETACH = 2


def mount(folder: Path, *, kib: int) -> bool:
    """Mount an empty tmpfs of ``kib`` KiB on ``folder``; False if this process has no permission to mount.

    Any other failure raises ``OSError``: a test may be skipped only for a missing permission.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(0), f"size={kib}k".encode()) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EPERM, errno.EACCES):
        return False
    raise OSError(number, os.strerror(number), str(folder))


def unmount(folder: Path) -> None:
    """Unmount it, also while files on it are open."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(folder), _MNT_DETACH):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(folder))


def fill(disk: Path) -> None:
    """Fill it completely."""
    with (disk / "ballast").open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        while stream.write(bytes(4096)):
            pass
