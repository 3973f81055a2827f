"""Where a run begins, computed from the config and the checkpoint's manifest alone: the same result on every rank.

Rank 0 does this before it joins the others, so a resume that the checklist blocks ends before any process waits.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from logging import INFO, WARNING
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
from unigen_ds.core.json_values import json_values
from unigen_ds.core.progress import Duration, Geometry, Ruler
from unigen_ds.data.batches.change import DataChange, compare, continued
from unigen_ds.data.batches.left_out import check_unusable
from unigen_ds.data.batches.stream import Cursor
from unigen_ds.data.datasets.dataset import check_readable
from unigen_ds.data.datasets.overflow import check_overflow
from unigen_ds.data.rules import check_rules
from unigen_ds.models.weights import check_here
from unigen_ds.optim.optimizer import AUTO, ParamGroup, settled_precision
from unigen_ds.resume import checklist
from unigen_ds.resume.edited import BUILT
from unigen_ds.resume.finding import Finding, Proposal, Saves, refuse
from unigen_ds.resume.plan import NOT_RESUMED, ResumePlan, plan_resume
from unigen_ds.runner.settings.tree import Settings
from unigen_ds.runner.start.adopt import adopt, geometry_of
from unigen_ds.runner.start.build import (
    Data,
    build_data,
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


@dataclass(frozen=True)
class Start:
    """The data, the position in it, and the lengths in data of the units that a config uses."""

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


@dataclass(frozen=True)
class Beginning:
    """What rank 0 finds before the processes join."""

    plan: ResumePlan
    start: Start | None
    """On a resume, whose checklist needs it; else None."""
    findings: tuple[Finding, ...] = ()
    """Of the checklist, all of them."""


def begin(settings: Settings, *, backend: Backend, geometry: Geometry) -> Beginning:
    """The plan and, on a resume, the checklist. On rank 0, not collective. Raises ``ResumeBlocked`` where it blocks."""
    plan = with_base(plan_run(settings), settings)
    if plan.mode != "resume":
        if not settings.base:
            check_weights(settings.model.get("pretrained"))
        return Beginning(plan, None)
    settled = settle(settings, plan, backend=backend, geometry=geometry)
    start, findings = check_resume(settled, plan, backend=backend, geometry=geometry)
    report(findings)
    return Beginning(plan, start, tuple(findings))


def check_weights(given: Any, *, where: str = "model.pretrained") -> None:
    """Of each path of published weights whether it is there, and as it was written: the model itself is built after all
    data is read.

    Anything that may be a name of a hub is left to the model. Raises ``ConfigError`` or ``CheckpointError``.
    """
    if isinstance(given, Mapping):
        for key, value in given.items():
            check_weights(value, where=f"{where}.{key}")
    elif isinstance(given, str):
        path = Path(given).expanduser()
        if given.startswith(("/", "~", "./", "../")):
            check_here(path, where=where)
        if path.exists():
            check_digests(path)


def plan_run(settings: Settings) -> ResumePlan:
    """The log, the checkpoint to resume from, and the seed. Not collective: called by rank 0."""
    folder = settings.folder
    level = settings.env.log_level
    logger = log.setup(rank=dist.env_rank(), log_file=folder / "train.log", level=level, new_start=True)
    check_home(folder, settings.checkpoints)
    plan = plan_resume(
        settings.checkpoints,
        resume=settings.resume or False,
        load_from=settings.load_from,
        load_cfg=None if settings.load_cfg == LoadSettings() else settings.load_cfg,
    )
    for message in plan.messages:
        passed_over = message.startswith(NOT_RESUMED)  # updates are lost
        logger.log(WARNING if passed_over else INFO, message)
    return with_choices(plan, settings)


def with_choices(plan: ResumePlan, settings: Settings) -> ResumePlan:
    """``plan`` with the seed and the precision of the run, where the config leaves them open. Rank 0."""
    given = settings.optim_wrapper.precision
    stored = plan.manifest.topology.get("precision") if plan.mode == "resume" and plan.manifest is not None else None
    precision = settled_precision(given, stored)
    if given == AUTO:
        why = "as the checkpoint has it" if precision == stored else "as this device computes it"
        log.logger().info("optim_wrapper.precision is 'auto': this run computes in %s, %s.", precision, why)
    return replace(plan, seed=settled_seed(settings.randomness.seed, plan), precision=precision)


def settle(settings: Settings, plan: ResumePlan, *, backend: Backend, geometry: Geometry) -> Settings:
    """``settings`` with the choices of ``plan``. The engine is asked again where it was asked for another precision.

    Not collective. Raises ``ConfigError`` where it cannot work.
    """
    assert plan.precision is not None, "rank 0 has chosen one"
    asked = build_optimizer_config(settings)
    found = settings.with_seed(plan.seed).with_precision(plan.precision).with_base(plan.base)
    if plan.precision != asked.precision:
        backend.check(geometry=geometry, optimizer_cfg=replace(asked, precision=plan.precision))
    return found


def with_base(plan: ResumePlan, settings: Settings) -> ResumePlan:
    """The plan with the base of adapters, whose files are read and hashed: on a resume they must be the recorded ones.
    Not collective. Raises ``ConfigError``, and ``CheckpointError`` where the recorded files are not there.
    """
    given = settings.base or settings.model.get("pretrained")
    if settings.lora is None or not given:
        return plan
    if plan.mode == "resume" and plan.manifest is not None and plan.manifest.base is not None:
        recorded = Base.from_state(plan.manifest.base)
        found = find_base(recorded, given=settings.base, checkpoint=plan.checkpoint)
        return replace(plan, base=replace(recorded, path=found))
    return replace(plan, base=read_base(given))


def settled_seed(given: int | None, plan: ResumePlan) -> int:
    """The config's seed; where that is None the checkpoint's on a resume, else one that is drawn and logged."""
    if given is not None:
        return given
    if plan.mode == "resume" and plan.manifest is not None:
        return int(plan.manifest.loader["seed"])
    seed = secrets.randbelow(2**31)
    log.logger().info("randomness.seed is None: this run draws %d. Checkpoints record it, and a resume uses it.", seed)
    return seed


def build_start(settings: Settings, plan: ResumePlan, *, geometry: Geometry) -> Start:
    """From the manifest that ``plan`` names, or from what another trainer's checkpoint states."""
    choice = settings.on_data_change
    manifest = plan.manifest if plan.mode == "resume" else None
    unknown: tuple[str, ...] = ()
    if plan.mode == "resume" and plan.checkpoint and manifest is None:
        foreign = read_foreign(plan.checkpoint, assume=parse_assume(settings.assume or ""))
        manifest = adopt(
            foreign, settings, build_data(settings, geometry=geometry_of(foreign, settings), ruler=None).stream
        )
        unknown = foreign.unknown
    if manifest:
        check_rules(manifest.loader["facts"])
    data = build_data(settings, geometry=geometry, ruler=manifest.ruler if manifest else None)
    for part in data.parts:
        check_readable(part.datasets, part.names)
        check_overflow(part.fitted, part.names)
    change, cursor = DataChange(), Cursor()
    ruler = manifest.ruler if manifest else Ruler(geometry, data.stream.sequences_per_epoch)
    if manifest:
        change, cursor = compare(manifest.loader, data.stream), Cursor.from_state_dict(manifest.loader["cursor"])
        if not change or choice == "restart" or (choice == "append" and change.only_appended):
            stream, cursor = continued(manifest.loader, data.stream, on_change=choice)
            data = replace(data, stream=stream)
    for part in data.parts:
        check_unusable(part.fitted, part.names, settings.train_dataloader.max_skipped_fraction)
    limits = build_limits(settings.train_cfg, ruler)
    total = total_sequences(limits, geometry, data.stream.tokens_per_sequence)
    return Start(manifest, unknown, data, change, cursor, ruler, limits, total)


