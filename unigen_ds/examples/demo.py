"""What the demos share: files in the format of a user's own data, and a report when a training is complete."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

from PIL import Image

from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.hooks.base import Hook, Run
from unigen_ds.system.files import new_directory, write_atomic, write_text_atomic
from unigen_ds.system.log import logger

_MARKER = "complete"


def prepare_folder(root: Path, write: Callable[[Path], None], *, argument: str) -> Path:
    """Call ``write`` with a folder that becomes ``root``, whole or not at all, unless it is there; returns ``root``. Of
    processes that start together the first succeeds. Raises ``ConfigError``, naming ``argument``, for another folder.
    """
    marker = root / _MARKER
    if not marker.exists():
        try:
            with new_directory(root) as folder:
                write(folder)
                (folder / _MARKER).touch()
        except (ConfigError, CheckpointError) as error:
            if not marker.exists():  # else another process was first
                remedy = "name a folder that does not exist"
                raise ConfigError(f"{argument} {root} cannot be written: {error}", remedy=remedy) from error
    return root


def record(*turns: tuple[Literal["user", "assistant"], Literal["text", "image"], str]) -> str:
    """A line of JSONL: a conversation of (role, kind, text or path of the image)."""
    entries = [
        {"role": role, "type": kind, ("content" if kind == "text" else "image_path"): value}
        for role, kind, value in turns
    ]
    return json.dumps({"conversations": entries}) + "\n"


class ReportHook(Hook):
    """Writes ``samples.png`` and ``results.json`` once the training is complete. A demo adds ``measure``."""

    dataset: ClassVar[Any]

    def before_run(self, run: Run) -> None:
        roots: list[Path] = [dataset.root for dataset in run.datasets if isinstance(dataset, self.dataset)]
        if not roots:
            raise ConfigError(f"{type(self).__name__} needs a data set of type {self.dataset.__name__}")
        self.root = roots[0]

    def after_run(self, run: Run) -> None:
        if not run.finished or (report := self.measure(run, self.root)) is None:
            return
        results, sheet, summary = report
        out = run.work_dir
        write_text_atomic(out / "results.json", json.dumps(results, indent=1) + "\n")
        write_atomic(out / "samples.png", lambda path: sheet.save(path, format="PNG"))
        logger().info(f"{summary} Pictures: {out / 'samples.png'}; numbers: {out}/results.json.")

    @abstractmethod
    def measure(self, run: Run, root: Path) -> tuple[dict[str, Any], Image.Image, str] | None:
        """Numbers, samples and a summary of the trained model (of its EMA, if any); None but on rank 0. Collective."""
