"""The stages of a start before the model exists, in their order: each is a function of the results before it.

::

    settings ──> engine ──────> plan ───────> data ───────> checklist ──> hooks ─> model ─> schedules ─> engine prepared
    Settings     build_engine   plan_start    read_start    run_checklist └─────────── build.py ──────────┘

``parts.py`` runs all of them over all processes; ``--dry-run``, ``tools/resume.py``, ``tools/plan.py`` and
``tools/inspect_data.py`` run as many as they need. All that is here is computed from the config, its data and the
checkpoint's manifest: the result is the same on every rank, and needs neither a process group nor a device.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unigen_ds.backends.base import Backend
from unigen_ds.checkpoint.base_files import Base, find_base, read_base
from unigen_ds.checkpoint.foreign import parse_assume, read_foreign
from unigen_ds.checkpoint.home import check_home
from unigen_ds.checkpoint.manifest import Manifest, current_versions
from unigen_ds.checkpoint.settings import LoadSettings
from unigen_ds.config.section import Component
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.json_values import json_values
from unigen_ds.core.progress import Duration, Geometry, Ruler
from unigen_ds.data.batches.change import DataChange, OnDataChange, compare, continued
from unigen_ds.data.batches.left_out import check_unusable
from unigen_ds.data.batches.stream import Cursor
from unigen_ds.data.datasets.dataset import check_readable
from unigen_ds.data.datasets.overflow import check_overflow
from unigen_ds.data.rules import check_rules
from unigen_ds.models.weights import check_here
from unigen_ds.optim.optimizer import AUTO, ParamGroup, settled_precision
from unigen_ds.optim.optimizer_state import state_of
from unigen_ds.resume import checklist
from unigen_ds.resume.finding import BUILT, Finding, Proposal, Saves
from unigen_ds.resume.plan import ResumePlan, plan_resume
from unigen_ds.runner.settings.tree import Settings
from unigen_ds.runner.start.adopt import adopt, geometry_of
from unigen_ds.runner.start.build import (
    Data,
    build_data,
    build_geometry,
    build_groups,
    build_limits,
    build_model,
    build_optimizer_config,
    build_schedules,
    named_parameters,
    parameter_table,
    recorded_fused,
    total_sequences,
)
from unigen_ds.system import dist, log
from unigen_ds.system.files import check_digests

# ---- engine ---------------------------------------------------------------------------------------------------------


def build_engine(settings: Settings) -> tuple[Backend, Geometry]:
    """The engine, not yet prepared, and the geometry. Raises ``ConfigError`` where they cannot work."""
    started, meant = dist.env_world_size(), settings.world_size
    if meant not in (None, started):
        raise ConfigError(
            f"world_size is {meant}, and {started} process{'es were' if started > 1 else ' was'} started",
            remedy=f"start {meant} (torchrun --nproc_per_node {meant} on one node); or --cfg-options"
            f" world_size={started}, with a batch_size or accumulative_counts for the effective batch that you want",
        )
    backend: Backend = settings.backend.build()
    geometry = build_geometry(settings, dp_size=backend.dp_size)
    optimizer_cfg = build_optimizer_config(settings)
    backend.check(geometry=geometry, optimizer_cfg=optimizer_cfg)
    state_of(optimizer_cfg)  # an optimizer whose state no checkpoint can have is refused
    return backend, geometry


# ---- plan -----------------------------------------------------------------------------------------------------------


def plan_start(settings: Settings, *, hashes: bool = True) -> ResumePlan:
    """The checkpoint to begin with, the seed, the precision and the files of a base. On rank 0, which sends the result
    to the others. Without ``hashes`` sizes of files are compared, not their content.

    Raises ``ConfigError``, ``CheckpointError`` or ``ResumeBlocked`` where the run cannot begin so.
    """
    check_home(settings.folder, settings.checkpoints)
    plan = plan_resume(
        settings.checkpoints,
        resume=settings.resume or False,
        load_from=settings.load_from,
        load_cfg=None if settings.load_cfg == LoadSettings() else settings.load_cfg,
        hashes=hashes,
    )
    if plan.mode != "resume" and not settings.base and hashes:
        check_weights(settings.model.get("pretrained"))
    precision, stored = settings.optim_wrapper.precision, plan.stored_precision
    chosen = settled_precision(precision, stored)
    if precision == AUTO:
        why = "as the checkpoint has it" if chosen == stored else "as this device computes it"
        log.logger().info("optim_wrapper.precision is 'auto': this run computes in %s, %s.", chosen, why)
    return replace(plan, seed=_seed(settings.randomness.seed, plan), precision=chosen, base=_base(settings, plan))


def _seed(seed: int | None, plan: ResumePlan) -> int:
    """The config's seed; where that is None the checkpoint's on a resume, else one that is drawn and logged."""
    if seed is not None:
        return seed
    if plan.mode == "resume" and plan.manifest is not None:
        return int(plan.manifest.loader["seed"])
    seed = secrets.randbelow(2**31)
    log.logger().info("randomness.seed is None: this run draws %d. Checkpoints record it, and a resume uses it.", seed)
    return seed


def _base(settings: Settings, plan: ResumePlan) -> Base | None:
    """The base of adapters, whose files are read and hashed: on a resume they must be the recorded ones."""
    folders = settings.base or settings.model.get("pretrained")
    if settings.lora is None or not folders:
        return None
    if plan.mode == "resume" and plan.manifest is not None and plan.manifest.base is not None:
        recorded = Base.from_state(plan.manifest.base)
        return replace(recorded, path=find_base(recorded, given=settings.base, checkpoint=plan.checkpoint))
    return read_base(folders)


def check_weights(pretrained: Any, *, where: str = "model.pretrained") -> None:
    """Check that each path of published weights exists, and has the content that was written: the model itself is built
    after all data is read. A name of the hub is left to the model. Raises ``ConfigError`` or ``CheckpointError``.
    """
    if isinstance(pretrained, Mapping):
        for key, value in pretrained.items():
            check_weights(value, where=f"{where}.{key}")
    elif isinstance(pretrained, str):
        path = Path(pretrained).expanduser()
        if pretrained.startswith(("/", "~", "./", "../")):
            check_here(path, where=where)
        if path.exists():
            check_digests(path)


def settle(settings: Settings, plan: ResumePlan, *, backend: Backend, geometry: Geometry) -> Settings:
    """The settings with the choices of the plan. An engine that was asked for another precision is asked again.

    Raises ``ConfigError`` where it cannot work.
    """
    assert plan.precision is not None, "rank 0 has chosen one"
    asked = build_optimizer_config(settings)
    if plan.precision != asked.precision:
        backend.check(geometry=geometry, optimizer_cfg=replace(asked, precision=plan.precision))
    return settings.with_seed(plan.seed).with_precision(plan.precision).with_base(plan.base)


# ---- data -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """The data, the position in it, and the lengths in data of the units that a config uses."""

    settings: Settings
    manifest: Manifest | None
    """Of the checkpoint to resume from (made by ``adopt`` where another trainer wrote it); None on a fresh start."""
    unknown: tuple[str, ...]
    """What the files of another trainer's checkpoint do not state."""
    data: Data
    change: DataChange
    """What differs from the data of the checkpoint; false where nothing does, and on a fresh start."""
    cursor: Cursor
    ruler: Ruler
    limits: list[Duration]
    total_sequences: float

    @cached_property
    def meta_model(self) -> nn.Module:
        """The model without memory, built at the first use."""
        with torch.device("meta"):
            return build_model(self.settings, self.data.processor, seed=self.settings.seed)


