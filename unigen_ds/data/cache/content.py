"""Data files -> the digest of their whole content, remembered beside the index so that they are read once per change.

Every byte counts (XXH3-128, about 4 GiB/s from memory): a digest of parts of a file misses a change in place between
them. The result is kept with each file's size, times of change and inode number. The time of the last status change
(``ctime``) cannot be set by a program, so a file rewritten in place whose old modification time was restored is read
again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from time import time_ns

import xxhash

from unigen_ds.system.files import write_text_atomic
from unigen_ds.system.log import logger

_BLOCK = 8 << 20
_SETTLED_NS = 2_000_000_000
"""A file changed less than this ago may change again within the resolution of its times: its digest is not kept."""


def content_digest(path: Path, folder: Path | None) -> str:
    """Return the digest of every byte of ``path``, hex. ``folder``: where it may be kept; None: nowhere."""
    return contents_digest([path], folder, name=path.name)


def contents_digest(files: Sequence[Path], folder: Path | None, *, name: str) -> str:
    """Return the digest of every byte of ``files``; of several also of their order and their names.

    ``folder``: where it may be kept, as that of ``name``.
    """
    top = os.path.commonpath([file.parent for file in files]) if files else ""
    labels = [os.path.relpath(file, top) for file in files] if len(files) > 1 else [""] * len(files)
    stamps = [_stamp(file) for file in files]
    facts = xxhash.xxh3_128(json.dumps([labels, stamps]).encode()).hexdigest()
    memory = None if folder is None else folder / f"{name}.content.json"
    try:
        stored = {} if memory is None else json.loads(memory.read_text(encoding="utf-8"))
        if stored["files"] == facts and isinstance(stored["xxh3_128"], str):
            return str(stored["xxh3_128"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    is_settled = time_ns() - max((at for stamp in stamps for at in stamp[1:3]), default=0) > _SETTLED_NS
    digests = [_digest(file) for file in files]
    named = "".join(f"{label}\0{one}\0" for label, one in zip(labels, digests, strict=True))
    digest = digests[0] if len(files) == 1 else xxhash.xxh3_128(named.encode()).hexdigest()
    if memory is not None and is_settled and stamps == [_stamp(file) for file in files]:
        try:
            write_text_atomic(memory, json.dumps({"files": facts, "xxh3_128": digest}) + "\n")
        except OSError as error:  # costs time at the next start, not this run
            logger().debug("%s cannot be written: %s", memory, error)
    return digest


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _stamp(path: Path) -> list[int]:
    """Size, times of change and inode number."""
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
