"""Files that cannot be read at random, as a copy that can: ``.gz`` and ``.zst`` as they were before, tables as Arrow.

A copy is made once, by the process that comes first (the others wait), in the folder of the index, under a name with
the digest of the file's content; so a changed file gets a new copy, and an unchanged one is never unpacked again.
"""

from __future__ import annotations

import errno
import gzip
import shutil
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from unigen_ds.core.errors import DataError
from unigen_ds.data.cache.array_cache import contents_digest
from unigen_ds.system.files import hold_lock, size_text, write_atomic
from unigen_ds.system.log import notice
from unigen_ds.system.machine import import_optional

COMPRESSIONS = (".gz", ".zst")
AGAIN = "copy or write the file again, or name another one"
_SPARE = 64 << 20
"""Bytes that are left free on a disk."""


def unpacked_file(path: Path, folder: Path | None) -> Path:
    """The content of a ``.gz`` or ``.zst`` file, as a file. Raises ``DataError`` where it is damaged."""

    def write(target: Path) -> None:
        try:
            with _unpacking(path) as stream, target.open("wb") as copy:
                shutil.copyfileobj(stream, copy, 8 << 20)
        except (EOFError, OSError, zlib.error) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise DataError(f"data file {path} is damaged: {error}", remedy=AGAIN) from error

    return copy_of(path, folder, suffix=Path(path.stem).suffix, size=path.stat().st_size, write=write)


def _unpacking(path: Path) -> Any:
    if path.suffix != ".zst":
        return gzip.open(path, "rb")
    arrow = require("pyarrow", f"a file compressed by zstd ({path.name})")
    return arrow.CompressedInputStream(arrow.OSFile(str(path)), "zstd")


def copy_of(path: Path, folder: Path | None, *, suffix: str, size: int, write: Callable[[Path], None]) -> Path:
    """The copy of ``path``, of about ``size`` bytes, that ``write`` makes once. Raises ``DataError`` without space."""
    if folder is None:
        problem = f"data file {path} must be unpacked, and its folder is not writable"
        raise DataError(problem, remedy="cache_dir=FOLDER of the data set: a folder for the unpacked copy")
    target = folder / "unpacked" / f"{path.name}-{contents_digest([path], folder, name=path.name)[:16]}{suffix}"
    target.parent.mkdir(exist_ok=True)
    if target.exists():
        return target
    with hold_lock(target.with_name(f".{target.name}.lock")):
        if not target.exists():  # else another process was first
            write_where_space(target, size, write, f"data file {path} cannot be unpacked into {target.parent}")
            notice(f"{path} was unpacked once into {target}: {size_text(target.stat().st_size)}.")
    return target


def write_where_space(target: Path, size: int, write: Callable[[Path], None], problem: str) -> None:
    """Make a file of about ``size`` bytes, whole or not at all. Raises ``DataError`` with ``problem``: a full disk."""
    free, reason = shutil.disk_usage(target.parent).free, ""
    if free < size + _SPARE:
        reason = f"about {size_text(size)} are needed and {size_text(free)} are free"
    else:
        try:
            write_atomic(target, write)
        except OSError as full:
            if full.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            reason = str(full.strerror)
    if reason:
        raise DataError(f"{problem}: {reason}", remedy="make space there, or cache_dir=FOLDER of another disk")


require = partial(import_optional, install="'unigen_ds[data]'", kind=DataError)
"""``require(module, what)``: the module. Raises ``DataError`` that names what needs it, and how it is installed."""