def read_start(settings: Settings, plan: ResumePlan, *, geometry: Geometry) -> Start:
    """Read the data as the manifest of the plan continues it, or what another trainer's checkpoint states.

    Raises ``DataError``, ``ConfigError``, and what ``adopt`` raises. Data that differs is a finding of the checklist.
    """
    manifest = plan.manifest if plan.mode == "resume" else None
    unknown: tuple[str, ...] = ()
    if plan.mode == "resume" and plan.checkpoint and manifest is None:
        foreign = read_foreign(plan.checkpoint, assume=parse_assume(settings.assume or ""))
        stream = build_data(settings, geometry=geometry_of(foreign, settings), ruler=None).stream
        manifest, unknown = adopt(foreign, settings, stream), foreign.unknown
    data, change, cursor = continue_data(settings, manifest, geometry=geometry, on_change=settings.on_data_change)
    for part in data.parts:
        check_unusable(part.fitted, part.names, settings.train_dataloader.max_skipped_fraction)
    ruler = manifest.ruler if manifest else Ruler(geometry, data.stream.sequences_per_epoch)
    limits = build_limits(settings.train_cfg, ruler)
    total = total_sequences(limits, geometry, data.stream.tokens_per_sequence)
    return Start(settings, manifest, unknown, data, change, cursor, ruler, limits, total)


