"""What ``build`` makes of a config, and all that the loop runs on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unigen_ds.backends.base import Backend
from unigen_ds.core.progress import Duration, Geometry, Ruler
from unigen_ds.data.loader import UpdateLoader
from unigen_ds.data.processor import UnifiedProcessor
from unigen_ds.data.stream import Cursor
from unigen_ds.hooks.base import Hook
from unigen_ds.resume.plan import ResumePlan
from unigen_ds.schedule.schedule import Schedules


@dataclass(frozen=True)
class Parts:
    """One run, built."""

    config: Mapping[str, Any]
    plain_config: dict[str, Any]
    """The config as plain values, for the manifest."""
    config_text: str
    work_dir: Path
    backend: Backend
    loader: UpdateLoader
    cursor: Cursor
    """Where the loader starts."""
    source_names: Sequence[str]
    processor: UnifiedProcessor
    schedules: Schedules
    hooks: Sequence[Hook]
    ruler: Ruler
    geometry: Geometry
    limits: Sequence[Duration]
    total_sequences: float
    loss_weights: Mapping[str, float]
    plan: ResumePlan
    parameters: list[dict[str, Any]]
    data_identity: dict[str, Any]
    max_updates: int | None = None
