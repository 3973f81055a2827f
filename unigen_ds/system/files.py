"""Durable files: a name that exists means its content is on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import xxhash
from filelock import FileLock
from safetensors import SafetensorError

from unigen_ds.core.errors import CheckpointError, ConfigError

ALGORITHM = "xxh3_128"
"""The algorithm of the digests of a checkpoint's files."""
_BLOCK = 1 << 20


def fsync_path(path: Path) -> None:
    """Flush a file or directory entry to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make a folder with its missing parents; the entry of each new one is on disk in its own parent."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process was faster
            folder.mkdir()
        fsync_path(folder.parent)
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is not a folder")


try:
    PID_SPACE = hashlib.blake2b(
        f"{socket.gethostname()}\n{Path('/proc/sys/kernel/random/boot_id').read_text()}\n"
        f"{os.readlink('/proc/self/ns/pid')}".encode(),
        digest_size=6,
    ).hexdigest()
except OSError:  # then every process is on its own: nothing of another one counts as left by a dead one
    PID_SPACE = secrets.token_hex(6)
"""Names where a process number means the same process as here: not in a container of the same host name."""
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(tmp|writing)-(?P<space>[A-Za-z0-9-]*)\.(?P<process>\d+)(-[0-9a-f]+)?")
_OWN_NAMES: set[str] = set()
"""Names that this process made: its threads may fill several temporaries of one name at a time."""


def temporary_beside(path: Path, kind: str) -> Path:
    """A name of its own under which this process fills ``path``; what a killed process left of it is removed."""
    remove_leftovers(path.parent, of=path.name)
    name = f".{path.name}.{kind}-{PID_SPACE}.{os.getpid()}-{secrets.token_hex(4)}"
    _OWN_NAMES.add(name)
    return path.with_name(name)


def remove_leftovers(folder: Path, *, of: str | None = None) -> list[Path]:
    """Remove the temporary files and folders that killed processes left in ``folder``: those ``of`` one name, or all.

    What belongs to a living process stays, and what may belong to one of another machine or container for a day.
    """
    paths = []
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            match = _LEFTOVER.fullmatch(path.name)
            if match is None or (of is not None and match["name"] != of) or not _is_leftover(path, match):
                continue
            delete_inside(path, folder)
            paths.append(path)
    return paths


def delete_inside(path: Path, folder: Path) -> None:
    """Delete ``path`` with all that is in it, if it really is inside of ``folder``, which the caller owns.

    Every folder that this package deletes is deleted here. A symbolic link goes alone; a missing path is no error.
    Raises ``OSError``, deleting nothing, where ``path`` is elsewhere (links among its parents are followed).
    """
    if not os.path.lexists(path):
        return
    if path.name in ("", "..") or not path.parent.resolve().is_relative_to(folder.resolve()):
        raise PermissionError(f"{path} is not deleted: it is not inside of {folder}")
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _is_leftover(path: Path, match: re.Match[str]) -> bool:
    if match["space"] != PID_SPACE:
        return time.time() - path.lstat().st_mtime > 86400  # a link may point to an old file
    process = int(match["process"])
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except (OverflowError, PermissionError):
        return False
    return process == os.getpid() and path.name not in _OWN_NAMES  # an earlier process had the same number


def rename_into_place(complete: Path, final: Path) -> None:
    """Give a complete file or folder its final name: one rename, whose entry is then on disk.

    Every name that must not appear before its content is set here. Raises ``OSError``; where ``complete`` no longer
    exists then, the name is set, but may not survive a power failure.
    """
    os.replace(complete, final)
    fsync_path(final.absolute().parent)


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Have a temporary file written beside ``path``, on disk, and renamed; on an error ``path`` stays as it is."""
    temporary = temporary_beside(path, "tmp")
    try:
        write(temporary)
        fsync_path(temporary)
        rename_into_place(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text_atomic(path: Path, text: str) -> None:
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_line(path: Path) -> str | None:
    """The content of a file of one line, if it is there and can be read."""
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError):
        return None


