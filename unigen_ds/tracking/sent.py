"""What a tracker has been sent: ``<work_dir>/tracking/<writer>.jsonl``. It decides where a resume continues.

A tracker cannot take a line back. So each line is recorded before it is sent, with the run that gets it and the numbers
that a repeated update must show again. After a resume, a line that the run has is not sent again. Where config, data,
split of the batch, number of processes or engine was changed and a repeated number differs by more than rounding, a new
run begins at the resumed update, whose parent is the old one, and gets everything since then.

::

    {"event": "run", "id": "a1", "parent": null, "start": 0, "name": ..., "kept_in": {...}, "identity": "..."}
    {"run": "a1", "update": 10, "at": 10, "key": "", "values": {"loss": 2.5, ...}}
    {"event": "lost", "run": "a1", "lines": [[10, ""]]}    the tracker has not got them: void, as if never sent
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from unigen_ds.core.files import make_directory
from unigen_ds.core.json_values import json_values
from unigen_ds.core.log import logger
from unigen_ds.core.metrics import JsonLines, finite, parse_lines

ROUNDING, ROUNDING_CUDA = 1e-5, 1e-3
"""Largest relative difference of a repeated number that is none: engines, and kernels of a GPU, add in any order."""
UNEXPECTED = 0.02
"""Relative difference of a repeated number from which on it is reported, although nothing was changed."""
_COMPARED = ("loss", "lr", "applied", "sequences", "samples", "tokens", "val/loss")
"""First letters of what a repeated update must show again: times, rates and memory differ each time, norms of gradients
and scores of validation more than losses."""
Outcome = Literal["new", "held", "differs"]


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
        compared = {name: value for name, value in record.items() if _is_compared(name)}
        return cls(update, update if at is None else at, key, json_values(compared, finite))


def _is_compared(name: str) -> bool:
    return name.startswith(_COMPARED) and "_per_second" not in name


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
        purged: the writer itself hides lines after the resumed update: only late results are held back.
        rounding: largest relative difference of numbers that count as equal.
    """

    def __init__(self, path: Path, *, purged: bool, rounding: float = ROUNDING) -> None:
        self._path, self._purged, self._rounding = path, purged, rounding
        self._lines: JsonLines | None = None
        self._branch = Branch(None, None, 0, "")
        self._repeated: dict[tuple[int, str], Mapping[str, Any]] = {}
        self._held: list[tuple[Line, Callable[[Any], None]]] = []
        self._changed, self._reported = False, False
        self._last, self._settled = 0, False

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

        Without a record the checkpoint's run is the parent, of another work dir.
        """
        branches, lines = self._read()
        digest = hashlib.blake2b(json.dumps(json_values(identity), sort_keys=True).encode(), digest_size=8).hexdigest()
        chain = _chain(branches)
        fresh = Branch(None, None, 0, name, group, dict(kept_in), digest)
        if not chain:
            self._branch = replace(fresh, parent=run_id, start=updates)
        elif dict(chain[0].kept_in) != dict(kept_in):
            self._branch = replace(fresh, start=updates)
        elif run_id is not None and run_id != _owner(chain, updates).id:
            self._branch = replace(fresh, name=chain[-1].name, group=chain[-1].group, parent=run_id, start=updates)
        else:
            self._branch = replace(chain[0], identity=digest)
            self._changed = chain[0].identity != digest
            self._repeated = {
                (line["update"], line["key"]): line["values"]
                for line in lines
                if line["at"] > updates and line["run"] == _owner(chain, line["update"]).id
            }
        if self._purged:  # late results alone; the first one is kept
            self._repeated = {key: values for key, values in self._repeated.items() if key[0] <= updates}
        self._last = max([update for update, _ in self._repeated if update > updates], default=updates)
        self._settled = self._last == updates
        return self._branch

    def last_run(self) -> tuple[str | None, int]:
        """Id of the run that lines went to last, and how many starts it had."""
        branches = self._read()[0]
        run_id = branches[-1].id if branches else None
        return run_id, sum(branch.id == run_id for branch in branches)

    def lose(self, run_id: str, kept: Mapping[int, int]) -> list[Line]:
        """Make void what a run was sent and has not got: of each update the lines after the first ``kept`` ones."""
        left, lost = dict(kept), []
        for record in self._read()[1]:
            if record["run"] != run_id:
                continue
            left[record["update"]] = left.get(record["update"], 0) - 1
            if left[record["update"]] < 0:
                lost.append(Line(**{name: record[name] for name in ("update", "at", "key", "values")}))
        if lost:
            self._append({"event": "lost", "run": run_id, "lines": [[line.update, line.key] for line in lost]})
        return lost

    def num_sent(self, run_id: str | None) -> int:
        """Lines that a run was sent, those that it has not got included."""
        return sum(record.get("run") == run_id and "update" in record for record in parse_lines(self._path)[0])

    def opened(self, run_id: str | None) -> None:
        """The writer has opened the run: it is the one that lines go to from now on."""
        self._branch = replace(self._branch, id=run_id)
        self._append({"event": "run", **asdict(self._branch)})

    def compare(self, line: Line, show: Callable[[Any], None]) -> Outcome:
        """Whether the run has ``line``. While lines may still repeat, each is kept with ``show`` for a new run."""
        if not self._settled and line.update > self._last:  # every update that may repeat has been seen again
            if self._changed and any(not key for _, key in self._repeated):  # not all: those cannot be compared
                self._held.append((line, show))
                return "differs"
            self._settled = True
            self._held.clear()
        known = self._repeated.pop((line.update, line.key), None)
        if not self._settled:
            self._held.append((line, show))
            if known is not None and self._differs(known, line):
                return "differs"
        return "new" if known is None else "held"

    def _differs(self, known: Mapping[str, Any], line: Line) -> bool:
        """Whether a repeated line has other numbers because of a change. Without one, much else is reported once."""
        bound = self._rounding if self._changed else UNEXPECTED
        other = next((n for n in (*known, *line.values) if not _close(known.get(n), line.values.get(n), bound)), None)
        if other is not None and not self._changed and not self._reported:
            self._reported = True
            logger().warning(
                "Repeated update %d has %s %s, and had %s before the resume, although config, data and engine are "
                "unchanged. Trackers keep the first value.",
                line.update, other, line.values.get(other), known.get(other),
            )  # fmt: skip
        return other is not None and self._changed

    def branch(self, updates: int) -> tuple[list[tuple[Line, Callable[[Any], None]]], Branch]:
        """A new run from ``updates`` on, and the lines that were held back."""
        held, self._held, self._repeated, self._settled = self._held, [], {}, True
        owner = _owner(_chain(self._read()[0]), updates)
        self._branch = replace(self._branch, id=None, parent=owner.id, start=updates)
        return held, self._branch

    def record(self, line: Line) -> None:
        """``line`` is about to be sent."""
        self._append({"run": self._branch.id, **asdict(line)})

    def sync(self) -> None:
        if self._lines is not None:
            self._lines.sync()

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def _append(self, record: Mapping[str, Any]) -> None:
        if self._lines is None:
            make_directory(self._path.parent)
            self._lines = JsonLines(self._path)
        with suppress(OSError):  # a full disk: the line is kept in memory and written later; a save reports it
            self._lines.append(record)

    def _read(self) -> tuple[list[Branch], list[dict[str, Any]]]:
        """Every run, in the order of the starts, and every line. A torn line is passed over: it was not sent."""
        branches: list[Branch] = []
        lines: list[dict[str, Any]] = []
        texts = self._path.read_text(encoding="utf-8", errors="replace").splitlines() if self._path.exists() else ()
        for text in texts:
            try:
                record = json.loads(text)
            except json.JSONDecodeError:
                continue
            event = record.pop("event", None)
            if event == "run":
                branches.append(Branch(**record))
            elif event == "lost":
                void = {(record["run"], update, key) for update, key in record["lines"]}
                lines = [line for line in lines if (line["run"], line["update"], line["key"]) not in void]
            else:
                lines.append(record)
        return branches, lines


def _chain(branches: list[Branch]) -> list[Branch]:
    """The last run, its parent, and so on to the first; each as it was last opened."""
    by_id = {branch.id: branch for branch in branches}
    chain: list[Branch] = []
    current = branches[-1].id if branches else None
    while current in by_id and by_id[current] not in chain:
        chain.append(by_id[current])
        current = by_id[current].parent
        if current is None:
            break
    return chain


def _owner(chain: list[Branch], update: int) -> Branch:
    """The run of a chain that has the line of ``update``."""
    return next((branch for branch in chain if branch.start < update), chain[-1])


def _close(one: Any, other: Any, bound: float) -> bool:
    """``bound``: relative. What is no number, such as null for a term without targets, must be equal."""
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return abs(one - other) <= bound * max(abs(one), abs(other))
    return bool(one == other)
