"""Durable files: a name that exists means its content is on disk."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError

from unigen_ds.core.errors import CheckpointError, ConfigError

ALGORITHM = "xxh3_128"
"""Of a checkpoint's files."""
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


_HOST = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(tmp|writing)-(?P<host>[A-Za-z0-9-]*)\.(?P<process>\d+)(-\d+)?")
_NUMBERS = itertools.count()
_MADE: set[str] = set()
"""Names that this process made: its threads may fill several temporaries of one name at a time."""
_ABANDONED_S = 86400.0


def temporary_beside(path: Path, kind: str) -> Path:
    """A name of its own under which this process fills ``path``; what a killed process left of it is removed."""
    remove_leftovers(path.parent, of=path.name)
    name = f".{path.name}.{kind}-{_HOST}.{os.getpid()}-{next(_NUMBERS)}"
    _MADE.add(name)
    return path.with_name(name)


def remove_leftovers(folder: Path, *, of: str | None = None) -> list[Path]:
    """Remove the temporary files and folders that killed processes left in ``folder``: those ``of`` one name, or all.

    What belongs to a living process of this machine stays, and what may belong to one of another for a day.
    """
    removed = []
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            match = _LEFTOVER.fullmatch(path.name)
            if match is None or (of is not None and match["name"] != of) or not _left(path, match):
                continue
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            removed.append(path)
    return removed


def _left(path: Path, match: re.Match[str]) -> bool:
    if match["host"] != _HOST:
        return time.time() - path.stat().st_mtime > _ABANDONED_S
    process = int(match["process"])
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except OverflowError:
        return False
    except PermissionError:
        return False
    return process == os.getpid() and path.name not in _MADE  # an earlier process had the same number


def rename_into_place(made: Path, final: Path, *, durable: bool = True) -> None:
    """Give a complete file or folder its final name: one rename, whose entry is then on disk.

    Every name that must not appear before its content is set here. ``durable=False``: where a power failure may undo
    it. Raises ``OSError``; where ``made`` no longer exists then, the name is set, but may not survive a power failure.
    """
    os.replace(made, final)
    if durable:
        fsync_path(final.absolute().parent)


def write_atomic(path: Path, write: Callable[[Path], None]) -> None:
    """Call ``write`` with a temporary file beside ``path``, make it durable, then rename it to ``path``.

    On any error ``path`` keeps what it held and the temporary file is removed.
    """
    temporary = temporary_beside(path, "tmp")
    try:
        write(temporary)
        fsync_path(temporary)
        rename_into_place(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text_atomic(path: Path, text: str) -> None:
    """``write_atomic`` for text."""
    write_atomic(path, lambda temporary: _write_text(temporary, text))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def check_new(out: Path) -> None:
    """Raise ``ConfigError`` where ``out`` exists."""
    if out.exists():
        raise ConfigError(f"{out} exists", allowed="a new folder")


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """An empty folder to fill, which becomes ``out`` when the block ends: complete and on disk, or not at all.

    Raises ``ConfigError`` where ``out`` exists, ``CheckpointError`` where it cannot be written (a full disk).
    """
    check_new(out)
    staging = temporary_beside(out, "writing")
    try:
        staging.mkdir(parents=True)
        yield staging
        for path in (*staging.iterdir(), staging):
            fsync_path(path)
        rename_into_place(staging, out)
    except (OSError, SafetensorError) as error:
        remedy = "free disk space, fix the permission, or name another folder"
        raise CheckpointError(f"could not write {out}: {error}", remedy=remedy) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def copy_files(source: Path, folder: Path, *, wanted: Callable[[str], bool]) -> None:
    """Copy the files of ``source``, not its folders, whose name is ``wanted``."""
    for path in source.iterdir():
        if path.is_file() and wanted(path.name):
            shutil.copyfile(path, folder / path.name)


_ALGORITHMS: dict[str, Callable[[], Any]] = {
    ALGORITHM: xxhash.xxh3_128,
    "blake2b": lambda: hashlib.blake2b(digest_size=16),  # of checkpoints written before format 2
}


def file_digest(path: Path, algorithm: str = ALGORITHM) -> str:
    """``algorithm:hex`` of the whole content. Raises ``ValueError`` for an algorithm that is not known."""
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"hash algorithm {algorithm!r} is not known (known: {', '.join(_ALGORITHMS)})")
    digest = _ALGORITHMS[algorithm]()
    block = memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as stream:
        while number := stream.readinto(block):
            digest.update(block[:number])
    return f"{algorithm}:{digest.hexdigest()}"


def quick_digest(path: Path, *, blocks: int = 64) -> str:
    """BLAKE2b-128 of size, head, tail and evenly spaced 1 MiB blocks: the whole content up to ``blocks`` MiB.

    Recognises a data file; a checkpoint file is always hashed whole (``file_digest``).
    """
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
