"""Weights & Biases: one W&B run per training run, across kills and resumes."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmengine.config import Config
from PIL.Image import Image

from unigen_ds.core.json_values import by_name, json_values
from unigen_ds.core.registry import WRITERS
from unigen_ds.tracking.writer import Writer, numbers

ALIASES = {
    "loss/text": "ce",
    "loss/image": "mse",
    "memory": "mem_allocated",
    "samples": "total_samples",
    "loss": "batch_loss",
    "val/loss": "val_loss",
}
"""Names under which BAGEL's and nanoVLM's dashboards look for our metrics. ``lr`` and ``grad_norm`` are the same."""


@WRITERS.register_module()
class WandbVisBackend(Writer):
    """One W&B run per training run: a resume continues the run whose id the checkpoint keeps.

    The horizontal axis of everything is
    ``update``, not W&B's own step, so an evaluation that ends late is still shown at its own update.
    ``WANDB_MODE=disabled`` switches it off.

    Args:
        save_dir: folder of local files; None: the work dir.
        init_kwargs: arguments of ``wandb.init``, such as ``entity``, ``project``, ``name`` and ``mode='offline'``.
        define_metric_cfg: list of arguments of ``wandb.Run.define_metric``.
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
        if isinstance(config, Config):  # the type in a real run, which is not a Mapping
            config = config.to_dict()
        self._run.config.update(json_values(config, by_name), allow_val_change=True)
        self._run.define_metric("update")
        self._run.define_metric("*", step_metric="update")
        for entry in self._define_metric_cfg:
            self._run.define_metric(**entry)
        return str(self._run.id)

    def write(self, record: Mapping[str, Any], *, update: int) -> None:
        found = numbers(record)
        aliases = {alias: found[name] for name, alias in ALIASES.items() if name in found}
        self._run.log({**found, **aliases, "update": update})

    def image(self, name: str, picture: Image, *, update: int) -> None:
        import wandb

        self._run.log({name: wandb.Image(picture), "update": update})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