def check_resume(
    settings: Settings,
    plan: ResumePlan,
    *,
    backend: Backend,
    geometry: Geometry,
    hashed: bool = True,
) -> tuple[Start, list[Finding]]:
    """The start of a resume, and all findings of the checklist. Needs no process group and no device."""
    start = build_start(settings, plan, geometry=geometry)
    manifest, plain = start.manifest, plain_values(settings, start.manifest)
    assert manifest is not None, "only a resume is checked"
    rows, groups = _parameters(settings, plain, manifest, start)
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
    return start, checklist.run(manifest, proposal)


def _saves(hook: Component | None) -> Saves:
    """The arguments of the checkpoint hook; without a hook, the defaults, which save nothing."""
    default = Saves()
    return default if hook is None else Saves(**{key: hook.get(key, value) for key, value in asdict(default).items()})


def _parameters(
    settings: Settings, plain: Mapping[str, Any], manifest: Manifest, start: Start
) -> tuple[list[dict[str, Any]], list[ParamGroup]]:
    """Rows and groups of the model: the stored ones where the config's model is the stored one, else those of a model
    on the meta device. The real model is checked again once it is built.
    """
    same = all(plain.get(key) == manifest.config.get(key) for key in ("model", "lora", "tokenizer"))
    if same:
        named = [pair for row in manifest.parameters for pair in _without_memory(row)]
    else:
        with torch.device("meta"):
            named = named_parameters(build_model(settings, start.data.processor, seed=settings.seed))
    groups = build_groups(settings, named)
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
    found: Mapping[str, Any] = Settings.completed(config) if config.get("model") else config
    return found


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


def report(findings: list[Finding]) -> None:
    """Log every finding that is not ``ok``, and how many are. Raises ``ResumeBlocked`` where one blocks."""
    logger = log.logger()
    for finding in findings:
        if finding.status == "warn":
            logger.warning("Checklist, %s: %s -> %s. %s", finding.id, finding.was, finding.now, finding.why)
    number = sum(finding.status == "ok" for finding in findings)
    logger.info("Checklist: %d of %d points are as they were or harmless (tools/resume.py shows all).",
                number, len(findings))  # fmt: skip
    refuse(findings)
