"""What a tracker has been sent: ``<work_dir>/tracking/<writer>.jsonl``. It decides where a resume continues.

A tracker cannot take a line back: trackio not at all, and W&B's ``resume_from`` is refused offline, on servers of one's
own, and for a run that was killed (https://github.com/wandb/wandb/issues/10438, wandb 0.31). So each line is recorded
before it is sent, and after a resume a line that the run has is not sent again. Where config, data, split of the batch,
number of processes or engine was changed and a repeated number differs by more than rounding, a new run begins after
the last update that agrees; the old one is its parent.

::

    {"event": "run", "id": "a1", "parent": null, "start": 0, "name": ..., "kept_in": {...}, "identity": "..."}
    {"run": "a1", "update": 10, "at": 10, "key": "", "values": {"loss": 2.5, ...}}
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
from unigen_ds.system.journals import JsonLines, finite, parse_lines

ROUNDING, ROUNDING_CUDA = 1e-5, 1e-3
"""Largest relative difference of a repeated number that is none: engines, and kernels of a GPU, add in any order."""
_COMPARED = ("loss", "lr", "applied", "sequences", "samples", "tokens", "val/loss")
"""First letters of what a repeated update must show again: times, rates and memory differ each time, norms of gradients
and scores of validation more than losses."""


@dataclass(frozen=True)
class Line:
    """One line, as it is recorded."""

    update: int
    at: int
    """Progress when it was sent: later than ``update`` for results that come late."""
    key: str
    """Which of an update's lines: "" is that of the update itself."""
    values: Mapping[str, Any]

    @classmethod
    def of(cls, record: Mapping[str, Any], *, update: int, event: str, at: int | None) -> Line:
        key = f"{event} {hashlib.blake2b(repr(sorted(record)).encode(), digest_size=6).hexdigest()}" if event else ""
        compared = {k: v for k, v in record.items() if k.startswith(_COMPARED) and "_per_second" not in k}
        return cls(update, update if at is None else at, key, json_values(compared, finite))


@dataclass(frozen=True)
class Branch:
    """A run of the tracker: it has the lines after ``start`` updates, its parent those before."""

    id: str | None
    parent: str | None
    start: int
    name: str
    group: str = ""
    kept_in: Mapping[str, Any] = field(default_factory=dict)
    identity: str = ""


class Sent:
    """The record of one writer.

    Args:
        path: its file.
        purges: the writer itself hides lines after the resumed update: only late results are held back.
        rounding: largest relative difference of numbers that count as equal.
    """

    def __init__(self, path: Path, *, purges: bool, rounding: float = ROUNDING) -> None:
        self._path, self._purges, self._rounding = path, purges, rounding
        self._lines = JsonLines(path)
        self._branch = Branch(None, None, 0, "")
        self._identity = ""
        self._repeated: dict[tuple[int, str], Mapping[str, Any]] = {}
        self._agreed = self._last = 0
        """While ``_agreed`` is the lower one, lines are compared: up to it they are equal, up to ``_last`` repeated."""

    def resume(
        self,
        run_id: str | None,
        *,
        updates: int,
        name: str,
        group: str,
        kept_in: Mapping[str, Any],
        identity: Mapping[str, Any],
    ) -> Branch:
        """Where a start at ``updates`` continues, ``run_id`` being that of its checkpoint. ``id`` None: a new run.

        Without a record, in another work dir, the checkpoint's run is the parent.
        """
        records, _ = parse_lines(self._path)
        chain = _chain(records)
        content = json.dumps(json_values(identity), sort_keys=True)
        self._identity = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
        self._branch = Branch(None, run_id, updates, name, group, dict(kept_in), self._identity)
        self._agreed = self._last = updates
        if not chain:
            return self._branch
        if chain[0].kept_in != kept_in:
            self._branch = replace(self._branch, parent=None)
        elif run_id is not None and run_id != _owner(chain, updates).id:
            self._branch = replace(self._branch, name=chain[-1].name, group=chain[-1].group)
        else:
            self._branch = chain[0]
            self._repeated = {
                (line["update"], line["key"]): line["values"]
                for line in records
                if "key" in line
                and line["at"] > updates
                and line["run"] == _owner(chain, line["update"]).id
                and not (self._purges and line["update"] > updates)
            }
            if self._branch.identity != self._identity:
                self._last = max([updates, *(update for update, key in self._repeated if not key)])
        return self._branch

    def num_sent(self, run_id: str | None) -> int:
        """Lines that a run was sent."""
        return sum("key" in record and record["run"] == run_id for record in parse_lines(self._path)[0])

    def opened(self, run_id: str | None) -> None:
        """The writer has opened the run: it is the one that lines go to from now on."""
        identity = self._branch.identity if self._agreed < self._last else self._identity
        self._branch = replace(self._branch, id=run_id, identity=identity)
        self._append({"event": "run", **asdict(self._branch)})

    def differs(self, line: Line) -> bool:
        """Whether ``line`` shows that this start has other numbers than the run already has, because of a change."""
        if self._agreed >= self._last:
            return False
        known = self._repeated.get((line.update, line.key))
        if known is not None:
            names = {*known, *line.values}
            if not all(_close(known.get(name), line.values.get(name), self._rounding) for name in names):
                return True
        if not line.key:
            if line.update > self._last:  # not every update has come again: those cannot be compared
                return True
            self._agreed = line.update
            if self._agreed == self._last:
                self.opened(self._branch.id)
        return False

    def branch(self) -> Branch:
        """A new run after the last update that agrees."""
        parent = _owner(_chain(parse_lines(self._path)[0]), self._agreed).id
        self._repeated, self._last = {}, self._agreed
        self._branch = replace(self._branch, id=None, parent=parent, start=self._agreed)
        return self._branch

    def add(self, line: Line) -> bool:
        """Record that ``line`` is about to be sent; False where the run has it."""
        if self._repeated.pop((line.update, line.key), None) is not None:
            return False
        self._append({"run": self._branch.id, **asdict(line)})
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


def _close(one: Any, other: Any, bound: float) -> bool:
    """``bound``: relative. What is no number, such as null for a term without targets, must be equal."""
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return abs(one - other) <= bound * max(abs(one), abs(other))
    return bool(one == other)
