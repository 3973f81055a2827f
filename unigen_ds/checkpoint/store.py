"""Checkpoints of a work dir: list, verify, the newest that can be trusted, and retention.

"Newest" is the last committed one in the present lineage, never the one with the highest number: after a batch change
iteration 3000 may become 1500. Manifests decide, and ``lineage.json`` where a resume abandoned some;
``last_checkpoint`` is a hint for people and other tools.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar

from pydantic import TypeAdapter

from unigen_ds.checkpoint.manifest import FILE_NAME, FULL, FileEntry, Manifest
from unigen_ds.core.errors import CheckpointError
from unigen_ds.core.json_values import STAMP
from unigen_ds.core.progress import Duration, Skip
from unigen_ds.system.files import (
    delete_inside,
    file_digest,
    read_line,
    remove_leftovers,
    rename_into_place,
    write_text_atomic,
)
from unigen_ds.system.log import logger
from unigen_ds.system.machine import without_collector

HINT = "last_checkpoint"
STAGING = ".tmp-"
DELETING = ".deleting"
NOT_FINITE = "not_finite_"
"""Begins the name of a checkpoint whose state is not finite: it is listed as no checkpoint of the run."""
RNG_DIRECTORY, HOOKS_FILE, CONFIG_FILE = "rng", "hooks.json", "config.py"
WEIGHTS = "weights"
"""Folder beside the checkpoints with exports of weights alone (``CheckpointHook(weights_interval=...)``)."""
_FEW = 100
"""Files whose sizes are compared one after the other."""
BY_UPDATE = ("step", "update")
"""First letters of names that count updates; others count iterations."""


@dataclass(frozen=True)
class Candidate:
    """A directory that looks like a checkpoint. ``problem`` is None when it is complete."""

    path: Path
    manifest: Manifest | None
    problem: str | None


def is_checkpoint_name(name: str, *, unfinished: bool = False) -> bool:
    """Whether a directory of this name may be a committed checkpoint: ``*.pth*``, or ``step_1000`` and the like, with
    the suffix of a name that was in use. ``unfinished``: one that is being written or deleted instead.
    """
    base, staging, _ = name.partition(STAGING)
    stem = base.removesuffix(DELETING)
    if ".pth" not in name and re.fullmatch(r"(step|update|iter)_\d+(_\d+)?", stem) is None:
        return False
    return unfinished if staging or stem != base else not unfinished and not name.startswith(NOT_FINITE)


@without_collector()
def list_checkpoints(work_dir: Path) -> list[Candidate]:
    """Every candidate directory, oldest commit first; those without a valid manifest come first of all."""
    paths = sorted(work_dir.iterdir()) if work_dir.is_dir() else []
    checkpoints = [_look_at(path) for path in paths if path.is_dir() and is_checkpoint_name(path.name)]
    return sorted(checkpoints, key=lambda f: f.manifest.commit if f.manifest else -1)


def _look_at(path: Path) -> Candidate:
    try:
        manifest = Manifest.read(path)
        return Candidate(path, manifest, verify(path, manifest))
    except CheckpointError as error:
        return Candidate(path, None, str(error))


def current(listing: Sequence[Candidate], lineage: Lineage | None = None) -> list[Candidate]:
    """The complete ones of a listing that no resume has abandoned, oldest first. ``lineage``: the stored one."""
    void = (lineage or Lineage.read(listing[0].path.parent)).abandoned if listing else ()
    return [one for one in listing if one.problem is None and one.manifest and one.manifest.commit not in void]


def missing(path: Path) -> CheckpointError:
    """The error for a path that does not exist, with the checkpoints of the run that it is of, if there are any."""
    names = [checkpoint.path.name for checkpoint in list_checkpoints(path.parent) if checkpoint.manifest is not None]
    remedy = "name a checkpoint"
    if names:
        remedy = f"{path.parent} has {', '.join(names[-8:])}; CheckpointHook.max_keep_ckpts deletes older ones"
    return CheckpointError(f"checkpoint {path} does not exist", remedy=remedy)


def verify_manifest(
    directory: Path,
    *,
    accepts: Callable[[str], bool] = lambda path: True,
    hashes: bool = True,
    listing: Sequence[Candidate] = (),
) -> Manifest:
    """The manifest of a checkpoint, without the files that ``accepts`` refuses; all others are as they were written.
    Every reader begins here. Raises ``CheckpointError`` naming a changed file. Nothing of ``listing`` is read again.
    """
    candidate = next((one for one in listing if one.path == directory), Candidate(directory, None, None))
    manifest = candidate.manifest or Manifest.read(directory)
    manifest.files = [entry for entry in manifest.files if accepts(entry.path)]
    if candidate.manifest is None or (candidate.problem is None and hashes):
        candidate = Candidate(directory, manifest, verify(directory, manifest, hashes=hashes))
    if candidate.problem:
        remedy = "name another: unigen-checkpoints list shows them; a resume without a name passes over it"
        raise CheckpointError(f"checkpoint {directory} is damaged: {candidate.problem}", remedy=remedy)
    return manifest


def verify(directory: Path, manifest: Manifest, *, hashes: bool = False) -> str | None:
    """The first problem of a checkpoint's files, or None. ``hashes`` reads every byte; else sizes are compared."""

    def problem(entry: FileEntry) -> str | None:
        path = os.path.join(directory, entry.path)
        try:
            if not os.path.isfile(path):
                return f"{path} is missing"
            if (size := os.path.getsize(path)) != entry.size:
                return f"{path} has {size} bytes, {entry.size} were written"
            if hashes and file_digest(Path(path)) != entry.digest:
                return f"{path} has changed since it was written (hash differs)"
        except (OSError, ValueError) as error:
            return f"{path} cannot be read: {error}"
        return None

    if not hashes and len(manifest.files) <= _FEW:
        return next(filter(None, map(problem, manifest.files)), None)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return next(filter(None, pool.map(problem, manifest.files)), None)


