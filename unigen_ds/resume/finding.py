"""The result of a check (``Finding``) and its input (``Proposal``): plain values, so checks are pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from unigen_ds.core.errors import ResumeBlocked
from unigen_ds.core.progress import Geometry
from unigen_ds.data.batches.change import DataChange
from unigen_ds.resume.geometry import MemoryPlan
from unigen_ds.schedule.schedule import Schedules

Status = Literal["ok", "warn", "block"]
_SHOWN = 8


@dataclass(frozen=True)
class Finding:
    """The outcome of one check."""

    id: str
    status: Status
    was: str
    now: str
    why: str = ""
    remedy: str = ""
    guide: int | None = None

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Saves:
    """When checkpoints are saved, and how many are kept: the arguments of ``CheckpointHook``."""

    interval: float = -1
    by_epoch: bool = True
    unit: str | None = None
    max_keep_ckpts: int = -1
    form: str = "sharded"


@dataclass(frozen=True)
class Proposal:
    """The run as it would continue: everything that a finding depends on, from files alone."""

    checkpoint: str
    config: Mapping[str, Any]
    """Plain values, as given."""
    geometry: Geometry
    topology: Mapping[str, Any]
    schedules: Schedules
    """The schedule that would be followed."""
    parameters: Sequence[Mapping[str, Any]]
    """Rows as in the manifest: name, shape, trainable, group."""
    data: DataChange
    versions: Mapping[str, str]
    complete: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    """Fills in the defaults of a config, this one or the checkpoint's."""
    saves: Saves = field(default_factory=Saves)
    averages: bool = False
    """Whether an average of the weights (EMA) would be kept."""
    on_batch_change: str = "refuse"
    on_data_change: str = "refuse"
    free_bytes: int | None = None
    """Where the next checkpoints go; None: not known."""
    hashed: bool = False
    """Whether the content of the checkpoint's files was compared, not only their sizes."""
    unknown: Sequence[str] = ()
    """What another trainer's checkpoint does not state."""


def refuse(findings: Iterable[Finding]) -> None:
    """Raise ``ResumeBlocked`` naming every finding that blocks."""
    blocks = [finding for finding in findings if finding.status == "block"]
    if blocks:
        raise ResumeBlocked(
            "; ".join(f"{f.why} (was: {f.was}; now: {f.now})" for f in blocks),
            remedy="; ".join(dict.fromkeys(f.remedy for f in blocks if f.remedy)) or None,
        )


def shown(found: Sequence[str]) -> str:
    """The first few, and how many more."""
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return "; ".join(found[:_SHOWN]) + more


def finding_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """One line for each finding, and one more for its reason and its remedy."""
    for f in findings:
        yield f"{f.status:<5}  {_title(f):<22}  {f.was}" + (f"  ->  {f.now}" if f.now != f.was else "")
        for part in (f.why, f.remedy and f"remedy: {f.remedy}"):
            if part:
                yield f"       {part}"


def _title(finding: Finding) -> str:
    return finding.id + (f" ({finding.guide} of 5)" if finding.guide else "")


def plans(geometries: Sequence[Geometry], memory: Sequence[MemoryPlan]) -> Iterator[str]:
    """The splits of the batch that keep the effective batch, and the plans for a device that is too small."""
    if geometries:
        total, ranks = geometries[0].global_batch_size, geometries[0].dp_size
        yield f"Splits of {total} sequences over {ranks} process(es), smallest memory first:"
        yield "  " + ", ".join(f"batch_size {g.batch_size} x {g.accumulative_counts} accumulated" for g in geometries)
    if memory:
        yield "If memory runs out (the effective batch stays):"
        for plan in memory:
            yield f"  plan {plan.name}: {plan.words}: {plan.geometry}"