def check_new(out: Path) -> None:
    """Raise ``ConfigError`` where ``out`` exists."""
    if out.exists():
        raise ConfigError(f"{out} exists", allowed="a new folder")


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """An empty folder to fill, which becomes ``out`` at the end: on disk, with ``digests.json``, or not at all.
    Raises ``ConfigError`` where ``out`` exists, ``CheckpointError`` where it cannot be written (a full disk).
    """
    check_new(out)
    staging = temporary_beside(out, "writing")
    try:
        make_directory(out.parent)
        staging.mkdir()
        yield staging
        write_digests(staging)
        for path in (*staging.iterdir(), staging):
            fsync_path(path)
        rename_into_place(staging, out)
    except (OSError, SafetensorError) as error:
        remedy = "free disk space, fix the permission, or name another folder"
        raise CheckpointError(f"could not write {out}: {error}", remedy=remedy) from error
    finally:
        with contextlib.suppress(OSError):
            delete_inside(staging, out.parent)


def copy_files(source: Path, folder: Path, *, accepts: Callable[[str], bool]) -> None:
    """Copy the files of ``source``, not its folders, whose names ``accepts`` chooses; never its ``digests.json``."""
    for path in source.iterdir():
        if path.is_file() and path.name != DIGESTS and accepts(path.name):
            shutil.copyfile(path, folder / path.name)


def size_text(size: float) -> str:
    """``1.5 GiB``."""
    if size < 1024:
        return f"{size:.0f} B"
    units = ["KiB", "MiB", "GiB", "TiB"]
    while (size := size / 1024) >= 1024 and len(units) > 1:
        units.pop(0)
    return f"{size:.1f} {units[0]}"


def file_digest(path: Path) -> str:
    """``xxh3_128:hex`` of the whole content."""
    digest = xxhash.xxh3_128()
    block = memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as stream:
        while number := stream.readinto(block):
            digest.update(block[:number])
    return f"{ALGORITHM}:{digest.hexdigest()}"


_digest_now = cache(lambda path, size, mtime_ns: file_digest(path))
"""``file_digest``, read once by a process, as long as the file's size and time stay."""
DIGESTS = "digests.json"
"""Beside the files of an export: path below the folder -> digest, as ``file_digest`` returns it."""


def write_digests(folder: Path) -> None:
    """Write the digests of all files below ``folder`` but texts (``.md``), which are edited; keep stored ones."""
    digests, old = {}, stored_digests(folder)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != DIGESTS and path.suffix != ".md":
            digests[name] = old.get(name) or file_digest(path)
    (folder / DIGESTS).write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")


def stored_digests(folder: Path) -> dict[str, str]:
    """Return the content of ``digests.json`` there; {} without one. Raises ``CheckpointError`` where it is damaged."""
    path = folder / DIGESTS
    try:
        digests = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if not all(digest.partition(":")[0] == ALGORITHM for digest in digests.values()):
            raise ValueError("a digest of an algorithm that is not known")
        return dict(digests)
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}", remedy=_ANEW.format(folder=folder)) from error


_ANEW = "write {folder} anew; if you changed it yourself, delete its digests.json: the files are then not verified"


def check_digests(path: Path) -> None:
    """Raise ``CheckpointError`` for a file of a folder, or of a file's, that has changed since its ``digests.json``.
    An export of others has none; a listed file that is not there was not downloaded.
    """
    folder = path if path.is_dir() else path.parent
    for name, digest in stored_digests(folder).items():
        file = folder / name
        if file.is_file() and _digest_now(file, file.stat().st_size, file.stat().st_mtime_ns) != digest:
            problem = f"{file} has changed since it was written (its hash is not that of {DIGESTS})"
            raise CheckpointError(problem, remedy=_ANEW.format(folder=folder))


def quick_digest(path: Path, *, blocks: int = 64) -> str:
    """BLAKE2b-128 of a data file: of its size, head, tail and evenly spaced 1 MiB blocks; all up to ``blocks`` MiB."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as stream:
        if size <= blocks * _BLOCK:
            digest.update(stream.read())
        else:
            for i in range(blocks):
                stream.seek((size - _BLOCK) * i // (blocks - 1))
                digest.update(stream.read(_BLOCK))
    return digest.hexdigest()


# A lock file that one process holds at a time: ``filelock`` on a lock of the kernel's, which ends with the process.


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold the lock of ``path``, or none where that cannot be had (a file system without locks, a full disk). Soft
    locks, which a killed process leaves, are not used.
    """
    lock = FileLock(path, fallback_to_soft=False)
    with contextlib.suppress(OSError):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
