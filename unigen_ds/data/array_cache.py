"""Arrays that are computed once and kept in a file beside the data: written whole, locked, checked by their key."""

from __future__ import annotations

import atexit
import hashlib
import os
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from unigen_ds.core import dist
from unigen_ds.core.files import write_atomic
from unigen_ds.core.locks import held
from unigen_ds.core.log import logger
from unigen_ds.data.counts import Array

FOLDER = ".unigen_index"
_STARTED, _STAGGER_S = time.time(), 60.0
"""When this process began, and how much later than another one of the same start it may have."""


def fingerprint(*facts: object) -> str:
    """BLAKE2b-128 of the texts of ``facts``, hex."""
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def cache_folder(path: Path, cache_dir: Path | None) -> Path | None:
    """The folder for cached arrays of a data file: beside it, else ``cache_dir``, else none (with a warning).

    An existing read-only folder beside it is the last choice: it may hold what somebody else prepared.
    """
    beside = path.parent / FOLDER
    for folder in (beside, cache_dir):
        if folder is None:
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    if beside.is_dir():
        return beside
    logger().warning(
        "the index of %s cannot be cached: its folder is not writable and no cache_dir is given; "
        "every start plans all records again",
        path,
    )
    return None


def launch() -> tuple[str, ...]:
    """What the processes of one start on one node have in common: their parent, and what the launcher sets."""
    parent = os.getppid()
    try:
        begun = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]  # its clock tick
    except (OSError, IndexError):
        begun = ""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID",
             "SLURM_STEP_ID")  # fmt: skip
    return (str(parent), begun, *(os.environ.get(name, "") for name in names))


def shared_by_node() -> Path | None:
    """A folder for what one process of a start computes for the others on its node; None: there are no others. It is
    this user's own; who puts a file there removes it at the end.
    """
    if dist.env_world_size() == 1:
        return None
    folder = Path(tempfile.gettempdir()) / f"unigen-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        own = folder.lstat()
    except OSError:
        return None
    return folder if own.st_uid == os.getuid() and own.st_mode & 0o7077 == 0 and folder.is_dir() else None


def left_by_others(file: Path) -> None:
    """Remove a file of ``shared_by_node`` that an earlier start has left, and this start's own one at its end."""
    try:
        if file.stat().st_mtime < _STARTED - _STAGGER_S:
            file.unlink(missing_ok=True)
    except OSError:  # there is none
        pass
    atexit.register(file.unlink, missing_ok=True)


def cached(cache: Path | None, key: str, make: Callable[[], Mapping[str, Array]]) -> dict[str, Array]:
    """The arrays of ``cache`` where it holds those of ``key``, else those of ``make``, which are then written there."""
    if cache is None:
        return dict(make())
    found = _stored(cache, key)
    if found is not None:
        return found
    with held(cache.with_name(f".{cache.name}.lock")):  # or without, where the folder has no locks
        found = _stored(cache, key)  # another process may have been first
        if found is None:
            found = dict(make())
            try:
                write_atomic(cache, lambda temporary: _write(temporary, key, found or {}))
            except OSError as error:  # a full disk costs time at the next start, not this run
                logger().warning("index cache %s cannot be written: %s", cache, error)
    return found


def _write(path: Path, key: str, arrays: Mapping[str, Array]) -> None:
    with path.open("wb") as stream:  # a path would get a suffix of NumPy's own
        np.savez(stream, key=np.asarray(key), **arrays)  # type: ignore[arg-type]


def _stored(cache: Path, key: str) -> dict[str, Array] | None:
    if not cache.exists():
        return None
    try:
        with np.load(cache, allow_pickle=False) as stored:
            if str(stored["key"]) != key:
                return None
            return {name: stored[name] for name in stored.files if name != "key"}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        logger().warning("index cache %s is damaged and is built anew: %s: %s", cache, type(error).__name__, error)
        return None
