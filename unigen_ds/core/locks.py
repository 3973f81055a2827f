"""A lock file that one process holds at a time: ``filelock`` on a lock of the kernel's, which ends with the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock


@contextmanager
def held(path: Path) -> Iterator[OSError | None]:
    """Wait until this process holds the lock of ``path``; a context.

    Its value is None, or why no lock is held: the file system has none, or the file cannot be made (a read-only folder,
    a full disk). The caller decides whether to continue without. Its soft locks, which a killed process leaves, are
    not used.
    """
    lock = FileLock(path, fallback_to_soft=False)
    problem: OSError | None = None
    try:
        lock.acquire()
    except OSError as error:
        problem = error
    try:
        yield problem
    finally:
        if problem is None:
            lock.release()
