"""Weights & Biases: one run there per training run, across kills and resumes."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unigen_ds.config.registry import WRITERS
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.json_values import by_name, json_values
from unigen_ds.system.log import logger
from unigen_ds.tracking.writer import Writer, numbers

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
_FLUSH, _FLUSH_SECONDS = "x_transaction_log_flush_interval", 0.1
"""Setting of W&B: seconds after which a row is in the file of an offline run. A kill loses what is not, by default the
rows of 15 seconds."""


@WRITERS.register_module()
class WandbVisBackend(Writer):
    """One W&B run per training run: a resume continues it and sends nothing that it has.

    Where a repeated update has other numbers (another config, data or engine), a new run of the same group begins after
    the last update that agrees; ``parent_run`` of its config names the old one. The horizontal axis of everything is
    ``update``, not W&B's own step, so an evaluation that ends late is still shown at its own update.
    ``WANDB_MODE=disabled`` switches it off.

    Args:
        save_dir: folder of local files; None: the work dir.
        project: of W&B; None: W&B's own default.
        entity: user or team; None: the one that is logged in.
        name: of the run; None: ``visualizer.run_name``, or the name of the work dir.
        group: of the run and of those that continue it with other numbers; None: the name of the work dir.
        init_kwargs: further arguments of ``wandb.init``, such as ``mode='offline'``; they win over the above.
        define_metric_cfg: list of arguments of ``wandb.Run.define_metric``.
    """

    package = "wandb"

    def __init__(
        self,
        *,
        save_dir: str | None = None,
        project: str | None = None,
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        init_kwargs: Mapping[str, Any] | None = None,
        define_metric_cfg: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        arguments = {"dir": save_dir or None, "project": project, "entity": entity, "name": name, "group": group}
        self._init_kwargs: dict[str, Any] = {key: value for key, value in arguments.items() if value is not None}
        self._init_kwargs.update(init_kwargs or {})
        self._define_metric_cfg = [dict(entry) for entry in define_metric_cfg]
        self._run: Any = None
        self._next_step: int | None = None
        """W&B's own step of the next row; None: W&B counts."""

    def lacks(self) -> list[ConfigError]:
        """The package, and the key where lines are sent to a server; whether the server accepts it is not known."""
        from requests.utils import get_netrc_auth

        if missing := super().lacks():
            return missing
        mode = str(self._init_kwargs.get("mode") or os.environ.get("WANDB_MODE") or "online")
        server = os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
        has_variable = any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"))
        without_login = mode != "online" or self._init_kwargs.get("anonymous") in ("allow", "must")
        if without_login or has_variable or get_netrc_auth(server) is not None:
            return []
        remedy = "`wandb login`, WANDB_API_KEY in the environment of the job, or init_kwargs=dict(mode='offline')"
        return [ConfigError(f"W&B is not logged in: there is no key for {server}", remedy=remedy)]

    def open(self, *, work_dir: Path, config: Mapping[str, Any], run_id: str | None, updates: int) -> str | None:
        import wandb

        branch, own_id = self.branch, run_id or uuid.uuid4().hex[:12]
        defaults = {"name": branch.name, "group": branch.group, "dir": str(work_dir)}
        arguments: dict[str, Any] = {"id": own_id, "resume": "allow", **defaults, **self._init_kwargs}
        if not isinstance(own := arguments.get("settings") or {}, wandb.Settings):
            # warnings and errors alone: no table of all values at the end, no lines about what every run has
            wandb.setup(wandb.Settings(show_info=bool(own.get("show_info"))))
            flush = {_FLUSH: _FLUSH_SECONDS} if hasattr(wandb.Settings(), _FLUSH) else {}  # older ones flush each row
            arguments["settings"] = {"quiet": True, **flush, **own}
        values = json_values(config, by_name)
        if branch.parent is not None:  # a run of its own, whatever the config calls the first
            arguments |= {"id": own_id, "name": f"{arguments['name']} from update {branch.start}"}
            values |= {"parent_run": branch.parent, "parent_update": branch.start}
        self._run = wandb.init(**arguments)
        if not self._run.offline and self._run.url:  # W&B warns where an offline run is asked for its address
            logger().info("W&B: run %s is at %s", self._run.name, self._run.url)
        # Offline, W&B does not know the steps that the run has, and counts from 0: on its server later rows would
        # replace earlier ones (https://github.com/wandb/wandb/pull/11144).
        self._next_step = self.num_sent if self._run.offline and self.num_sent else None
        self._run.config.update(values, allow_val_change=True)
        self._run.define_metric("update")
        self._run.define_metric("*", step_metric="update")
        for entry in self._define_metric_cfg:
            self._run.define_metric(**entry)
        return str(self._run.id)

    def write(self, record: Mapping[str, Any], *, update: int) -> None:
        row = numbers(record)
        self._log({**row, **{alias: row[name] for name, alias in ALIASES.items() if name in row}, "update": update})

    def _log(self, row: dict[str, Any]) -> None:
        step, self._next_step = self._next_step, None
        self._run.log(row, **({} if step is None else {"step": step, "commit": True}))

    def image(self, name: str, picture: Image, *, update: int) -> None:
        import wandb

        self._log({name: wandb.Image(picture), "update": update})

    def axis(self, name: str, metrics: Sequence[str]) -> None:
        self._run.define_metric(name)
        for metric in metrics:
            self._run.define_metric(metric, step_metric=name)

    def sync(self) -> None:
        if self._run is not None and self._run.offline:  # W&B has no call that waits for its file
            time.sleep(2 * _FLUSH_SECONDS)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            if self._run.offline:
                logger().info("W&B: this run is uploaded by `wandb sync %s`.", Path(self._run.dir).parent)
