"""Where metrics go besides ``metrics.jsonl``: TensorBoard and Weights & Biases. Rank 0 only, never collective.

A writer may fail in any way, at any time: it is then disabled with one warning and training goes on. The JSON lines are
the record; a writer is a view of it. mmengine's class names and arguments are kept, so its configs work.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmengine.config import Config

from unigen_ds.core.log import logger
from unigen_ds.core.registry import WRITERS

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
    """Base of all writers. ``SafeWriter`` calls it, and catches what it raises."""

    package = ""
    """What ``pip install`` is to be given when its package is missing."""

    def open(self, *, work_dir: Path, config: Mapping[str, Any], run_id: str | None, updates: int) -> str | None:
        """Start. ``run_id`` is what an earlier start of this run returned; ``updates`` the progress to go on from."""
        raise NotImplementedError

    def write(self, record: Mapping[str, Any], *, update: int) -> None:
        """Log the numbers of one record."""
        raise NotImplementedError

    def close(self) -> None:
        """Flush and end."""


@WRITERS.register_module()
class TensorboardVisBackend(Writer):
    """Event files in ``<work_dir>/tensorboard`` (or ``save_dir``). A resume hides what it will write again."""

    package = "'unigen_ds[tensorboard]'"

    def __init__(self, *, save_dir: str | None = None) -> None:
        self._save_dir = save_dir
        self._writer: Any = None

    def open(self, *, work_dir: Path, config: Mapping[str, Any], run_id: str | None, updates: int) -> str | None:
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(self._save_dir) if self._save_dir else work_dir / "tensorboard"
        self._writer = SummaryWriter(str(folder), purge_step=updates + 1 if updates else None)
        return None

    def write(self, record: Mapping[str, Any], *, update: int) -> None:
        for name, value in _numbers(record).items():
            self._writer.add_scalar(name, value, update)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


@WRITERS.register_module()
class WandbVisBackend(Writer):
    """One W&B run per training run: a resume goes on with the run whose id the checkpoint keeps.

    ``init_kwargs`` are those of ``wandb.init`` (``entity``, ``project``, ``name``, ``mode='offline'``, ...).
    ``define_metric_cfg`` is a list of arguments of ``wandb.Run.define_metric``. The horizontal axis of everything is
    ``update``, not W&B's own step, so an evaluation that ends late still lands where it belongs.
    ``WANDB_MODE=disabled`` switches it off.
    """

    package = "wandb"

    def __init__(
        self,
        *,
        save_dir: str | None = None,
        init_kwargs: Mapping[str, Any] | None = None,
        define_metric_cfg: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._save_dir = save_dir
        self._init_kwargs = dict(init_kwargs or {})
        self._define_metric_cfg = [dict(entry) for entry in define_metric_cfg]
        self._run: Any = None

    def open(self, *, work_dir: Path, config: Mapping[str, Any], run_id: str | None, updates: int) -> str | None:
        import wandb

        arguments = {
            "id": run_id or uuid.uuid4().hex[:12],
            "resume": "allow",
            "name": work_dir.name,
            "dir": self._save_dir or str(work_dir),
            **self._init_kwargs,
        }
        self._run = wandb.init(**arguments)
        self._run.config.update(_plain(config), allow_val_change=True)
        self._run.define_metric("update")
        self._run.define_metric("*", step_metric="update")
        for entry in self._define_metric_cfg:
            self._run.define_metric(**entry)
        return str(self._run.id)

    def write(self, record: Mapping[str, Any], *, update: int) -> None:
        numbers = _numbers(record)
        aliases = {alias: numbers[name] for name, alias in ALIASES.items() if name in numbers}
        self._run.log({**numbers, **aliases, "update": update})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class SafeWriter:
    """Runs a writer; its first failure is one warning, and the end of it. Training never notices."""

    def __init__(self, writer: Writer) -> None:
        self._writer: Writer | None = writer
        self.name = type(writer).__name__
        self.run_id: str | None = None

    def open(self, *, work_dir: Path, config: Mapping[str, Any], updates: int) -> None:
        """Start the writer, with the run id that ``run_id`` holds."""

        def start(writer: Writer) -> None:
            self.run_id = writer.open(work_dir=work_dir, config=config, run_id=self.run_id, updates=updates)

        self._guarded(start)

    def write(self, record: Mapping[str, Any], *, update: int) -> None:
        self._guarded(lambda writer: writer.write(record, update=update))

    def close(self) -> None:
        self._guarded(lambda writer: writer.close())

    def _guarded(self, action: Callable[[Writer], None]) -> None:
        if self._writer is None:
            return
        try:
            action(self._writer)
        except ImportError as error:
            logger().warning(
                "%s is disabled: %s. Remedy: pip install %s", self.name, error, self._writer.package or "what it needs"
            )
            self._writer = None
        except Exception as error:  # whatever a dashboard does wrong must not end a training run
            logger().warning(
                "%s is disabled, training goes on: %s: %s", self.name, type(error).__name__, error or "no message"
            )
            self._writer = None


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """What a dashboard can draw: numbers and truth values; texts, nulls and lists are left out."""
    return {name: float(value) for name, value in record.items() if isinstance(value, (bool, int, float))}


def _plain(value: Any) -> Any:
    """A config as JSON-like values; classes and functions by name."""
    if isinstance(value, Config):  # which a real run passes, and which is no Mapping
        value = value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return getattr(value, "__name__", str(value))
