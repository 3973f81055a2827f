"""The base of log writers, which show metrics besides ``metrics.jsonl``. Rank 0 only, never collective.

A writer may fail in any way, at any time: it is then disabled with one warning and training continues. The JSON lines
are the record; a writer is a view of it. mmengine's class names and arguments are kept, so its configs work.

No line is shown twice, and none of an abandoned branch: ``SafeWriter`` records what was sent (``tracking/sent.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmengine.config import Config
from packaging.requirements import Requirement

from unigen_ds.core.errors import ConfigError
from unigen_ds.core.json_values import by_name, json_values
from unigen_ds.system.files import make_directory
from unigen_ds.system.log import logger
from unigen_ds.system.machine import installed
from unigen_ds.tracking.sent import Branch, Line, Sent

if TYPE_CHECKING:
    from PIL.Image import Image

ALIASES = {
    "loss/text": "ce",
    "loss/image": "mse",
    "memory": "mem_allocated",
    "samples": "total_samples",
    "loss": "batch_loss",
    "val/loss": "val_loss",
}
"""Names under which BAGEL's and nanoVLM's dashboards look for our metrics. ``lr`` and ``grad_norm`` are the same."""


class Writer:
    """Base of all writers. ``SafeWriter`` calls it, and catches what it raises. Rank 0 only.

    A class without this base works too: it needs ``open``, ``write`` and ``close``.
    """

    package = ""
    """The argument of ``pip install`` when its package is missing."""
    purges = False
    """Whether ``open`` removes or hides what was written after ``updates``: a resume then writes it again."""
    branch = Branch(None, None, 0, "")
    """The run that is opened: its name, group and parent. Set before each ``open``."""
    num_sent = 0
    """Lines that the run was sent before, set before each ``open``."""

    def kept_in(self) -> Mapping[str, Any]:
        """Return where runs are kept, such as the project: a resume with another value begins a new run there."""
        return {}

    def lacks(self) -> list[ConfigError]:
        """Return the errors of ``open``, as far as they can be found without a network: for ``--dry-run``."""
        needed = Requirement(self.package.strip("'")) if self.package else None
        names = [] if needed is None else sorted(needed.extras) or [needed.name]  # an extra has its package's name
        missing = [name for name in names if installed(name) is None]
        name = type(self).__name__
        return [ConfigError(f"{name} needs {each}", remedy=f"pip install {self.package}") for each in missing]

    def open(self, *, work_dir: Path, config: Mapping[str, Any], run_id: str | None, updates: int) -> str | None:
        """Start. ``run_id`` is what an earlier start of this run returned; ``updates`` the progress."""
        raise NotImplementedError

    def write(self, record: Mapping[str, Any], *, update: int) -> None:
        """Log the numbers of one record."""
        raise NotImplementedError

    def write_event(self, record: Mapping[str, Any], *, update: int, event: str) -> None:
        """Log a record that is not the line of an update: an evaluation, statistics, a late result."""
        self.write(record, update=update)

    def image(self, name: str, picture: Image, *, update: int) -> None:
        """Show a picture under ``name``; writers without pictures do nothing."""

    def axis(self, name: str, metrics: tuple[str, ...]) -> None:
        """Draw these metrics against ``name``, which their records contain; called before the first of them."""

    def abandon(self, note: str) -> None:
        """Mark the open run: it is not continued after the update that ``note`` names. ``close`` follows."""

    def sync(self) -> None:
        """Have what was logged where a kill leaves it; called before each checkpoint counts."""

    def close(self) -> None:
        """Flush and end."""


class SafeWriter:
    """Runs a writer; its first failure is one warning, after which it is not called again. Training is not affected.

    Args:
        writer: a ``Writer``, or an object with its ``open``, ``write`` and ``close``.
        name: of the writer among those of the run: the key of its run id in checkpoints, and of its file.
    """

    def __init__(self, writer: Any, name: str | None = None) -> None:
        self._writer: Any = writer
        self.name = name or type(writer).__name__
        self.run_id: str | None = None
        """The id of the run that is written to; before ``open`` that of the checkpoint."""
        self._sent: Sent | None = None
        self._axes: set[str] = set()

    def open(
        self, *, work_dir: Path, config: Mapping[str, Any], updates: int, name: str, identity: Mapping[str, Any]
    ) -> None:
        """Start the writer in the run that ``run_id`` and the record of what was sent name.

        ``identity``: what determines the numbers of a run; where it is the same, the tracker has one run.
        """

        def start(writer: Any) -> None:
            path = work_dir / "tracking" / f"{self.name}.jsonl"
            sent = self._sent = Sent(path, purges=getattr(writer, "purges", False))
            kept_in = dict(writer.kept_in()) if hasattr(writer, "kept_in") else {}
            branch, abandoned = sent.resume(
                self.run_id, updates=updates, name=name, group=work_dir.name, kept_in=kept_in, identity=identity
            )

            def open_run(run: Branch) -> str | None:
                writer.branch = run
                writer.num_sent = sent.num_sent(run.id)
                run_id: str | None = writer.open(run_id=run.id, work_dir=work_dir, config=config, updates=updates)
                return run_id

            if abandoned is not None and hasattr(writer, "abandon"):
                open_run(abandoned)
                writer.abandon(f"abandoned after update {updates}")
                writer.close()
            self.run_id = open_run(branch)
            sent.begin(replace(branch, id=self.run_id))
            if abandoned is not None:
                logger().info(
                    "%s: the numbers of this run are determined otherwise than those of run %s, which has updates after"
                    " %d: they are sent to the new run %s.", self.name, abandoned.id, updates, self.run_id,
                )  # fmt: skip

        self._guarded(start)

    def write(
        self, record: Mapping[str, Any], *, update: int, event: str = "", at: int | None = None, axis: str = "update"
    ) -> None:
        """Write one record, unless the run has it.

        ``event``: "" for the line of an update; ``at``: progress; ``axis``: another one than ``update`` becomes one
        more number of the record.
        """
        numbers = record if axis == "update" else {**record, axis: update}

        def show(writer: Any) -> None:
            if axis != "update" and axis not in self._axes and hasattr(writer, "axis"):
                writer.axis(axis, tuple(record))
                self._axes.add(axis)
            if event and hasattr(writer, "write_event"):
                writer.write_event(numbers, update=update, event=event)
            else:
                writer.write(numbers, update=update)

        self._send(Line.of(record, update=update, event=event, at=at), show)

    def image(self, name: str, picture: Image, *, update: int, at: int) -> None:
        if hasattr(self._writer, "image"):
            line = Line(update, at, f"image {name}")
            self._send(line, lambda writer: writer.image(name, picture, update=update))

    def _send(self, line: Line, show: Callable[[Any], None]) -> None:
        sent = self._sent
        # recorded first, so that a kill between the two leaves no line that is sent again
        if sent is not None and self._writer is not None and sent.add(line):
            self._guarded(show)

    def sync(self) -> None:
        """Have what was sent, and the record of it, on disk. Raises ``OSError`` for the record."""
        if self._sent is not None:
            self._guarded(lambda writer: writer.sync() if hasattr(writer, "sync") else None)
            self._sent.sync()

    def close(self) -> None:
        self._guarded(lambda writer: writer.close())
        if self._sent is not None:
            self._sent.close()

    def _guarded(self, action: Callable[[Any], None]) -> None:
        if self._writer is None:
            return
        try:
            action(self._writer)
        except ImportError as error:
            package = getattr(self._writer, "package", "") or "what it needs"
            logger().warning("%s is disabled: %s. Remedy: pip install %s", self.name, error, package)
            self._writer = None
        except Exception as error:  # whatever a dashboard does wrong must not end a training run
            logger().warning(
                "%s is disabled, training continues: %s: %s", self.name, type(error).__name__, error or "no message"
            )
            self._writer = None


def own_file(folder: Path, name: str, *, suffix: str) -> str:
    """Create an empty file ``<folder>/<name><suffix>``, or with ``suffix`` "" a folder, that no run has yet; its name
    without the suffix. Where another run has the name, a number is appended, with a warning.
    """
    make_directory(folder)
    for number in range(1, 10_000):
        own = name if number == 1 else f"{name}-{number}"
        path = folder / f"{own}{suffix}"
        try:
            if suffix:
                path.touch(exist_ok=False)
            else:
                path.mkdir()
        except FileExistsError:
            continue
        if number > 1:
            logger().warning(
                "%s belongs to another run: the lines of this one are in %s. Choose another visualizer.run_name"
                " for a name of its own.", folder / f"{name}{suffix}", path,
            )  # fmt: skip
        return own
    raise FileExistsError(f"{folder} has 9999 runs with the name {name}")


def plain_config(config: Any) -> dict[str, Any]:
    """A config as JSON values, nested as it is, so that trackers show its sections as groups."""
    plain: dict[str, Any] = json_values(config.to_dict() if isinstance(config, Config) else config, by_name)
    return plain


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return what a dashboard can draw: numbers and truth values; texts, nulls and lists are left out."""
    return {name: float(value) for name, value in record.items() if isinstance(value, (bool, int, float))}


def with_aliases(record: Mapping[str, Any]) -> dict[str, float]:
    """``numbers``, and the same values under the names of other trainers (``ALIASES``)."""
    plain = numbers(record)
    return {**plain, **{alias: plain[name] for name, alias in ALIASES.items() if name in plain}}
