"""trackio: W&B's interface on files of this machine (or a Space of Hugging Face)."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unigen_ds.config.registry import WRITERS
from unigen_ds.core.json_values import by_name, json_values
from unigen_ds.tracking.writer import Writer, with_aliases

if TYPE_CHECKING:
    from PIL.Image import Image


@WRITERS.register_module()
class TrackioVisBackend(Writer):
    """One trackio run per training run, as ``WandbVisBackend`` has it. trackio has no tags: the note that a run was
    abandoned is an alert of that run. Files are in trackio's own folder (``TRACKIO_DIR``).

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