def continue_data(
    settings: Settings, manifest: Manifest | None, *, geometry: Geometry, on_change: OnDataChange, check: bool = True
) -> tuple[Data, DataChange, Cursor]:
    """The data of a run with the epochs and phases of its manifest, what has changed since then, and the position.

    Data that has changed in a way that ``on_change`` does not allow stays as it is now. ``check``: refuse data that no
    start would use.
    """
    if manifest:
        check_rules(manifest.loader["facts"])
    data = build_data(settings, geometry=geometry, ruler=manifest.ruler if manifest else None)
    for part in data.parts if check else ():
        check_readable(part.datasets, part.names)
        check_overflow(part.fitted, part.names)
    if manifest is None:
        return data, DataChange(), Cursor()
    change, cursor = compare(manifest.loader, data.stream), Cursor.from_state_dict(manifest.loader["cursor"])
    if not change or on_change == "restart" or (on_change == "append" and change.only_appended):
        stream, cursor = continued(manifest.loader, data.stream, on_change=on_change)
        data = replace(data, stream=stream)
    return data, change, cursor


# ---- checklist ------------------------------------------------------------------------------------------------------


def run_checklist(
    start: Start, plan: ResumePlan, *, backend: Backend, geometry: Geometry, hashed: bool = True
) -> list[Finding]:
    """All findings of the checklist of a resume. ``hashed``: whether the plan has read the checkpoint's files."""
    settings, manifest, plain = start.settings, start.manifest, plain_values(start.settings, start.manifest)
    assert manifest is not None, "only a resume is checked"
    rows, groups = _parameters(start, plain, manifest)
    schedules = build_schedules(
        settings,
        manifest,
        groups,
        ruler=start.ruler,
        total_sequences=start.total_sequences,
        global_batch_size=geometry.global_batch_size,
    )
    proposal = Proposal(
        checkpoint=str(plan.checkpoint),
        config=plain,
        complete=completed,
        saves=_saves(settings.default_hooks.checkpoint),
        averages=any(hook.cls.__name__.startswith("EMAHook") for hook in settings.custom_hooks),
        geometry=geometry,
        topology=backend.topology(),
        schedules=schedules,
        parameters=rows,
        data=start.change,
        versions=current_versions(),
        on_batch_change=settings.on_batch_change,
        on_data_change=settings.on_data_change,
        free_bytes=free_bytes(settings.checkpoints),
        hashed=hashed,
        unknown=start.unknown,
    )
    return checklist.run(manifest, proposal)


def _saves(hook: Component | None) -> Saves:
    """The arguments of the checkpoint hook; without a hook, the defaults, which save nothing."""
    default = Saves()
    return default if hook is None else Saves(**{key: hook.get(key, value) for key, value in asdict(default).items()})


def _parameters(
    start: Start, plain: Mapping[str, Any], manifest: Manifest
) -> tuple[list[dict[str, Any]], list[ParamGroup]]:
    """Rows and groups of the model: the stored ones where the config's model is the stored one, else those of a model
    on the meta device. The real model is checked again once it is built.
    """
    if all(plain.get(key) == manifest.config.get(key) for key in ("model", "lora", "tokenizer")):
        named = [pair for row in manifest.parameters for pair in _without_memory(row)]
    else:
        named = named_parameters(start.meta_model)
    groups = build_groups(start.settings, named)
    return parameter_table(named, groups), groups


def _without_memory(row: Mapping[str, Any]) -> list[tuple[str, nn.Parameter]]:
    """A parameter on the meta device, under all its names."""
    parameter = nn.Parameter(torch.empty(row["shape"], device="meta"), requires_grad=row["trainable"])
    return [(name, parameter) for name in (row["name"], *row.get("tied", ()))]


def free_bytes(checkpoints: Path) -> int | None:
    """Free disk space where the folder of the checkpoints is, or will be."""
    folder = next((path for path in (checkpoints, *checkpoints.resolve().parents) if path.exists()), None)
    return shutil.disk_usage(folder).free if folder else None


def completed(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A stored config with its defaults, if it is complete: a default made explicit is no edit."""
    whole: Mapping[str, Any] = Settings.completed(config) if config.get("model") else config
    return whole


def plain_values(settings: Settings, manifest: Manifest | None) -> dict[str, Any]:
    """The config as plain JSON values, as a manifest keeps it, with what the run itself chose (``recorded_fused``)."""
    values: dict[str, Any] = json_values(settings.given)
    if (fused := recorded_fused(settings, manifest)) is not None:
        values["optim_wrapper"]["optimizer"]["fused"] = fused
    return values


def plain_built(model: Any) -> dict[str, Any]:
    """What a manifest's config has in addition: the model's arguments as it was built, without ``pretrained``.

    With these a checkpoint needs no other folder to be built again, and sizes that no config states can be compared.
    """
    return json_values({BUILT: {"model": model.arguments()}}) if hasattr(model, "arguments") else {}
