"""``manifest.json``: what a checkpoint directory holds and where the run was. Written last, so it marks completeness.

Schema of ``format_version`` 1 (frozen; a change that old readers cannot take raises the version):

===================  =================================================================================
format_version       1
layout               ``safetensors`` | ``deepspeed`` | ``dcp``: which reader opens the tensor files
commit               number of this commit in the work dir: grows by one, whatever happens to ``iter_<n>``
parent               directory name of the checkpoint this run went on from, or null
created              UTC time, ISO 8601
progress             ``Progress``: sequences, samples, tokens, updates, skipped_updates, epoch
iteration            completed iterations under ``geometry``
geometry             batch_size, accumulative_counts, dp_size at the save
ruler                geometry of the first start and sequences_per_epoch: what user units mean in this run
topology             engine, sharding, offload, process count, precision
schedule             the curves in sequences and tokens (``Schedules.state_dict``), with ``lr_scale``
loader               cursor {epoch, window, row, sequences}, seed, data fingerprint
parameters           [{name, shape, dtype, trainable, group, tied}]; tied: further names of the same tensor
files                [{path, size, blake2b}] of every file but this one
config               the config as plain values (data, never executed)
versions             python, torch, unigen_ds, ...
metrics              validation metrics of the save, for ``save_best``
digest               blake2b of all the above, so that a changed number (a position, say) does not go unnoticed
===================  =================================================================================
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from unigen_ds.core.errors import CheckpointError
from unigen_ds.core.progress import Geometry, Progress, Ruler

FORMAT_VERSION = 1
FILE_NAME = "manifest.json"


_PACKAGES = ("unigen_ds", "torch", "transformers", "safetensors", "numpy", "mmengine", "deepspeed")


def current_versions() -> dict[str, str]:
    """Versions of what shapes a run's numbers; absent packages are left out."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _digest(state: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(state, sort_keys=True).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint, by path relative to its directory."""

    path: str
    size: int
    blake2b: str


@dataclass
class Manifest:
    """See the module docstring."""

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
    format_version: int = FORMAT_VERSION

    @property
    def iteration(self) -> int:
        return self.progress.iteration(self.geometry)

    def state_dict(self) -> dict[str, Any]:
        """Plain values, as written to disk."""
        return dataclasses.asdict(self) | {"iteration": self.iteration}

    def to_json(self) -> str:
        state = json.loads(json.dumps(self.state_dict(), default=str))
        return json.dumps(state | {"digest": _digest(state)}, indent=1, sort_keys=True)

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Raises ``CheckpointError`` when the file is missing, damaged, or of a newer format."""
        path = directory / FILE_NAME
        if not path.is_file():
            raise CheckpointError(f"{directory} has no {FILE_NAME}: it was never completed, or was written elsewhere")
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            version, digest = int(state["format_version"]), state.pop("digest", None)
            if version > FORMAT_VERSION:
                raise CheckpointError(
                    f"{path} has format {version}",
                    allowed=f"up to {FORMAT_VERSION}",
                    remedy="use a newer unigen_ds",
                )
            if digest != _digest(state):
                raise CheckpointError(f"{path} has changed since it was written (its digest differs)")
            state.pop("iteration", None)
            state["progress"] = Progress.from_state_dict(state["progress"])
            state["geometry"] = Geometry(**state["geometry"])
            state["ruler"] = Ruler.from_state_dict(state["ruler"])
            state["files"] = [FileEntry(**entry) for entry in state["files"]]
            return cls(**state)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
