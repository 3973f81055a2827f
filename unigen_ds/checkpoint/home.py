"""Where the checkpoints of a run are: in its work dir, or in ``checkpoint_dir`` of its config.

With a ``checkpoint_dir`` each of the two folders has a file of one line. ``WORK_DIR/checkpoint_dir.txt`` names the
folder of the checkpoints, so that every tool finds them that is passed the work dir; ``CHECKPOINT_DIR/work_dir.txt``
names the run that they belong to, so that no other one continues from them, counts them or deletes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import socket
from pathlib import Path

from unigen_ds.checkpoint import store
from unigen_ds.core.errors import CheckpointError, ConfigError, TrainingError
from unigen_ds.system.files import fsync_path, make_directory, read_line, write_text_atomic
from unigen_ds.system.journals import METRICS_FILE
from unigen_ds.system.log import logger

LINK = "checkpoint_dir.txt"
"""File of a work dir: the folder of its checkpoints."""
OWNER = "work_dir.txt"
"""File of a checkpoint dir: the work dir of its run."""
RUN = "run_id.txt"
"""File of a work dir: the id of its run and, in a second line, the folder itself."""


def home_of(directory: Path) -> Path:
    """The folder of the checkpoints of a work dir (``CheckpointError`` where that is gone); any other path as it is."""
    line = read_line(directory / LINK)
    if line is None:
        return directory
    home = Path(line)
    if not home.is_dir():
        raise CheckpointError(
            f"the checkpoints of {directory} are in {home}, as {directory / LINK} states, and there is no such folder",
            remedy=f"restore it; if it was moved, write its present path into {directory / LINK}",
        )
    return home


def run_of(home: Path) -> Path:
    return Path(read_line(home / OWNER) or home)


def check_home(work_dir: Path, home: Path) -> None:
    """Raise ``ConfigError`` for a ``home`` without the checkpoints of this run, or with another's. Reads files only."""
    line = read_line(work_dir / LINK)
    before = work_dir if line is None else Path(line)
    if not same(before, home) and (checkpoints := store.list_checkpoints(before)):
        keep = "leave checkpoint_dir out" if same(before, work_dir) else f"--checkpoint-dir {before}"
        raise ConfigError(
            f"the run in {work_dir} has {len(checkpoints)} checkpoint(s) in {before}, and checkpoint_dir is {home}",
            remedy=f"{keep} to continue it; or first move all that is in {before} and belongs to checkpoints (their"
            f" folders, {store.HINT}, lineage.json) to {home}; or another --work-dir for another run",
        )
    if line is not None and same(before, home) and not home.is_dir():
        raise ConfigError(
            f"the checkpoints of the run in {work_dir} were in {home}, and there is no such folder",
            remedy=f"restore it; or delete {work_dir / LINK} to begin without them",
        )
    owner = Path(read_line(home / OWNER) or work_dir)
    if not same(owner, work_dir) and not same(Path(read_line(owner / LINK) or owner), home):
        owner = work_dir  # that run has moved on to another folder
    if not same(work_dir, home) and (home / METRICS_FILE).exists():
        owner = home
    if not same(owner, work_dir):
        raise ConfigError(
            f"{home} has the checkpoints of the run in {owner}, and this run is in {work_dir}",
            allowed="a folder of checkpoints for each run",
            remedy=f"another --checkpoint-dir; or, to continue that run, --work-dir {owner}",
        )


def claim(work_dir: Path, home: Path) -> None:
    """Write the two files (rank 0, both folders locked). Checks again: another run may have had the lock in between."""
    check_home(work_dir, home)
    if same(work_dir, home):
        for name in (LINK, OWNER):
            (work_dir / name).unlink(missing_ok=True)
        return
    for file, path in ((work_dir / LINK, home.resolve()), (home / OWNER, work_dir.resolve())):
        if read_line(file) != str(path):
            write_text_atomic(file, f"{path}\n")


def run_id(work_dir: Path) -> str:
    """The id of the run in a work dir: drawn at its first start, and kept over resumes and when the folder is moved. A
    copy of the folder, and a resume into another one, are runs of their own. Called on rank 0, with the folder locked.
    """
    file, here = work_dir / RUN, str(work_dir.resolve())
    identifier, _, folder = (read_line(file) or "").partition("\n")
    first = Path(folder) / RUN
    is_id = re.fullmatch("[0-9a-f]{16}", identifier) is not None
    moved = folder != here and not (first.is_file() and first.samefile(file))
    copied = moved and (read_line(first) or "").partition("\n")[0] == identifier
    if copied or not is_id:
        identifier = secrets.token_hex(8)
    if read_line(file) != f"{identifier}\n{here}":
        write_text_atomic(file, f"{identifier}\n{here}\n")
    return identifier


def same(one: Path, other: Path) -> bool:
    """Whether two paths are the same folder, which need not exist."""
    return one.resolve() == other.resolve()


# One run at a time in a folder: two would void each other's metrics, and delete each other's unfinished saves.

_FILE_NAME = ".lock"


def is_locked(work_dir: Path) -> bool:
    """Whether a process of this machine has the lock of a work dir (Linux lists all locks)."""
    with contextlib.suppress(OSError):
        number = (work_dir / _FILE_NAME).stat().st_ino
        return any(f":{number} " in line for line in Path("/proc/locks").read_text().splitlines())
    return False


class WorkDirLock:
    """Held from construction until ``release``. ``exclusive`` is False where the file system has no locks. Raises
    ``ConfigError``, naming the config's ``key``, when another process holds it or the folder cannot be written.
    """

    def __init__(self, work_dir: Path, *, key: str = "work_dir") -> None:
        self._work_dir, self._key, self.exclusive = work_dir, key, True
        try:
            make_directory(work_dir)
            with contextlib.suppress(PermissionError):  # a parent that may be passed through, but not read
                fsync_path(work_dir.absolute().parent)
            self._stream = (work_dir / _FILE_NAME).open("a+", encoding="utf-8")
            try:
                fcntl.lockf(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError) as error:
                self._stream.seek(0)
                owner = self._stream.read().strip()
                self._stream.close()
                raise ConfigError(
                    f"another process trains in {work_dir} ({owner})",
                    remedy=f"wait until it has ended, stop it, or choose another --{key.replace('_', '-')}",
                ) from error
            except OSError as error:
                text = "%s has no file locks (%s): nothing prevents two runs at the same time there."
                logger().warning(text, work_dir, error)
                self.exclusive = False
                return
            self._stream.truncate(0)
            self._stream.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            self._stream.flush()
        except OSError as error:
            raise ConfigError(f"{key} {work_dir} cannot be written: {error}") from error

    def check(self) -> None:
        """Raises ``TrainingError`` where the folder is no longer the one that was locked."""
        own = os.fstat(self._stream.fileno())
        try:
            present = (self._work_dir / _FILE_NAME).stat()
        except OSError:
            present = None
        if present is None or (present.st_dev, present.st_ino) != (own.st_dev, own.st_ino):
            raise TrainingError(
                f"{self._key} {self._work_dir} was moved or deleted during the run, or its disk is no longer mounted",
                remedy="move it back, or mount it: the next save then succeeds; from a deleted folder nothing can be"
                " resumed, so start the run again",
            )

    def release(self) -> None:
        """Safe to call twice. The file stays: removing it would let two processes lock two files of one name."""
        self._stream.close()
