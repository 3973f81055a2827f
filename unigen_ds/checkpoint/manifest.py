"""``manifest.json``: content of a checkpoint directory and position of the run. Written last, so it marks completeness.

Schema of ``format_version`` 2 (frozen; a change that readers cannot accept raises the version). A checkpoint of
adapters is of version 3, which has ``base`` in addition: without the files of the base it is no model. Any other
version is refused.

===================  =================================================================================
format_version       2
layout               ``safetensors`` | ``deepspeed`` | ``dcp``: which reader opens the tensor files
commit               number of this commit in the work dir: grows by one, whatever happens to ``iter_<n>``
parent               directory name of the checkpoint this run continued from, or null
run                  id of the run that wrote it (``run_id.txt`` of its work dir)
created              UTC time, ISO 8601
progress             ``Progress``: sequences, samples, tokens, updates, skipped_updates, epoch
iteration            completed iterations under ``geometry``
geometry             batch_size, accumulative_counts, dp_size at the save
ruler                geometry of the first start and sequences_per_epoch: what user units mean in this run
topology             engine, sharding, offload, process count, precision
schedule             the curves in sequences and tokens (``Schedules.state_dict``), with ``lr_scale``
loader               cursor {epoch, window, row, sequences}, seed, data fingerprint, sequences that are left out
parameters           [{name, shape, dtype, trainable, group, tied}]; tied: further names of the same tensor
files                [{path, size, digest}] of every file but this one; digest: ``xxh3_128:<hex>``
config               the config as plain values (data, never executed)
versions             python, torch, unigen_ds, ..., digest of the source files of unigen_ds
metrics              validation metrics of the save, for ``save_best``
base                 version 3: path, revision and files of the base of adapters (``checkpoint/base_files.py``)
digest               blake2b of all the above, so that a changed number (a position, say) does not go unnoticed
===================  =================================================================================
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from unigen_ds.core.errors import CheckpointError
from unigen_ds.core.progress import Geometry, Progress, Ruler
from unigen_ds.system.machine import installed_version, source_digest

FORMAT_VERSION, WITH_BASE = 2, 3
FILE_NAME = "manifest.json"
FULL = "full"
"""Folder of a checkpoint that was saved with ``CheckpointHook(form='both')``: the same checkpoint, consolidated."""
_PACKAGES = ("unigen_ds", "torch", "transformers", "safetensors", "numpy", "pillow", "mmengine", "deepspeed")


def current_versions() -> dict[str, str]:
    """Versions of the packages that a run's numbers depend on, and the digest of this one's source files, which are
    edited without a new version; absent packages are left out.
    """
    versions = {"python": platform.python_version(), "unigen_ds source": source_digest()}
    return versions | {package: number for package in _PACKAGES if (number := installed_version(package)) is not None}


def _digest(state: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(state, sort_keys=True).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, order=True)
class FileEntry:
    """One file of a checkpoint, by path relative to its directory."""

    path: str
    size: int
    digest: str
    """``algorithm:hex``; empty where it is not known (another trainer's checkpoint)."""


Folders = str | Mapping[str, str]
"""A folder or file, or one for each part of the model, as ``model.pretrained`` has them."""


def parts_of(folders: Folders) -> list[tuple[str, Path]]:
    """Part of the model ('' where there is one folder for all) and path."""
    return [("", Path(folders))] if isinstance(folders, str) else [(k, Path(v)) for k, v in folders.items()]


@dataclass(frozen=True)
class Base:
    """The record of the files of the base of adapters."""

    path: Folders
    files: tuple[FileEntry, ...]
    """Paths below the folder, ``PART/NAME`` where there is one for each part."""

    @property
    def is_here(self) -> bool:
        return all(path.exists() for _, path in parts_of(self.path))


@dataclass
class Manifest:
    commit: int
    parent: str | None
    progress: Progress
    geometry: Geometry
    ruler: Ruler
    topology: dict[str, Any]
    schedule: dict[str, Any]
    loader: dict[str, Any]
    parameters: list[dict[str, Any]]
    config: dict[str, Any]
    versions: dict[str, str] = field(default_factory=lambda: current_versions())
    created: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    layout: str = ""
    """Filled by the saver, as are the files."""
    files: list[FileEntry] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    run: str = ""
    format_version: int = FORMAT_VERSION
    base: Base | None = None

    def __post_init__(self) -> None:
        if self.base is not None:
            self.format_version = WITH_BASE

    @property
    def iteration(self) -> int:
        return self.progress.iteration(self.geometry)

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(entry.size for entry in self.files)

    @property
    def stamp(self) -> str:
        """The text in each file of this save: a file of another save has another one."""
        return f"update {self.progress.updates}"

    def files_in(self, folder: str) -> list[str]:
        """Names of the files that the save wrote into ``folder`` ('' is the checkpoint itself)."""
        paths = (entry.path.rpartition("/") for entry in self.files)
        return [name for parent, _, name in paths if parent == folder]

    def state_dict(self) -> dict[str, Any]:
        """Plain values, as written to disk."""
        state = dataclasses.asdict(self) | {"iteration": self.iteration}
        return {key: value for key, value in state.items() if (key, value) != ("base", None)}

    def to_json(self) -> str:
        state = json.loads(json.dumps(self.state_dict(), default=str))
        return json.dumps(state | {"digest": _digest(state)}, indent=1, sort_keys=True)

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Raises ``CheckpointError`` when the file is missing, damaged, or of another format."""
        path = directory / FILE_NAME
        try:
            if not path.is_file():
                problem = f"{directory} has no {FILE_NAME}: it was never completed, or was written elsewhere"
                raise CheckpointError(problem)
            state = json.loads(path.read_text(encoding="utf-8"))
            version, digest = int(state["format_version"]), state.pop("digest", None)
            if version not in (FORMAT_VERSION, WITH_BASE):
                raise CheckpointError(
                    f"{path} has format {version}",
                    allowed=f"{FORMAT_VERSION}, or {WITH_BASE} of adapters",
                    remedy="read it with the version of unigen_ds that wrote it",
                )
            if digest != _digest(state):
                raise CheckpointError(f"{path} has changed since it was written (its digest differs)")
            state.pop("iteration", None)
            return _VALUES.validate_python(state)
        except (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError) as error:
            what = " ".join(f"{type(error).__name__}: {error}".split())[:300]  # it may be of any length
            raise CheckpointError(f"{path} is damaged: {what}") from error


_VALUES = TypeAdapter(Manifest)
"""A wrong value is an error where a manifest is read, not where it is used."""
