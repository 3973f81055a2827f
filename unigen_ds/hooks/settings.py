"""``default_hooks`` and ``custom_hooks`` of a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import model_validator

from unigen_ds.config.registry import HOOKS
from unigen_ds.config.section import Component, Of, Section
from unigen_ds.hooks.evaluate import async_evaluate as _async_evaluate  # noqa: F401 - these register themselves
from unigen_ds.hooks.evaluate import ema as _ema  # noqa: F401
from unigen_ds.hooks.evaluate import evaluate as _evaluate  # noqa: F401
from unigen_ds.hooks.evaluate import preview as _preview  # noqa: F401
from unigen_ds.hooks.guard import spikes as _spikes  # noqa: F401
from unigen_ds.hooks.guard.losses import ContinuityHook, FirstUpdateHook, NanGuardHook
from unigen_ds.hooks.guard.signals import SignalHook
from unigen_ds.hooks.log.logger import LoggerHook
from unigen_ds.hooks.log.timer import IterTimerHook
from unigen_ds.hooks.mmengine import adapt_hook
from unigen_ds.hooks.save import best as _best  # noqa: F401
from unigen_ds.hooks.save import exports as _exports  # noqa: F401
from unigen_ds.hooks.save.checkpoint import CheckpointHook

CustomHook = Annotated[Component, Of(HOOKS, rewrite=adapt_hook)]


class DefaultHooks(Section):
    """Hooks of every run. ``type`` may be left out; None removes one (not the logger)."""

    timer: Annotated[Component | None, Of(HOOKS, default=IterTimerHook)] = None
    """`IterTimerHook`: rates and time shares."""
    nan_guard: Annotated[Component | None, Of(HOOKS, default=NanGuardHook)] = None
    """`NanGuardHook`: stops a run whose gradients stay not finite."""
    signals: Annotated[Component | None, Of(HOOKS, default=SignalHook)] = None
    """`SignalHook`: SIGTERM and SIGINT end with a save."""
    continuity: Annotated[Component | None, Of(HOOKS, default=ContinuityHook)] = None
    """`ContinuityHook`: compares the last losses after a resume."""
    first_update: Annotated[Component | None, Of(HOOKS, default=FirstUpdateHook)] = None
    """`FirstUpdateHook`: whether loaded weights compute what they were trained for."""
    checkpoint: Annotated[Component | None, Of(HOOKS, default=CheckpointHook)] = None
    """`CheckpointHook`: saves."""
    logger: Annotated[Component, Of(HOOKS, default=LoggerHook, from_run=("writers", "run_name"))]
    """`LoggerHook`: console, `metrics.jsonl` and the writers of `visualizer`."""

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, section: Any) -> Any:
        if not isinstance(section, Mapping | None):
            return section
        present = {name: {} for name in cls.model_fields} | dict(section or {})
        return {**present, "logger": present["logger"] or {}}
