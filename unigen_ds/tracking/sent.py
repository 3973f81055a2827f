"""What a tracker has been sent: ``<work_dir>/tracking/<writer>.jsonl``. It decides where a resume continues.

A tracker cannot take a line back: trackio not at all, and W&B's ``resume_from`` is refused offline, on servers of one's
own, and for a run that was killed (https://github.com/wandb/wandb/issues/10438, wandb 0.31). So each line is recorded
before it is sent, and after a resume a line that the run has is not sent again. Where what determines the numbers of a
run was changed, and lines come again, a new run begins at the resume; the old one is its parent.

::

    {"event": "run", "id": "a1", "parent": null, "start": 0, "name": ..., "kept_in": {...}, "identity": "..."}
    {"run": "a1", "update": 10, "at": 10, "key": ""}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from unigen_ds.core.json_values import json_values
from unigen_ds.system.files import make_directory
from unigen_ds.system.journals import JsonLines, parse_lines


@dataclass(frozen=True)
class Line:
    """One line, as it is recorded."""

    update: int
    at: int
    """Progress when it was sent: later than ``update`` for results that come late."""
    key: str
    """Which of an update's lines: "" is that of the update itself."""

    @classmethod
    def of(cls, record: Mapping[str, Any], *, update: int, event: str, at: int | None) -> Line:
        key = f"{event} {hashlib.blake2b(repr(sorted(record)).encode(), digest_size=6).hexdigest()}" if event else ""
        return cls(update, update if at is None else at, key)


@dataclass(frozen=True)
class Branch:
    """A run of the tracker: it has the lines after ``start`` updates, its parent those before. ``id`` None: a new run;
    ``parent`` None: it begins by itself."""

    id: str | None
    parent: str | None
    start: int
    name: str
    group: str = ""
    kept_in: Mapping[str, Any] = field(default_factory=dict)
    identity: str = ""

    @property
    def title(self) -> str:
        """The name, and from which update on where there is a parent."""
        return self.name if self.parent is None else f"{self.name} from update {self.start}"

    @property
    def lineage(self) -> dict[str, Any]:
        """The parent, as the config of a run has it."""
        return {} if self.parent is None else {"parent_run": self.parent, "parent_update": self.start}


class Sent:
    """The record of one writer.

    Args:
        path: its file.
        purges: the writer itself hides lines after the resumed update: only late results are held back.
    """

    def __init__(self, path: Path, *, purges: bool) -> None:
        self._path, self._purges = path, purges
        self._lines = JsonLines(path)
        self._run_id: str | None = None
        self._repeated: set[tuple[int, str]] = set()
        """Lines after the resumed update that the run has: update and key."""

    def resume(
        self,
        run_id: str | None,
        *,
        updates: int,
        name: str,
        group: str,
        kept_in: Mapping[str, Any],
        identity: Mapping[str, Any],
    ) -> tuple[Branch, Branch | None]:
        """Return where a start at ``updates`` continues, and the run that it abandons.

        ``run_id`` is that of the checkpoint. A branch whose ``id`` is None is a new run. Without a record, in another
        work dir, the checkpoint's run is the parent.
        """
        records, _ = parse_lines(self._path)
        chain = _chain(records)
        digest = hashlib.blake2b(json.dumps(json_values(identity), sort_keys=True).encode(), digest_size=8).hexdigest()
        new = Branch(None, run_id, updates, name, group, dict(kept_in), digest)
        if not chain:
            return new, None
        last = chain[0]
        if last.kept_in != kept_in:
            return replace(new, parent=None), None
        if run_id is not None and run_id != _owner(chain, updates).id:
            return replace(new, name=last.name, group=last.group), None
        repeated = {
            (line["update"], line["key"])
            for line in records
            if "key" in line
            and line["at"] > updates
            and line["run"] == _owner(chain, line["update"]).id
            and not (self._purges and line["update"] > updates)
        }
        if last.identity != digest and any(update > updates for update, _ in repeated):
            return replace(last, id=None, parent=_owner(chain, updates).id, start=updates, identity=digest), last
        self._repeated = repeated
        return replace(last, identity=digest), None

    def num_sent(self, run_id: str | None) -> int:
        """Lines that a run was sent."""
        return sum("key" in record and record["run"] == run_id for record in parse_lines(self._path)[0])

    def begin(self, branch: Branch) -> None:
        """Record that the writer has opened a run: it is the one that lines go to from now on."""
        self._run_id = branch.id
        self._append({"event": "run", **asdict(branch)})

    def add(self, line: Line) -> bool:
        """Record that ``line`` is about to be sent; False where the run has it."""
        if (line.update, line.key) in self._repeated:
            self._repeated.remove((line.update, line.key))
            return False
        self._append({"run": self._run_id, **asdict(line)})
        return True

    def sync(self) -> None:
        """Have the record on disk. Raises ``OSError``."""
        self._lines.sync()

    def close(self) -> None:
        self._lines.close()

    def _append(self, record: Mapping[str, Any]) -> None:
        make_directory(self._path.parent)
        with suppress(OSError):  # a full disk: the line is kept in memory and written later; a save reports it
            self._lines.append(record)


def _chain(records: list[dict[str, Any]]) -> list[Branch]:
    """The last run, its parent, and so on to the first; each as it was last opened."""
    runs = [{k: v for k, v in record.items() if k != "event"} for record in records if record.get("event") == "run"]
    by_id = {run["id"]: Branch(**run) for run in runs}
    chain: list[Branch] = []
    current = by_id.get(runs[-1]["id"]) if runs else None
    while current is not None and current not in chain:
        chain.append(current)
        current = by_id.get(current.parent) if current.parent is not None else None
    return chain


def _owner(chain: list[Branch], update: int) -> Branch:
    """The run of a chain that has the line of ``update``."""
    return next((branch for branch in chain if branch.start < update), chain[-1])
