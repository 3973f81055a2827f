"""TensorBoard's event files."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unigen_ds.config.registry import WRITERS
from unigen_ds.tracking.writer import Writer, numbers

if TYPE_CHECKING:
    from PIL.Image import Image


@WRITERS.register_module()
class TensorboardVisBackend(Writer):
    """Event files. A resume hides the steps that it writes again.

    Args:
        save_dir: folder of the event files; outside of the work dir each run has a folder in it with its run name;
            None: ``<work_dir>/tensorboard``.
    """

    package = "'unigen_ds[tensorboard]'"
    purges = True

    def __init__(self, *, save_dir: str | None = None) -> None:
        self._save_dir = save_dir
        self._writer: Any = None

    def open(self, *, work_dir: Path, config: Mapping[str, Any], run_id: str | None, updates: int) -> str | None:
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(self._save_dir) if self._save_dir else work_dir / "tensorboard"
        if not folder.resolve().is_relative_to(work_dir.resolve()):
            name = self.branch.name
            names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
            run_id = run_id or next(own for own in names if not (folder / own).exists())
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
