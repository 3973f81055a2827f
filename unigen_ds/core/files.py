"""Durable files: a name that exists means its content is on disk."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from unigen_ds.core.errors import CheckpointError, ConfigError

_BLOCK = 1 << 20


def fsync_path(path: Path) -> None:
    """Flush a file or directory entry to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, make it durable, then rename it into place.

    On any error ``path`` keeps what it held and the temporary file is removed.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        write(temporary)
        fsync_path(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def write_text_atomic(path: Path, text: str) -> None:
    """``write_atomic`` for text."""
    write_atomic(path, lambda temporary: _write_text(temporary, text))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """An empty folder to fill, which becomes ``out`` when the block ends: complete and on disk, or not at all.

    Raises ``ConfigError`` where ``out`` exists, ``CheckpointError`` where it cannot be written (a full disk).
    """
    if out.exists():
        raise ConfigError(f"{out} exists", allowed="a new folder")
    staging = out.with_name(f".{out.name}.writing-{os.getpid()}")
    try:
        staging.mkdir(parents=True)
        yield staging
        for path in (*staging.iterdir(), staging):
            fsync_path(path)
        os.rename(staging, out)
        fsync_path(out.absolute().parent)
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


def file_digest(path: Path) -> str:
    """BLAKE2b-128 of the whole content, hex."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


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
