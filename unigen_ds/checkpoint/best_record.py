"""The best checkpoint of a run: what checkpoints record of it, and where it is.

Each checkpoint has it in ``hooks.json``, as the state of ``BestHook``, so after a resume from any the best is the best
up to there. The file ``best_checkpoint`` of the work dir names it in one line: a hint, as ``last_checkpoint`` is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from unigen_ds.checkpoint import store
from unigen_ds.core.errors import CheckpointError

BEST_FILE = "best_checkpoint"
HOOK = "best"


@dataclass(frozen=True)
class Best:
    """The best value of a metric so far, and where the weights that have it are."""

    metric: str
    rule: Annotated[str, Field(pattern="^(less|greater)$")]
    value: float
    updates: int
    path: str | None = None
    """Relative to the folder of the checkpoint that stores this, or absolute. None: that checkpoint itself."""
    provenance: Mapping[str, str] = field(default_factory=dict)
    """Data, settings and version of the metric that the value is of."""

    def where(self, checkpoint: Path) -> Path:
        """Return the folder of the best checkpoint, as ``checkpoint`` records it."""
        return checkpoint if self.path is None else checkpoint.parent / self.path

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Best:
        """Raises ``ValueError`` where the state is none."""
        return TypeAdapter(cls).validate_python(dict(state))


def better(value: float, than: float | None, *, rule: str) -> bool:
    """Whether a finite ``value`` is better by ``rule`` ('less' or 'greater'), as every one is than None."""
    return math.isfinite(value) and (than is None or (value < than if rule == "less" else value > than))


def best_of(directory: Path) -> tuple[Path, Best] | None:
    """Folder and value of the best checkpoint, as the newest of a work dir (or the one that ``directory`` is) has it;
    None before the first. Raises ``CheckpointError`` where no checkpoint is complete, or the best one is gone.
    """
    newest = directory
    if not store.is_checkpoint_name(directory.name):
        current = store.current(store.list_checkpoints(directory))
        if not current:
            raise CheckpointError(f"no complete checkpoint found in {directory}")
        newest = current[-1].path
    manifest = store.verify_manifest(newest, accepts=lambda path: path == store.HOOKS_FILE)
    try:
        state = store.read_hook_states(newest, manifest).get(HOOK)
        best = None if state is None else Best.from_state_dict(state)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{newest / store.HOOKS_FILE} is damaged: {error}") from error
    if best is None:
        return None
    folder = best.where(newest)
    if not folder.is_dir():
        raise CheckpointError(
            f"the best checkpoint, {folder} ({best.metric} {best.value:.6g} at update {best.updates}), is not there",
            remedy="it was moved or deleted by hand; a resume starts to look for a best one anew",
        )
    return folder, best
