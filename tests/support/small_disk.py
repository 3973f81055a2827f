"""A small separate file system (tmpfs), if this process may mount one. Independent of the test framework."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from pathlib import Path

NO_PERMISSION = "this process has no permission to mount a small disk"
_MNT_DETACH = 2
_MS_RDONLY, _MS_REMOUNT, _MS_BIND = 1, 32, 4096


def mount(folder: Path, *, kib: int, inodes: int = 0) -> bool:
    """Mount an empty tmpfs of ``kib`` KiB on ``folder``, for any number of files or for ``inodes``; False if this
    process has no permission to mount.

    Any other failure raises ``OSError``: a test may be skipped only for a missing permission.
    """
    return _mount("tmpfs", folder, 0, f"size={kib}k,nr_inodes={inodes}")


def bind(source: Path, folder: Path, *, read_only: bool = False) -> None:
    """Have ``source`` at ``folder``, too."""
    _mount(source, folder, _MS_BIND)
    if read_only:
        _mount(source, folder, _MS_BIND | _MS_REMOUNT | _MS_RDONLY)


def _mount(source: str | Path, folder: Path, flags: int, options: str = "") -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(os.fsencode(source), os.fsencode(folder), b"tmpfs", ctypes.c_ulong(flags), options.encode()) == 0:
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
