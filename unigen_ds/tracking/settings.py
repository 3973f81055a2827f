"""``visualizer`` of a config."""

from __future__ import annotations

from typing import Annotated

from unigen_ds.config.registry import WRITERS
from unigen_ds.config.section import AS_LIST, Component, Of, Section
from unigen_ds.tracking import tensorboard as _tensorboard  # noqa: F401 - these register themselves
from unigen_ds.tracking import wandb as _wandb  # noqa: F401


class Visualizer(Section):
    """Log writers beside ``metrics.jsonl``."""

    vis_backends: Annotated[tuple[Annotated[Component, Of(WRITERS)], ...], AS_LIST] = ()
    """List of writers beside `metrics.jsonl`; one that fails is switched off with a warning."""
    run_name: str | None = None
    """Name of the run in trackers, with fields such as `{model}` and `{date}`; `'nanovlm'`: nanoVLM's own template;
    None: the name of the work dir."""
