"""One run at a time in a folder: two would void each other's metrics, and delete each other's unfinished saves.

A POSIX record lock on ``.lock``: the kernel drops it when the process dies, however it dies, and worker processes do
not inherit it. Network file systems pass it between machines; where one has no locks, the run continues without.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import IO

from unigen_ds.core.errors import ConfigError, TrainingError
from unigen_ds.core.files import fsync_path, make_directory
from unigen_ds.core.log import logger

FILE_NAME = ".lock"
_FLOCK = "hhqqi4x"
"""``struct flock`` of Linux on 64 bits: type, whence, start, length, process."""


def other_owner(folder: Path) -> str | None:
    """Which other process trains in ``folder``, as it has described itself; None: none does, or it is not known.

    Asks without locking, so a run that starts at the same time is not disturbed. Writes nothing. A lock of this process
    itself is not seen.
    """
    try:
        with (folder / FILE_NAME).open("r+", encoding="utf-8") as stream:
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            held = struct.unpack(_FLOCK, fcntl.fcntl(stream, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK
            return (stream.read().strip() or "its file has no name") if held else None
    except OSError:
        return None


class WorkDirLock:
    """Held from construction until ``release``. ``exclusive`` is False where the file system has no locks.

    ``key``: of the config that names the folder. Raises ``ConfigError`` when another process holds it or the folder
    cannot be written.
    """

    def __init__(self, work_dir: Path, *, key: str = "work_dir") -> None:
        try:
            make_directory(work_dir)
            with contextlib.suppress(PermissionError):  # a parent that may be passed through, but not read
                fsync_path(work_dir.absolute().parent)
            self._stream: IO[str] = (work_dir / FILE_NAME).open("a+", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{key} {work_dir} cannot be written: {error}") from error
        self._work_dir, self._key = work_dir, key
        self.exclusive = True
        try:
            fcntl.lockf(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                self._stream.seek(0)
                owner = self._stream.read().strip()
                self._stream.close()
                raise ConfigError(
                    f"another process trains in {work_dir} ({owner})",
                    remedy=f"wait until it has ended, stop it, or choose another --{key.replace('_', '-')}",
                ) from error
            logger().warning(
                "%s has no file locks (%s): nothing prevents two runs at the same time there.", work_dir, error
            )
            self.exclusive = False
            return
        try:
            self._stream.truncate(0)
            self._stream.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            self._stream.flush()
        except OSError as error:
            with contextlib.suppress(OSError):
                self._stream.close()
            raise ConfigError(f"{key} {work_dir} cannot be written: {error}") from error

    def check(self) -> None:
        """Raises ``TrainingError`` where the folder is no longer the one that was locked."""
        held = os.fstat(self._stream.fileno())
        try:
            found = (self._work_dir / FILE_NAME).stat()
        except OSError:
            found = None
        if found is None or (found.st_dev, found.st_ino) != (held.st_dev, held.st_ino):
            raise TrainingError(
                f"{self._key} {self._work_dir} was moved or deleted during the run",
                remedy="move it back: the next save then succeeds; from a deleted folder nothing can be"
                " resumed, so start the run again",
            )

    def release(self) -> None:
        """Safe to call twice. The file stays: removing it would let two processes lock two files of one name."""
        self._stream.close()
