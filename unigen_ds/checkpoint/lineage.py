"""Which checkpoints of a work dir the present run has abandoned by going back to an earlier one.

A resume from an earlier checkpoint (after a loss spike) or from another work dir leaves later ones on disk, and nothing
in them shows that they are abandoned: only the resume knows. So it writes ``lineage.json`` before the first update; a
resume after a kill before the next save must not use them. Most work dirs never have the file: nothing was abandoned.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from unigen_ds.core.errors import CheckpointError
from unigen_ds.core.files import write_text_atomic

LINEAGE = "lineage.json"


@dataclass(frozen=True)
class Lineage:
    """See the module docstring."""

    start: str | None = None
    """The checkpoint outside the work dir that the run resumed from, until it saves its own."""
    abandoned: tuple[int, ...] = ()
    """Commits that were abandoned."""
    last_commit: int = 0
    """The highest commit number so far: a number is never used twice, even when checkpoints are removed."""

    @classmethod
    def read(cls, work_dir: Path) -> Lineage:
        """The stored one, or the empty one. Raises ``CheckpointError`` when the file is damaged."""
        path = work_dir / LINEAGE
        if not path.is_file():
            return cls()
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            start, last_commit = state["start"], int(state["last_commit"])
            return cls(start, tuple(int(commit) for commit in state["abandoned"]), last_commit)
        except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
            raise CheckpointError(
                f"{path} is damaged: {type(error).__name__}: {error}",
                remedy="remove it; then every checkpoint of the folder is valid again, and --resume uses the newest",
            ) from error

    def write(self, work_dir: Path) -> None:
        """Durable when it returns. The file is not made for an empty lineage."""
        if self.start or self.abandoned or (work_dir / LINEAGE).exists():
            write_text_atomic(work_dir / LINEAGE, json.dumps(dataclasses.asdict(self)) + "\n")
