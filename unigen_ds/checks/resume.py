"""Checks a resume without starting it, also for another number of processes. Needs no GPU and no process group."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

from unigen_ds.backends.base import Backend
from unigen_ds.config.paths import tool
from unigen_ds.core.choices import AUTO
from unigen_ds.core.errors import CheckpointError
from unigen_ds.core.progress import Geometry
from unigen_ds.resume.finding import Finding
from unigen_ds.resume.geometry import MemoryPlan, equal_geometries, memory_plans
from unigen_ds.resume.plan import ResumePlan
from unigen_ds.runner.settings.naming import PLACE, name_and_folder
from unigen_ds.runner.settings.tree import Settings
from unigen_ds.runner.start.build import build_hooks
from unigen_ds.runner.start.stages import build_engine, plan_start, read_start, run_checklist, settle
from unigen_ds.system import dist


@dataclass(frozen=True)
class Inspection:
    plan: ResumePlan
    geometry: Geometry
    findings: Sequence[Finding]
    geometries: Sequence[Geometry]
    """All that keep the checkpoint's effective batch on this number of processes, smallest memory first."""
    memory: Sequence[MemoryPlan]

    @property
    def blocked(self) -> bool:
        return any(finding.status == "block" for finding in self.findings)

    def state_dict(self) -> dict[str, Any]:
        return {
            "checkpoint": str(self.plan.checkpoint),
            "blocked": self.blocked,
            "geometry": asdict(self.geometry),
            "findings": [asdict(finding) for finding in self.findings],
            "cuts": [asdict(geometry) for geometry in self.geometries],
            "memory_plans": [asdict(plan) for plan in self.memory],
        }


def inspect_resume(config: Any, *, world_size: int | None = None, verify: bool = False) -> Inspection:
    """The checklist of a resume on ``world_size`` processes (None: as saved). ``verify``: hash the whole checkpoint.

    Raises ``CheckpointError`` where there is nothing to resume from, and ``ConfigError``.
    """
    settings = Settings.from_config(config).with_resume(AUTO)
    template = settings.work_dir or ""
    if PLACE in template:
        with as_launched(world_size or settings.world_size or dist.env_world_size()):
            settings = settings.with_name(*name_and_folder(settings, build_engine(settings)[1]))
    plan = plan_start(settings, hashes=verify)
    if plan.mode != "resume":
        of_template = f" (work_dir is {template!r})" if PLACE in template else ""
        raise CheckpointError(
            f"{settings.checkpoints} contains no checkpoint{of_template}",
            remedy="name one with --checkpoint, or the folder with --work-dir",
        )
    dp_size = plan.manifest.geometry.dp_size if plan.manifest else dist.env_world_size()
    with as_launched(world_size or settings.world_size or dp_size):
        backend, geometry = build_engine(settings)
        settings, geometry = settle(settings, plan, backend=backend, geometry=geometry)
        build_hooks(settings)
        start = read_start(settings, plan, geometry=geometry)
        findings = run_checklist(start, plan, backend=backend, hashed=verify)
        assert start.manifest is not None, "a resume has a manifest"
        equal = equal_geometries(start.manifest.geometry.global_batch_size, geometry.dp_size)
        # of the split that is nearest to the config's micro-batch
        fitting = [one for one in equal if one.batch_size <= geometry.batch_size] or equal[:1] or [geometry]
        memory = plans_of(settings, fitting[-1], backend)
    return Inspection(plan, geometry, findings, equal, memory)


@contextmanager
def as_launched(world_size: int, *, per_node: int | None = None) -> Iterator[None]:
    """Inside, the environment is that of a launcher with this many processes, ``per_node`` of them on a node."""
    with mock.patch.dict(os.environ, WORLD_SIZE=str(world_size)):
        if per_node is None and dist.env_processes_per_node() is None:
            per_node = world_size  # no launcher reports the number of nodes: one is assumed
        if per_node is not None:
            os.environ["LOCAL_WORLD_SIZE"] = str(per_node)
        yield


def train_command(arguments: Sequence[str], *, world_size: int) -> list[str]:
    """The command line that trains with these arguments of ``tools/train.py``."""
    train = [*tool("train"), *arguments]
    if world_size == 1:
        return [sys.executable, *train]
    return [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(world_size), *train]


def plans_of(settings: Settings, geometry: Geometry, backend: Backend) -> list[MemoryPlan]:
    recomputes = settings.model.arguments.get("activation_checkpointing")
    return memory_plans(geometry, backend=backend, loader=settings.train_dataloader, recomputes=recomputes)


def advice(config: Any, arguments: Sequence[str]) -> str:
    """The out-of-memory plans as commands: these arguments, resumed, with the plan's keys set after the user's own.

    Before the first save ``--resume`` begins as the arguments state. Several nodes: by your own launcher.
    """
    settings = Settings.from_config(config)
    backend, geometry = build_engine(settings)
    text = f"Out of memory at {geometry}. Each of these resumes from the newest checkpoint at the same effective batch:"
    for plan in plans_of(settings, geometry, backend):
        extra = ["--resume"] + (["--backend", plan.backend] if plan.backend else [])
        if plan.overrides:
            extra += ["--cfg-options", *(f"{key}={value}" for key, value in plan.overrides.items())]
        command = train_command([*arguments, *extra], world_size=plan.geometry.dp_size)
        text += f"\n  plan {plan.name} ({plan.words}): {shlex.join(command)}"
    return text
