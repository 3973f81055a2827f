"""Data files -> the digest of their whole content, remembered beside the index so that they are read once per change.

Every byte counts (XXH3-128, about 4 GiB/s from memory): a digest of parts of a file misses a change in place between
them. The result is kept with each file's size, times of change and inode number; the time of the last status change
(``ctime``) cannot be set by a program.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import time_ns

import xxhash

from unigen_ds.system.files import write_text_atomic

_BLOCK = 8 << 20
_SETTLED_NS = 2_000_000_000
"""A file changed less than this ago may change again within the resolution of its times: its digest is not kept."""


def contents_digest(files: Sequence[Path], folder: Path | None, *, name: str) -> str:
    """Return the digest of every byte of ``files``; of several also of their order and their names. ``folder``: where
    it may be kept, as that of ``name``.
    """
    top = os.path.commonpath([file.parent for file in files]) if files else ""
    labels = [os.path.relpath(file, top) for file in files] if len(files) > 1 else [""] * len(files)
    stamps = [_stamp(file) for file in files]
    facts = xxhash.xxh3_128(json.dumps([labels, stamps]).encode()).hexdigest()
    memory = None if folder is None else folder / f"{name}.content.json"
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        stored = {} if memory is None else json.loads(memory.read_text(encoding="utf-8"))
        if stored["files"] == facts and isinstance(stored["xxh3_128"], str):
            return str(stored["xxh3_128"])
    is_settled = time_ns() - max((at for stamp in stamps for at in stamp[1:3]), default=0) > _SETTLED_NS
    digests = []
    for file in files:
        of_file = xxhash.xxh3_128()
        with file.open("rb") as stream:
            while block := stream.read(_BLOCK):
                of_file.update(block)
        digests.append(of_file.hexdigest())
    pairs = "".join(f"{label}\0{one}\0" for label, one in zip(labels, digests, strict=True))
    digest = digests[0] if len(files) == 1 else xxhash.xxh3_128(pairs.encode()).hexdigest()
    if memory is not None and is_settled and stamps == [_stamp(file) for file in files]:
        with suppress(OSError):  # costs time at the next start, not this run
            write_text_atomic(memory, json.dumps({"files": facts, "xxh3_128": digest}) + "\n")
    return digest


def _stamp(path: Path) -> list[int]:
    """Size, times of change and inode number."""
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
