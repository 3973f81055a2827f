"""Checkpoints of a work dir: list, verify, the newest that can be trusted, and retention.

"Newest" is the last committed one in the present lineage, never the one with the highest number: after a batch change
iteration 3000 may become 1500. ``last_checkpoint`` is a hint that names the lineage; manifests decide.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from unigen_ds.checkpoint.manifest import FILE_NAME, Manifest
from unigen_ds.core.errors import CheckpointError
from unigen_ds.core.files import file_digest, fsync_path, write_text_atomic

HINT = "last_checkpoint"
STAGING = ".tmp-"
DELETING = ".deleting"


@dataclass(frozen=True)
class Found:
    """A directory that looks like a checkpoint. ``problem`` is None when it is complete."""

    path: Path
    manifest: Manifest | None
    problem: str | None


def is_checkpoint_name(name: str) -> bool:
    """Whether a directory of this name may be a committed checkpoint (not one being written or deleted)."""
    return ".pth" in name and STAGING not in name and not name.endswith(DELETING)


def list_checkpoints(work_dir: Path) -> list[Found]:
    """Every candidate directory, oldest commit first; those without a valid manifest come first of all."""
    found = []
    for path in sorted(work_dir.iterdir()) if work_dir.is_dir() else []:
        if not path.is_dir() or not is_checkpoint_name(path.name):
            continue
        try:
            manifest = Manifest.read(path)
            found.append(Found(path, manifest, verify(path, manifest)))
        except CheckpointError as error:
            found.append(Found(path, None, str(error)))
    return sorted(found, key=lambda f: f.manifest.commit if f.manifest else -1)


def verify(directory: Path, manifest: Manifest, *, hashes: bool = False) -> str | None:
    """The first problem of a checkpoint's files, or None. ``hashes`` reads every byte; else sizes are compared."""
    for entry in manifest.files:
        path = directory / entry.path
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != entry.size:
            return f"{path} has {path.stat().st_size} bytes, {entry.size} were written"
        if hashes and file_digest(path) != entry.blake2b:
            return f"{path} has changed since it was written (hash differs)"
    return None


def newest(work_dir: Path) -> tuple[Found | None, list[Found]]:
    """The newest checkpoint whose files verify, content included, and those passed over on the way, newest first.

    Hashing stops at the first that verifies, so the usual cost is one checkpoint.
    """
    found = list_checkpoints(work_dir)
    in_lineage = _lineage(work_dir, found)
    ordered = sorted(found, key=lambda f: (f.path.name in in_lineage, f.manifest.commit if f.manifest else -1))
    rejected: list[Found] = []
    for candidate in reversed(ordered):
        problem = candidate.problem
        if problem is None and candidate.manifest is not None:
            problem = verify(candidate.path, candidate.manifest, hashes=True)
        if problem is None:
            return candidate, rejected
        rejected.append(Found(candidate.path, candidate.manifest, problem))
    return None, rejected


def _lineage(work_dir: Path, found: Iterable[Found]) -> set[str]:
    """Names of the hinted checkpoint, its ancestors and its descendants."""
    hint_file = work_dir / HINT
    parents = {f.path.name: f.manifest.parent for f in found if f.manifest}
    if not hint_file.is_file():
        return set(parents)
    name: str | None = Path(hint_file.read_text(encoding="utf-8").strip()).name
    names = set()
    while name is not None and name not in names:
        names.add(name)
        name = parents.get(name)
    hinted = Path(hint_file.read_text(encoding="utf-8").strip()).name
    descendants = {hinted}
    for child, parent in parents.items():  # commit order: a parent comes before its child
        if parent in descendants:
            descendants.add(child)
    return names | descendants


def write_hint(work_dir: Path, checkpoint: Path) -> None:
    """Name the checkpoint that the present lineage stands at."""
    write_text_atomic(work_dir / HINT, str(checkpoint) + "\n")


def next_commit(work_dir: Path) -> int:
    """The number of the next commit: one more than any that was ever seen here."""
    return 1 + max((f.manifest.commit for f in list_checkpoints(work_dir) if f.manifest), default=0)


def delete(directory: Path) -> None:
    """Remove a checkpoint so that a kill in between never leaves one that looks complete."""
    (directory / FILE_NAME).unlink(missing_ok=True)
    fsync_path(directory)
    shutil.rmtree(directory)


def retain(work_dir: Path, *, max_keep: int, protected: Iterable[Path] = ()) -> list[Path]:
    """Delete the oldest complete checkpoints beyond ``max_keep`` (-1: keep all). Called only after a commit.

    ``protected`` ones are kept and do not count. Returns what was deleted.
    """
    if max_keep < 0:
        return []
    keep = {path.resolve() for path in protected}
    complete = [f.path for f in list_checkpoints(work_dir) if f.manifest and f.path.resolve() not in keep]
    doomed = complete[: max(0, len(complete) - max_keep)]
    for path in doomed:
        delete(path)
    return doomed


def sweep(work_dir: Path) -> list[Path]:
    """Remove what a killed save left behind (staging directories). Called when a run starts, on rank 0."""
    left = [p for p in work_dir.glob(f"*{STAGING}*") if p.is_dir()] if work_dir.is_dir() else []
    for path in left:
        shutil.rmtree(path)
    return left
