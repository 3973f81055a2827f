"""Weights & Biases, and trackio with its interface: one run of theirs per training run, across kills and resumes."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unigen_ds.config.registry import WRITERS
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.json_values import by_name, json_values
from unigen_ds.system.log import logger
from unigen_ds.tracking.writer import Writer, with_aliases

if TYPE_CHECKING:
    from PIL.Image import Image

_FLUSH, _FLUSH_SECONDS = "x_transaction_log_flush_interval", 0.1
"""Setting of W&B: seconds after which a row is in the file of an offline run. A kill loses what is not, by default the
rows of 15 seconds."""


@WRITERS.register_module()
class WandbVisBackend(Writer):
    """One W&B run per training run: a resume continues it and sends nothing that it has.

    Where a repeated update has other numbers (another config, data or engine), a new run of the same group begins after
    the last update that agrees; ``parent_run`` of its config names the old one, which gets the tag ``abandoned after
    update N``. The horizontal axis of everything is ``update``, not W&B's own step, so an evaluation that ends late is
    still shown at its own update. ``WANDB_MODE=disabled`` switches it off.

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
        self._save_dir = save_dir
        arguments = {"project": project, "entity": entity, "name": name, "group": group}
        self._init_kwargs = {key: value for key, value in arguments.items() if value is not None} | dict(
            init_kwargs or {}
        )
        self._define_metric_cfg = [dict(entry) for entry in define_metric_cfg]
        self._run: Any = None
        self._next_step: int | None = None
        """W&B's own step of the next row; None: W&B counts."""

    def kept_in(self) -> Mapping[str, Any]:
        return {key: self._init_kwargs.get(key) for key in ("entity", "project")}

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

        own_id = run_id or uuid.uuid4().hex[:12]
        arguments = {
            "id": own_id,
            "resume": "allow",
            "name": self.branch.name,
            "group": self.branch.group,
            "dir": self._save_dir or str(work_dir),
            **self._init_kwargs,
        }
        if not isinstance(own := arguments.get("settings") or {}, wandb.Settings):
            # warnings and errors alone: no table of all values at the end, no lines about what every run has
            wandb.setup(wandb.Settings(show_info=bool(own.get("show_info"))))
            flush = {_FLUSH: _FLUSH_SECONDS} if hasattr(wandb.Settings(), _FLUSH) else {}  # older ones flush each row
            arguments["settings"] = {"quiet": True, **flush, **own}
        if self.branch.parent is not None:  # a run of its own, whatever the config calls the first
            arguments["name"] = replace(self.branch, name=str(arguments["name"])).title
            arguments["id"] = own_id
        self._run = wandb.init(**arguments)
        if url := self._url():
            logger().info("W&B: run %s is at %s", self._run.name, url)
        # Offline, W&B does not know the steps that the run has, and counts from 0: on its server later rows would
        # replace earlier ones (https://github.com/wandb/wandb/pull/11144).
        self._next_step = self.num_sent if self._run.offline and self.num_sent else None
        self._run.config.update({**json_values(config, by_name), **self.branch.lineage}, allow_val_change=True)
        self._run.define_metric("update")
        self._run.define_metric("*", step_metric="update")
        for entry in self._define_metric_cfg:
            self._run.define_metric(**entry)
        return str(self._run.id)

    def _url(self) -> str | None:
        """Return the run's address, if it has one: W&B warns where an offline run is asked."""
        return None if self._run.offline else self._run.url

    def write(self, record: Mapping[str, Any], *, update: int) -> None:
        self._log({**with_aliases(record), "update": update})

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

    def abandon(self, note: str) -> None:
        self._run.tags = (*(self._run.tags or ()), note)

    def sync(self) -> None:
        if self._run is not None and self._run.offline:  # W&B has no call that waits for its file
            time.sleep(2 * _FLUSH_SECONDS)

    def close(self) -> None:
        if self._run is not None:
            if url := self._url():
                logger().info("W&B: sends the rest to %s", url)
            self._run.finish()
            if self._run.offline:
                logger().info("W&B: this run is uploaded by `wandb sync %s`.", Path(self._run.dir).parent)


@WRITERS.register_module()
class TrackioVisBackend(Writer):
    """W&B's interface on files of this machine (or a Space of Hugging Face). trackio has no tags: the note that a run
    was abandoned is an alert of that run. Files are in trackio's own folder (``TRACKIO_DIR``).

    Args:
        project: of trackio; None: the name of the work dir.
        name: of the run; None: ``visualizer.run_name``, or the name of the work dir.
        group: of the run and of those that continue it with other numbers; None: the name of the work dir.
        init_kwargs: further arguments of ``trackio.init``, such as ``space_id``.
    """

    package = "'unigen_ds[trackio]'"

    def __init__(
        self,
        *,
        project: str | None = None,
        name: str | None = None,
        group: str | None = None,
        init_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._project, self._name, self._group = project, name, group
        self._init_kwargs = dict(init_kwargs or {})
        self._run: Any = None

    def kept_in(self) -> Mapping[str, Any]:
        return {"project": self._project, "space_id": self._init_kwargs.get("space_id")}

    def open(self, *, work_dir: Path, config: Mapping[str, Any], run_id: str | None, updates: int) -> str | None:
        import trackio

        branch = self.branch if self._name is None else replace(self.branch, name=self._name)
        self._run = trackio.init(
            # a run is found again by its name, so that of a new run is like no other's
            name=run_id or f"{branch.title} {uuid.uuid4().hex[:6]}",
            config={**json_values(config, by_name), **branch.lineage},
            resume="never" if run_id is None else "allow",
            **{
                "project": self._project or work_dir.name,
                "group": self._group or branch.group,
                "embed": False,
                **self._init_kwargs,
            },
        )
        return str(self._run.name)

    def write(self, record: Mapping[str, Any], *, update: int) -> None:
        self._run.log(with_aliases(record), step=update)

    def image(self, name: str, picture: Image, *, update: int) -> None:
        import trackio

        self._run.log({name: trackio.Image(picture)}, step=update)

    def abandon(self, note: str) -> None:
        self._run.alert(title=note)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
