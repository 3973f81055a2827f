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
from pathlib import Path

import xxhash

from unigen_ds.core.files import write_text_atomic
from unigen_ds.core.log import logger

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
        try:
            write_text_atomic(memory, json.dumps({**before, "xxh3_128": found}) + "\n")
        except OSError as error:  # costs time at the next start, not this run
            logger().debug("%s cannot be written: %s", memory, error)
    return found


def _stamp(path: Path) -> dict[str, int]:
    found = os.stat(path)
    return {
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
        "inode": found.st_ino,
    }


def _remembered(memory: Path, stamp: dict[str, int]) -> str | None:
    try:
        stored = json.loads(memory.read_text(encoding="utf-8"))
        digest = stored.pop("xxh3_128")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return digest if stored == stamp and isinstance(digest, str) else None
