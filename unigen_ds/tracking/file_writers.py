"""Trackers on files of the user's choice: TensorBoard, and JSON lines as ``metrics.jsonl`` has them. A resume hides or
voids the lines that it writes again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unigen_ds.config.registry import WRITERS
from unigen_ds.system.journals import JsonLines
from unigen_ds.tracking.writer import Writer, numbers, own_file

if TYPE_CHECKING:
    from PIL.Image import Image


@WRITERS.register_module()
class TensorboardVisBackend(Writer):
    """Event files in ``<work_dir>/tensorboard`` (or ``save_dir``). A resume hides the steps that it writes again.

    A ``save_dir`` outside of the work dir may have several runs: each gets a folder there with its name, which a resume
    continues in.

    Args:
        save_dir: folder of the event files; outside of the work dir each run has a folder in it with its run name;
            None: ``<work_dir>/tensorboard``.
    """

    package = "'unigen_ds[tensorboard]'"
    purges = True

    def __init__(self, *, save_dir: str | None = None) -> None:
        self._save_dir = save_dir
        self._writer: Any = None

    def kept_in(self) -> Mapping[str, Any]:
        return {"save_dir": self._save_dir}

    def open(self, *, work_dir: Path, config: Mapping[str, Any], run_id: str | None, updates: int) -> str | None:
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(self._save_dir) if self._save_dir else work_dir / "tensorboard"
        if not folder.resolve().is_relative_to(work_dir.resolve()):
            run_id = run_id or own_file(folder, self.branch.name, suffix="")
            folder /= run_id
        self._writer = SummaryWriter(str(folder), purge_step=updates + 1)  # at a first start, too: it may be repeated
        return run_id

    def write(self, record: Mapping[str, Any], *, update: int) -> None:
        for name, value in numbers(record).items():
            self._writer.add_scalar(name, value, update)
        self._writer.flush()

    def image(self, name: str, picture: Image, *, update: int) -> None:
        import numpy as np

        self._writer.add_image(name, np.asarray(picture.convert("RGB")), update, dataformats="HWC")
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


@WRITERS.register_module()
class JsonlVisBackend(Writer):
    """One object per line in ``<save_dir>/<run name>.jsonl``; a resume voids lines that it writes again by an event.

    Lines of updates have no ``event``; others have that of ``metrics.jsonl``, such as ``evaluation``.
    ``unigen_ds.system.journals.read_lines`` returns the lines that count. Each run has a file: where another run has
    the name, a number is appended.

    Args:
        save_dir: folder of the file.
    """

    purges = True

    def __init__(self, *, save_dir: str) -> None:
        self._save_dir = save_dir
        self._lines: JsonLines | None = None

    def kept_in(self) -> Mapping[str, Any]:
        return {"save_dir": self._save_dir}

    def open(self, *, work_dir: Path, config: Mapping[str, Any], run_id: str | None, updates: int) -> str | None:
        name = run_id or own_file(Path(self._save_dir), self.branch.name, suffix=".jsonl")
        path = Path(self._save_dir) / f"{name}.jsonl"
        self._lines = JsonLines(path)
        if path.exists() and path.stat().st_size:
            self._lines.append({"event": "resume", "updates": updates})
        return name

    def write(self, record: Mapping[str, Any], *, update: int) -> None:
        assert self._lines is not None
        self._lines.append({"update": update, **record} if "update" not in record else record)

    def write_event(self, record: Mapping[str, Any], *, update: int, event: str) -> None:
        self.write({"event": event, "update": update, **record}, update=update)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
