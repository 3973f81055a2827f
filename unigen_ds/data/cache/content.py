"""A data file -> the digest of its whole content, remembered beside its index so that it is read once per change.

Every byte counts (XXH3-128, about 4 GiB/s from memory): a digest of parts of a file misses a change in place between
them. The result is kept with the file's size, times of change and inode number. The time of the last status change
(``ctime``) cannot be set by a program, so a file rewritten in place whose old modification time was restored is read
again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import xxhash

from unigen_ds.system.files import write_text_atomic
from unigen_ds.system.log import logger

_BLOCK = 8 << 20
_SETTLED_NS = 2_000_000_000
"""A file changed less than this ago may change again within the resolution of its times: its digest is not kept."""


def content_digest(path: Path, folder: Path | None) -> str:
    """Of every byte of ``path``, hex. ``folder``: where it may be kept; None: it is computed at every start."""
    memory = None if folder is None else folder / f"{path.name}.content.json"
    before = _stamp(path)
    if memory is not None and (known := _remembered(memory, before)) is not None:
        return known
    settled = time.time_ns() - max(before["mtime_ns"], before["ctime_ns"]) > _SETTLED_NS
    digest = xxhash.xxh3_128()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    found = digest.hexdigest()
    if memory is not None and settled and _stamp(path) == before:
        _remember(memory, {**before, "xxh3_128": found})
    return found


def contents_digest(files: Sequence[Path], folder: Path | None, *, name: str) -> str:
    """Of every byte of all ``files``, of their order, and of their names where there are several.

    ``folder``: where it may be kept, as that of ``name``.
    """
    if len(files) == 1:
        return content_digest(files[0], folder)
    top = os.path.commonpath([file.parent for file in files]) if files else ""
    stamps = [(os.path.relpath(file, top), _stamp(file)) for file in files]
    memory = None if folder is None else folder / f"{name}.contents.json"
    together = {"files": xxhash.xxh3_128(json.dumps(stamps).encode()).hexdigest()}
    if memory is not None and (known := _remembered(memory, together)) is not None:
        return known
    digest, latest = xxhash.xxh3_128(), 0
    for file, (label, stamp) in zip(files, stamps, strict=True):
        digest.update(f"{label}\0{content_digest(file, None)}\0".encode())
        latest = max(latest, stamp["mtime_ns"], stamp["ctime_ns"])
    found = digest.hexdigest()
    if memory is not None and time.time_ns() - latest > _SETTLED_NS:
        _remember(memory, {**together, "xxh3_128": found})
    return found


def _remember(memory: Path, found: Mapping[str, object]) -> None:
    try:
        write_text_atomic(memory, json.dumps(found) + "\n")
    except OSError as error:  # costs time at the next start, not this run
        logger().debug("%s cannot be written: %s", memory, error)


def _stamp(path: Path) -> dict[str, int]:
    found = os.stat(path)
    return {
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
        "inode": found.st_ino,
    }


def _remembered(memory: Path, stamp: Mapping[str, object]) -> str | None:
    try:
        stored = json.loads(memory.read_text(encoding="utf-8"))
        digest = stored.pop("xxh3_128")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return digest if stored == stamp and isinstance(digest, str) else None
