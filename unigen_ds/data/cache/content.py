"""A data file -> the digest of its whole content, remembered beside its index so that it is read once per change.

Every byte counts (XXH3-128, about 4 GiB/s from memory): a digest of parts of a file misses a change in place between
them. The result is kept with the file's size, times of change and inode number. The time of the last status change
(``ctime``) cannot be set by a program, so a file rewritten in place whose old modification time was restored is read
again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
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
    before = _stamp(path)

    def compute() -> str:
        digest = xxhash.xxh3_128()
        with path.open("rb") as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
        return digest.hexdigest()

    memory = None if folder is None else folder / f"{path.name}.content.json"
    return _remembered(memory, before, [before], compute, is_same=lambda: _stamp(path) == before)


def contents_digest(files: Sequence[Path], folder: Path | None, *, name: str) -> str:
    """Return the digest of every byte of all ``files``, of their order, and of their names where there are several.

    ``folder``: where it may be kept, as that of ``name``.
    """
    if len(files) == 1:
        return content_digest(files[0], folder)
    top = os.path.commonpath([file.parent for file in files]) if files else ""
    stamps = [(os.path.relpath(file, top), _stamp(file)) for file in files]

    def compute() -> str:
        digest = xxhash.xxh3_128()
        for file, (label, _) in zip(files, stamps, strict=True):
            digest.update(f"{label}\0{content_digest(file, None)}\0".encode())
        return digest.hexdigest()

    memory = None if folder is None else folder / f"{name}.contents.json"
    facts = {"files": xxhash.xxh3_128(json.dumps(stamps).encode()).hexdigest()}
    return _remembered(memory, facts, [stamp for _, stamp in stamps], compute)


def _remembered(
    memory: Path | None,
    facts: Mapping[str, object],
    stamps: Sequence[Mapping[str, int]],
    compute: Callable[[], str],
    is_same: Callable[[], bool] = lambda: True,
) -> str:
    """The digest of ``memory`` where it is that of ``facts``, else ``compute()``, which is then kept there."""
    try:
        stored = {} if memory is None else json.loads(memory.read_text(encoding="utf-8"))
        digest = stored.pop("xxh3_128")
        if stored == facts and isinstance(digest, str):
            return digest
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    latest = max((at for stamp in stamps for at in (stamp["mtime_ns"], stamp["ctime_ns"])), default=0)
    is_settled = time_ns() - latest > _SETTLED_NS
    digest = compute()
    if memory is not None and is_settled and is_same():
        try:
            write_text_atomic(memory, json.dumps({**facts, "xxh3_128": digest}) + "\n")
        except OSError as error:  # costs time at the next start, not this run
            logger().debug("%s cannot be written: %s", memory, error)
    return digest


def _stamp(path: Path) -> dict[str, int]:
    stat = os.stat(path)
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns, "inode": stat.st_ino}
