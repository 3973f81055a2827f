"""The base of log writers, which show metrics besides ``metrics.jsonl``. Rank 0 only, never collective.

A writer may fail in any way, at any time: it is then disabled with one warning and training continues. The JSON lines
are the record; a writer is a view of it. mmengine's class names and arguments are kept, so its configs work.

No line is shown twice, and none of an abandoned branch. TensorBoard hides the steps after ``purge_step``. W&B
cannot take a line back: its ``resume_from`` is refused offline, on servers of one's own, and for a run that was killed
(https://github.com/wandb/wandb/issues/10438, wandb 0.31). So each line is recorded before it is sent, and after a
resume a line that the run has is not sent again. Where what determines the numbers of a run was changed, and lines come
again, a new run begins at the resume; the old one is its parent. The record is
``<work_dir>/tracking/<writer>.jsonl``::

    {"event": "run", "id": "a1", "parent": null, "start": 0, "name": ..., "group": ..., "identity": "..."}
    {"run": "a1", "update": 10, "at": 10, "key": ""}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unigen_ds.core.errors import ConfigError
from unigen_ds.core.json_values import json_values
from unigen_ds.system.files import make_directory
from unigen_ds.system.journals import JsonLines, parse_lines
from unigen_ds.system.log import logger
from unigen_ds.system.machine import installed_version

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Branch:
    """A run of the tracker: it has the lines after ``start`` updates, its parent those before. ``id`` None: a new run;
    ``parent`` None: it begins by itself."""

    id: str | None
    parent: str | None
    start: int
    name: str
    group: str = ""
    identity: str = ""


class Writer:
    """Base of all writers; a class with ``open``, ``write`` and ``close`` works, too. ``SafeWriter`` catches errors."""

    package = ""
    """The argument of ``pip install`` when its package is missing."""
    purges = False
    """Whether ``open`` removes or hides what was written after ``updates``: a resume then writes it again."""
    branch = Branch(None, None, 0, "")
    """The run that is opened: its name, group and parent. Set before each ``open``."""
    num_sent = 0
    """Lines that the run was sent before, set before each ``open``."""

    def lacks(self) -> list[ConfigError]:
        """Return the errors of ``open``, as far as they can be found without a network: for ``--dry-run``."""
        name = self.package.strip("'").partition("[")[2].strip("]") or self.package  # an extra has its package's name
        if not name or installed_version(name) is not None:
            return []
        return [ConfigError(f"{type(self).__name__} needs {name}", remedy=f"pip install {self.package}")]

    def open(self, *, work_dir: Path, config: Mapping[str, Any], run_id: str | None, updates: int) -> str | None:
        """Start. ``run_id`` is what an earlier start of this run returned; ``updates`` the progress."""
        raise NotImplementedError

    def write(self, record: Mapping[str, Any], *, update: int) -> None:
        """Log the numbers of one record."""
        raise NotImplementedError

    def image(self, name: str, picture: Image, *, update: int) -> None:
        """Show a picture under ``name``; writers without pictures do nothing."""

    def axis(self, name: str, metrics: tuple[str, ...]) -> None:
        """Draw these metrics against ``name``, which their records contain; called before the first of them."""

    def sync(self) -> None:
        """Have what was logged where a kill leaves it; called before each checkpoint counts."""

    def close(self) -> None:
        """Flush and end."""


class SafeWriter:
    """Runs a writer, or an object with its ``open``, ``write`` and ``close``. Its first failure is one warning, after
    which it is not called again; training is not affected. ``name``: of the writer among those of the run: the key of
    its run id in checkpoints, and of its file.
    """

    def __init__(self, writer: Any, name: str | None = None) -> None:
        self._writer: Any = writer
        self.name = name or type(writer).__name__
        self.run_id: str | None = None
        """The id of the run that is written to; before ``open`` that of the checkpoint."""
        self._record: JsonLines | None = None
        self._repeats: set[tuple[int, str]] = set()
        """Lines after the resumed update that the run has: update and key."""
        self._axes: set[str] = set()

    def open(
        self, *, work_dir: Path, config: Mapping[str, Any], updates: int, name: str, identity: Mapping[str, Any]
    ) -> None:
        """Start the writer in the run that ``run_id`` and the record of what was sent name. ``identity``: what
        determines the numbers of a run; where it is the same, the tracker has one run."""
        try:
            writer, path = self._writer, work_dir / "tracking" / f"{self.name}.jsonl"
            records, self._record = parse_lines(path)[0], JsonLines(path)
            digest = hashlib.blake2b(json.dumps(json_values(identity), sort_keys=True).encode(), digest_size=8)
            branch = self._branch(records, Branch(None, self.run_id, updates, name, work_dir.name, digest.hexdigest()))
            writer.branch, writer.num_sent = branch, sum("key" in one and one["run"] == branch.id for one in records)
            self.run_id = writer.open(run_id=branch.id, work_dir=work_dir, config=config, updates=updates)
            make_directory(path.parent)
            self._add({"event": "run", **asdict(replace(branch, id=self.run_id))})
        except Exception as error:
            self._disable(error)

    def _branch(self, records: list[dict[str, Any]], new: Branch) -> Branch:
        """Return the run in which a start continues, or ``new``, which begins here; its parent is the checkpoint's."""
        runs = [{k: v for k, v in record.items() if k != "event"} for record in records if record.get("event") == "run"]
        if not runs:  # another work dir
            return new
        last, updates = Branch(**runs[-1]), new.start
        purges = getattr(self._writer, "purges", False)  # then only late results are held back
        repeats = {
            (line["update"], line["key"])
            for line in records
            if "key" in line and line["run"] == last.id and line["at"] > updates
            if not (purges and line["update"] > updates)
        }
        comes_again = any(update > updates for update, _ in repeats)
        continues = new.parent in (None, last.id, last.parent) and last.start <= updates
        if continues and (last.identity == new.identity or not comes_again):
            self._repeats = repeats
            return replace(last, identity=new.identity)
        return replace(new, parent=new.parent or last.id, name=last.name, group=last.group)

    def write(
        self, record: Mapping[str, Any], *, update: int, event: str = "", at: int | None = None, axis: str = "update"
    ) -> None:
        """Write one record, unless the run has it. ``event``: "" for the line of an update; ``at``: progress; ``axis``,
        if not ``update``: one more number of it."""
        key = f"{event} {hashlib.blake2b(repr(sorted(record)).encode(), digest_size=6).hexdigest()}" if event else ""
        if self._is_new(update, update if at is None else at, key):
            if axis != "update":
                if axis not in self._axes:
                    self._axes.add(axis)
                    self._call("axis", axis, tuple(record))
                record = {**record, axis: update}
            self._call("write", record, update=update)

    def image(self, name: str, picture: Image, *, update: int, at: int) -> None:
        if hasattr(self._writer, "image") and self._is_new(update, at, f"image {name}"):
            self._call("image", name, picture, update=update)

    def _is_new(self, update: int, at: int, key: str) -> bool:
        """Whether the run does not have this line; it is recorded before it is sent: a kill repeats none."""
        if self._writer is None or (update, key) in self._repeats:
            self._repeats.discard((update, key))
            return False
        self._add({"run": self.run_id, "update": update, "at": at, "key": key})
        return True

    def _add(self, line: Mapping[str, Any]) -> None:
        assert self._record is not None
        with suppress(OSError):  # a full disk: the line is kept in memory and written later; a save reports it
            self._record.append(line)

    def sync(self) -> None:
        """Have what was sent, and the record of it, on disk. Raises ``OSError`` for the record."""
        self._call("sync")
        if self._record is not None:
            self._record.sync()

    def close(self) -> None:
        self._call("close")
        if self._record is not None:
            self._record.close()

    def _call(self, method: str, *arguments: Any, **options: Any) -> None:
        if hasattr(self._writer, method):
            try:
                getattr(self._writer, method)(*arguments, **options)
            except Exception as error:  # whatever a dashboard does wrong must not end a training run
                self._disable(error)

    def _disable(self, error: Exception) -> None:
        package = getattr(self._writer, "package", "") if isinstance(error, ImportError) else ""
        remedy = f" Remedy: pip install {package}" if package else ""
        problem = f"{type(error).__name__}: {error or 'no message'}"
        logger().warning("%s is disabled, training continues: %s.%s", self.name, problem.rstrip("."), remedy)
        self._writer = None


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return what a dashboard can draw: numbers and truth values; texts, nulls and lists are left out."""
    return {name: float(value) for name, value in record.items() if isinstance(value, (bool, int, float))}