def newest(
    work_dir: Path, *, hashes: bool = True, listing: Sequence[Candidate] | None = None
) -> tuple[Candidate | None, list[Candidate]]:
    """The newest checkpoint whose files verify, content included, and those that were rejected, with the reason.

    Hashing stops at the first that verifies, so the usual cost is one checkpoint. ``listing``: ``list_checkpoints``.
    The last candidate is the checkpoint elsewhere that the run resumed from, or a missing one that the hint names.
    """
    listing = list_checkpoints(work_dir) if listing is None else listing
    lineage, hint = Lineage.read(work_dir), read_line(work_dir / HINT)
    candidates = [checkpoint for checkpoint in reversed(listing) if checkpoint.manifest is not None]
    if lineage.start is not None:
        candidates.append(_look_at(Path(lineage.start)))
    elif hint is not None and not listing:
        candidates.append(Candidate(Path(hint), None, f"{HINT} names it, and it is not there"))
    rejects = [checkpoint for checkpoint in listing if checkpoint.manifest is None]
    for checkpoint in candidates:
        problem, manifest = checkpoint.problem, checkpoint.manifest
        if problem is None and manifest is not None:
            if checkpoint in listing and manifest.commit in lineage.abandoned:
                problem = "a later resume went back to an earlier checkpoint and abandoned it (name it to return to it)"
            elif hashes:
                problem = verify(checkpoint.path, manifest, hashes=True)
        if problem is None:
            return checkpoint, rejects
        rejects.append(Candidate(checkpoint.path, manifest, problem))
    return None, rejects


def continued_lineage(work_dir: Path, checkpoint: Path, listing: Sequence[Candidate]) -> Lineage:
    """The lineage of a run that continues from ``checkpoint``: others are abandoned that are newer, or were before."""
    checkpoint, before = outer(checkpoint), Lineage.read(work_dir)
    manifests = {one.path.name: one.manifest for one in listing if one.manifest is not None}
    own = manifests.get(checkpoint.name) if is_inside(work_dir, checkpoint) else None
    ancestors, name, manifest = set[str](), checkpoint.name, own
    while manifest is not None and name not in ancestors:
        ancestors.add(name)
        name = manifest.parent or ""
        manifest = manifests.get(name)
    start = own.commit if own is not None else 0
    void = [
        manifest.commit
        for name, manifest in manifests.items()
        if name not in ancestors and (manifest.commit > start or manifest.commit in before.abandoned)
    ]
    last_commit = max([before.last_commit, *(manifest.commit for manifest in manifests.values())])
    outside = None if is_inside(work_dir, checkpoint) else str(checkpoint)
    return Lineage(outside, tuple(sorted(void)), last_commit, before.skips)


def continue_from(work_dir: Path, checkpoint: Path, lineage: Lineage) -> None:
    """Record on rank 0 that training continues from ``checkpoint``, which is loaded, with its ``continued_lineage``."""
    lineage.write(work_dir)
    write_hint(work_dir, outer(checkpoint))


def is_inside(work_dir: Path, checkpoint: Path) -> bool:
    return outer(checkpoint.resolve()).parent == work_dir.resolve()


def outer(checkpoint: Path) -> Path:
    """The checkpoint whose ``full/`` this is; any other path as it is."""
    return checkpoint.parent if checkpoint.name == FULL and (checkpoint.parent / FILE_NAME).is_file() else checkpoint


def write_hint(work_dir: Path, checkpoint: Path) -> None:
    """Name the newest committed checkpoint, in one line."""
    write_text_atomic(work_dir / HINT, str(checkpoint) + "\n")


def next_commit(work_dir: Path) -> int:
    commits = [f.manifest.commit for f in list_checkpoints(work_dir) if f.manifest]
    return 1 + max([Lineage.read(work_dir).last_commit, *commits])


