"""What the checks of a dry run know (the command line, and what earlier checks have built), and what they return."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from unigen_ds.backends.base import Backend
from unigen_ds.config.overrides import ConfigValues
from unigen_ds.core.batch import Batch
from unigen_ds.core.errors import UnigenError, short_text
from unigen_ds.core.progress import Geometry
from unigen_ds.hooks.base import Hook
from unigen_ds.runner.settings.tree import Settings
from unigen_ds.runner.start.stages import Start


@dataclass(frozen=True)
class Checked:
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


def not_checked(text: str) -> Checked:
    return Checked("not checked", text)


def results_of(error: Exception) -> list[Checked]:
    """One for each problem that an error names; of any other error than ours its kind and where it was raised."""
    if isinstance(error, Unknown):
        return [not_checked(f"needs {error}, which an earlier check could not build")]
    if not isinstance(error, UnigenError):
        return [problem(short_text(error))]
    title, *several = str(error).split("\n  ")
    if "problems in the config:" not in title:
        several = [str(error)]
    return [Checked("problem", line.rstrip()) for line in several]


class Unknown(Exception):
    """A check needs what an earlier one could not build: it is reported as not checked."""


@dataclass(frozen=True)
class Options:
    config: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    resume_auto: bool = False
    world_size: int | None = None
    per_node: int | None = None
    num_batches: int = 100
    skip: Sequence[str] = ()


@dataclass(frozen=True)
class Hardware:
    """CUDA devices that this process may use."""

    count: int
    name: str = ""
    """Name of the first device; the next three fields are of that device, too."""
    memory: int = 0
    free: int = 0
    bf16: bool = True


_OF_EVERY_BATCH = {field.name for field in dataclasses.fields(Batch)}
BatchKind = tuple[str, ...]
"""What a micro-batch has none of: names of its tensors and lists that are empty, and loss terms without targets. What a
model computes may depend on that."""


def kind_of(batch: Batch) -> BatchKind:
    values = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.name not in _OF_EVERY_BATCH}
    empty = [name for name, value in values.items() if isinstance(value, Tensor) and not value.numel()]
    empty += [name for name, value in values.items() if isinstance(value, tuple) and not value]
    empty += ["images"] * (not batch.num_images)  # a family may have them in a mapping
    return (*empty, *(f"targets of {term}" for term, number in batch.target_counts().items() if not number))


@dataclass
class FirstBatches:
    accumulative_counts: int
    kinds: list[list[BatchKind | None]]
    """Kind of each micro-batch, by rank and iteration; None: it could not be made."""
    examples: dict[BatchKind, Batch] = field(default_factory=dict)
    """The first micro-batch of each kind."""
    skips: list[Mapping[str, str]] = field(default_factory=list)
    """Samples that padding replaces, since they cannot be read."""
    errors: list[str] = field(default_factory=list)
    numbers: Counter[str] = field(default_factory=Counter)
    """How many samples, tokens and images there are."""

    def add(self, rank: int, batch: Batch) -> None:
        kind = kind_of(batch)
        self.kinds[rank].append(kind)
        self.numbers.update(samples=batch.num_samples, tokens=batch.num_tokens, images=batch.num_images)
        self.skips += batch.skipped
        if kind not in self.examples:
            self.examples[kind] = batch.map_tensors(Tensor.clone)


@dataclass
class Known:
    """Filled in by the checks, in their order. What is missing is asked for with ``need``."""

    options: Options
    config: ConfigValues
    """Not yet checked: for what can be checked in spite of mistakes."""
    hardware: Hardware = Hardware(0)
    world_size: int = 1
    per_node: int = 1
    settings: Settings | None = None
    hooks: Sequence[Hook] = ()
    backend: Backend | None = None
    geometry: Geometry | None = None
    start: Start | None = None
    model: nn.Module | None = None
    """The model on the meta device."""
    batches: FirstBatches | None = None

    def need(self, name: str) -> Any:
        """The value ``name``. Raises ``Unknown`` where no check could build it."""
        value = getattr(self, name)
        if value is None:
            raise Unknown(name)
        return value
