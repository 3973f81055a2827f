"""What the checks of a dry run know (the command line, and what earlier checks have built), and what they return."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from unigen_ds.backends.base import Backend
from unigen_ds.core.errors import UnigenError
from unigen_ds.core.progress import Geometry
from unigen_ds.runner.settings.tree import Settings
from unigen_ds.runner.start.stages import Start

if TYPE_CHECKING:
    from unigen_ds.checks.dry_run.first_batches import FirstBatches
    from unigen_ds.checks.memory.traced import Traced


@dataclass(frozen=True)
class Checked:
    """One line of a dry run."""

    status: Literal["ok", "warning", "problem", "not checked"]
    text: str
    """A problem: what was given, what is allowed, the remedy."""
    check: str = ""
    """Which check it is of: set by the dry run."""


def ok(text: str) -> Checked:
    return Checked("ok", text)


def warning(text: str) -> Checked:
    """The run would start and is probably not what is wanted."""
    return Checked("warning", text)


def problem(text: str, *, allowed: str | None = None, remedy: str | None = None) -> Checked:
    """The run would fail, or would not do what the config asks for."""
    return Checked("problem", str(UnigenError(text, allowed=allowed, remedy=remedy)))


def unchecked(text: str) -> Checked:
    return Checked("not checked", text)


def untraced(why: str | None) -> Checked:
    """Why an update could not be traced: the model or the engine fails, or computes what cannot be without memory."""
    if re.search("DynamicOutputShape|DataDependentOutput|UnsupportedOperator|UnsupportedFakeTensor", str(why)):
        return unchecked(f"an update cannot be traced without memory: {why}")
    return problem(f"an update fails: {why}")


_SEVERAL = re.compile(r"\d+ problems in the config:\n  ")


def problems_of(error: Exception) -> list[Checked]:
    """One for each problem that an error names; of any other error than ours its kind and where it was raised."""
    if not isinstance(error, UnigenError):
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = (str(error).splitlines() or [""])[0]
        return [problem(f"{type(error).__name__}: {text} ({last.filename}:{last.lineno})")]
    text = str(error)
    lines = _SEVERAL.sub("", text, count=1).split("\n  ") if _SEVERAL.match(text) else [text]
    return [Checked("problem", line.rstrip()) for line in lines]


class Unknown(Exception):
    """A check needs what an earlier one could not build: it is reported as not checked."""


@dataclass(frozen=True)
class Asked:
    """The command line."""

    config: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    resume_auto: bool = False
    world_size: int | None = None
    per_node: int | None = None
    num_batches: int = 100
    device_memory: int | None = None
    """Bytes."""
    peak_tflops: float | None = None
    mfu: float = 0.4
    skip: Sequence[str] = ()
    """Names of checks that are left out."""


@dataclass(frozen=True)
class Hardware:
    """CUDA devices that this process may use."""

    count: int
    name: str = ""
    """Of the first, as the next three."""
    memory: int = 0
    free: int = 0
    bf16: bool = True


@dataclass
class Known:
    """Filled in by the checks, in their order. What is missing is asked for with ``need``."""

    asked: Asked
    given: dict[str, Any] = field(default_factory=dict)
    """The config as plain values, with its mistakes: for what can be checked nevertheless."""
    hardware: Hardware = Hardware(0)
    world_size: int = 1
    per_node: int = 1
    settings: Settings | None = None
    """Of a config with mistakes those of the rest."""
    changed: frozenset[str] = frozenset()
    """Sections that are not as the config has them, since something in them is wrong."""
    replaced: frozenset[str] = frozenset()
    """Keys of their parts that have nothing, or not all, of what the config should have."""
    backend: Backend | None = None
    geometry: Geometry | None = None
    loaded: Geometry | None = None
    """By which ``start`` divides the data: ``geometry``, or the batch size alone."""
    start: Start | None = None
    model: nn.Module | None = None
    """On the meta device."""
    batches: FirstBatches | None = None
    traced: Traced | None = None
    missing_paths: list[str] = field(default_factory=list)
    problems: set[str] = field(default_factory=set)
    """Texts of those that are listed."""

    def need(self, name: str) -> Any:
        """The value ``name``. Raises ``Unknown`` where no check could build it."""
        value = getattr(self, name)
        if value is None:
            raise Unknown(_NAMES[name])
        return value

    def section(self, *sections: str) -> Settings:
        """``settings``. Raises ``Unknown`` where something in one of these sections is wrong."""
        settings: Settings = self.need("settings")
        if wrong := self.changed.intersection(sections):
            raise Unknown(f"{', '.join(sorted(wrong))} without problems")
        return settings


_NAMES = {
    "settings": "a config without problems",
    "backend": "an engine that can be used",
    "geometry": "an engine that can be used",
    "loaded": "data without problems",
    "start": "data and, on a resume, a checkpoint without problems",
    "model": "a model that can be built",
    "batches": "the first micro-batches",
    "traced": "a traced update",
}
"""What a user calls each value."""