def delete(directory: Path) -> None:
    """Remove a checkpoint so that a kill never leaves what looks like one. Of a symbolic link the link alone goes."""
    target = directory.with_name(directory.name + DELETING)
    delete_inside(target, directory.parent)
    rename_into_place(directory, target)
    if not target.is_symlink():
        (target / FILE_NAME).unlink(missing_ok=True)
    delete_inside(target, directory.parent)


def retain(
    work_dir: Path,
    *,
    max_keep: int,
    max_days: float | None = None,
    every: Duration | None = None,
    keeps: Callable[[Manifest], bool] = lambda manifest: False,
) -> list[Path]:
    """Delete complete checkpoints beyond ``max_keep`` (-1: keep all), the abandoned ones first, then the oldest; and
    those that are older than ``max_days``, except the newest.

    Called only after a commit. One that ``keeps`` is not deleted, however old, nor is the first, not abandoned, at or
    after each multiple of ``every``. Damaged ones do not count: they would replace good ones. A checkpoint that cannot
    be deleted is a warning. Returns what was deleted.
    """
    if max_keep < 0 and max_days is None:
        return []
    void = Lineage.read(work_dir).abandoned
    complete = [(f.path, f.manifest) for f in list_checkpoints(work_dir) if f.problem is None and f.manifest]
    milestones: dict[int, int] = {}
    for _, manifest in complete:
        if every is not None and every.reached(manifest.progress) and manifest.commit not in void:
            number = int(manifest.progress.count(every.unit) // every.value)
            milestones.setdefault(number, manifest.commit)
    complete.sort(key=lambda pair: pair[1].commit not in void)
    beyond = len(complete) - max_keep if max_keep >= 0 else 0
    paths = []
    for number, (path, manifest) in enumerate(complete[:-1]):
        age = datetime.now(timezone.utc) - datetime.fromisoformat(manifest.created)
        old = max_days is not None and age.total_seconds() > 86400.0 * max_days
        if not (number < beyond or old) or manifest.commit in milestones.values() or keeps(manifest):
            continue
        try:
            delete(path)
            paths.append(path)
        except OSError as error:
            logger().warning("Old checkpoint %s could not be deleted: %s", path, error)
    return paths


def sweep(work_dir: Path) -> list[Path]:
    """Remove what a killed save or deletion left. Called at the start, on rank 0, under the lock: no process saves."""
    paths = [*remove_leftovers(work_dir), *remove_leftovers(work_dir / WEIGHTS)]
    for path in sorted(work_dir.iterdir()) if work_dir.is_dir() else []:
        if is_checkpoint_name(path.name, unfinished=True) and path.is_dir():
            try:
                delete_inside(path, work_dir)
                paths.append(path)
            except OSError as error:
                logger().warning("%s, left by an unfinished save, could not be removed: %s", path, error)
    return paths


def check_stamp(path: Path, stamp: str | None, manifest: Manifest) -> None:
    if stamp and stamp != manifest.stamp:  # files of other trainers have none
        raise CheckpointError(
            f"{path} is of {stamp}, and {FILE_NAME} of {manifest.stamp}: files of two checkpoints were mixed",
            remedy="copy the whole folder of one checkpoint",
        )


def read_hook_states(directory: Path, manifest: Manifest) -> dict[str, Any]:
    """``hooks.json`` of a checkpoint: name of a hook -> its state."""
    path = directory / HOOKS_FILE
    states: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    check_stamp(path, states.pop(STAMP, None), manifest)
    return states


@dataclass(frozen=True)
class Lineage:
    """Which checkpoints of a work dir the present run has abandoned by going back to an earlier one."""

    FILE: ClassVar[str] = "lineage.json"

    start: str | None = None
    """The checkpoint outside the work dir that the run resumed from, until it saves its own."""
    abandoned: tuple[int, ...] = ()
    last_commit: int = 0
    """The highest commit number so far: a number is never used twice, even when checkpoints are removed."""
    skips: tuple[Skip, ...] = ()
    """What the run leaves out of its data: a checkpoint from before that was decided does not have it."""

    @classmethod
    def read(cls, work_dir: Path) -> Lineage:
        """The stored one, or the empty one. Raises ``CheckpointError`` when the file is damaged."""
        path = work_dir / cls.FILE
        if not path.is_file():
            return cls()
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} is damaged: {' '.join(str(error).split())}",
                remedy="remove it; then every checkpoint of the folder is valid again, and --resume uses the newest",
            ) from error

    def write(self, work_dir: Path) -> None:
        """Durable when it returns. The file is not made for an empty lineage."""
        if self.start or self.abandoned or self.skips or (work_dir / self.FILE).exists():
            write_text_atomic(work_dir / self.FILE, json.dumps(asdict(self)) + "\n")
