"""Everything that the loop needs, built from a config.

The order matters in two respects. What can be refused from files alone (keys, the geometry, the checkpoint, the data)
is refused before processes join and before the model is built. The random generators are seeded just before the model
is built, so initial weights depend on the seed and on nothing that was built earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from unigen_ds.backends.base import Backend
from unigen_ds.backends.memory import on_meta
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.config.text import config_text
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.progress import Duration, Geometry, Ruler
from unigen_ds.data.batches.left_out import list_left_out
from unigen_ds.data.batches.loader import UpdateLoader
from unigen_ds.data.batches.statistics import start_lines
from unigen_ds.data.batches.stream import Cursor
from unigen_ds.data.datasets.dataset import PlannedDataset
from unigen_ds.data.datasets.overflow import check_positions
from unigen_ds.data.samples.processor import Processor
from unigen_ds.evaluation.validation import Validation
from unigen_ds.hooks.base import Hook
from unigen_ds.models.lora import adapted, base_tensors, hold_base_in
from unigen_ds.optim.optimizer import COMPUTE_DTYPE
from unigen_ds.resume.finding import Finding
from unigen_ds.resume.plan import ResumePlan
from unigen_ds.runner.settings.environment import apply_environment, apply_variables
from unigen_ds.runner.settings.naming import PLACE, Named, name_and_folder
from unigen_ds.runner.settings.tree import Settings
from unigen_ds.runner.start.agreement import check_data, check_settings
from unigen_ds.runner.start.begin import Beginning, Start, begin, build_start, plain_built, plain_values, settle
from unigen_ds.runner.start.build import (
    build_geometry,
    build_groups,
    build_hooks,
    build_loader,
    build_model,
    build_optimizer_config,
    build_schedules,
    build_validation,
    named_parameters,
    parameter_table,
    recorded_fused,
)
from unigen_ds.schedule.schedule import Schedules
from unigen_ds.system import announced, clock, dist, log
from unigen_ds.system.seeding import seed_everything


@dataclass(frozen=True)
class Parts:
    """The parts of one run."""

    settings: Settings
    plain_config: dict[str, Any]
    """The config as plain values, for the manifest."""
    config_text: str
    work_dir: Path
    checkpoint_dir: Path
    """The folder of the checkpoints: the work dir, unless the config names another."""
    backend: Backend
    loader: UpdateLoader
    loader_at: Callable[[Geometry, Cursor], UpdateLoader]
    """Makes another loader of this rank, without workers: to read data again."""
    cursor: Cursor
    """Where the loader starts."""
    datasets: Sequence[PlannedDataset]
    source_names: Sequence[str]
    processor: Processor
    schedules: Schedules
    hooks: Sequence[Hook]
    ruler: Ruler
    geometry: Geometry
    limits: Sequence[Duration]
    total_sequences: float
    loss_weights: Mapping[str, float]
    plan: ResumePlan
    resumed: Manifest | None
    """Of the checkpoint that the run resumes from; made by ``adopt`` where another trainer wrote it."""
    parameters: list[dict[str, Any]]
    data_identity: dict[str, Any]
    findings: Sequence[Finding] = ()
    """Of the resume's checklist; on rank 0 alone."""
    validation: Sequence[Validation] = ()
    list_left_out: Callable[[Path], None] = lambda folder: None
    """Writes what of the data is left out into a folder. On rank 0."""
    max_updates: int | None = None


def build_parts(config: Any, *, max_updates: int | None = None) -> Parts:
    """Build everything. Raises ``ConfigError``, ``DataError``, ``CheckpointError`` or ``ResumeBlocked``."""
    clock.begin()
    settings = Settings.from_config(config)
    apply_variables(settings.env)
    dist.launcher_environment(settings.launcher)
    backend, geometry = build_engine(settings)
    settings, plan, start, hooks, findings = _begin(settings, backend, geometry, max_updates)
    settings = settle(settings, plan, backend=backend, geometry=geometry)
    optimizer_cfg = build_optimizer_config(settings, fused=recorded_fused(settings, start.manifest))
    seed, data, loading = settings.seed, start.data, settings.train_dataloader
    check_data(settings, data, total_sequences=start.total_sequences)
    seed_everything(seed, rank=dist.rank())
    model: Any = build_model(settings, data.processor, seed=seed, stream=True)
    for part in data.parts:
        check_positions(part.fitted, part.names, limit=getattr(model, "max_document_tokens", None))
    initial = model.initial_weights(seed=seed) if on_meta(model) else None
    named = named_parameters(model)
    groups = build_groups(settings, named)
    parameters = parameter_table(named, groups)
    schedules = build_schedules(
        settings,
        start.manifest,
        groups,
        ruler=start.ruler,
        total_sequences=start.total_sequences,
        global_batch_size=geometry.global_batch_size,
    )
    backend.left_out = base_tensors(model)
    if adapted(model) is not None:
        hold_base_in(model, COMPUTE_DTYPE[optimizer_cfg.precision])
    backend.prepare(model, groups, optimizer_cfg, geometry=geometry)
    if initial is not None and (plan.mode != "resume" or backend.left_out):  # all else is in the checkpoint
        backend.load_tensors(initial, weights_only=True)
    seed_everything(seed, rank=dist.rank())
    if dist.is_main():
        for warns, line in start_lines(data.stream):
            log.logger().log(WARNING if warns else INFO, line)
        for line in schedules.warnings() if start.manifest is None else ():
            log.logger().warning("%s.", line)
        for line in chain.from_iterable(one.start_lines() for one in data.validation):
            log.logger().info(line)
    log.logger().info(
        "Effective batch: %s sequences per update; %d per epoch.", geometry, start.ruler.sequences_per_epoch
    )
    return Parts(
        settings=settings,
        plain_config={**plain_values(settings, start.manifest), **plain_built(model)},
        config_text=config_text(settings.given),
        work_dir=settings.folder,
        checkpoint_dir=settings.checkpoints,
        backend=backend,
        loader=build_loader(loading, data, geometry=geometry, dp_rank=backend.dp_rank, cursor=start.cursor),
        loader_at=lambda geometry, cursor: build_loader(
            loading, data, geometry=geometry, dp_rank=backend.dp_rank, cursor=cursor, workers=False
        ),
        cursor=start.cursor,
        datasets=data.stream.sources,
        source_names=data.stream.names,
        processor=data.processor,
        schedules=schedules,
        hooks=hooks,
        ruler=start.ruler,
        geometry=geometry,
        limits=start.limits,
        total_sequences=start.total_sequences,
        loss_weights=settings.term_weights,
        plan=plan,
        resumed=start.manifest,
        parameters=parameters,
        data_identity=data.stream.identity,
        findings=findings,
        validation=build_validation(settings, data),
        list_left_out=partial(list_left_out, data.parts),
        max_updates=max_updates,
    )


def build_engine(settings: Settings) -> tuple[Backend, Geometry]:
    """The engine, not yet prepared, and the geometry; refused where they cannot work. Joins no process group."""
    check_world_size(settings.world_size)
    backend: Backend = settings.backend.build()
    geometry = build_geometry(settings, dp_size=backend.dp_size)
    backend.check(geometry=geometry, optimizer_cfg=build_optimizer_config(settings))
    return backend, geometry


def check_world_size(wanted: int | None) -> None:
    """Raise ``ConfigError`` where the launcher has started another number of processes than the config is meant for."""
    started = dist.env_world_size()
    if wanted not in (None, started):
        raise ConfigError(
            f"world_size is {wanted}, and {started} process{'es were' if started > 1 else ' was'} started",
            remedy=f"start {wanted} (torchrun --nproc_per_node {wanted} on one node); or --cfg-options"
            f" world_size={started}, with a batch_size or accumulative_counts for the effective batch that you want",
        )


def _begin(
    settings: Settings, backend: Backend, geometry: Geometry, max_updates: int | None
) -> tuple[Settings, ResumePlan, Start, list[Hook], Sequence[Finding]]:
    """Rank 0 reads the files and, on a resume, runs the checklist; then the processes join."""
    joined, own_folder = dist.joined(), PLACE in (settings.work_dir or "")
    found: Beginning | None = None
    if joined:
        settings = _named(settings, dist.on_main(lambda: name_and_folder(settings, geometry)))
    else:
        dist.check_port()
        dist.open_store(timeout_s=settings.env.dist_timeout_s)
        if dist.env_rank() == 0:
            settings = _named(settings, name_and_folder(settings, geometry))
            found = begin(settings, backend=backend, geometry=geometry)
    hooks = build_hooks(settings)
    apply_environment(settings.env)
    announced.arrive(timeout_s=settings.env.dist_timeout_s)
    dist.init(timeout_s=settings.env.dist_timeout_s)
    check_settings(settings, max_updates=max_updates)
    if own_folder and not joined:  # all ranks use the one that rank 0 has named
        settings = settings.named(*dist.broadcast_object((settings.run_name, settings.work_dir)))
    log.setup(rank=dist.rank(), log_file=settings.folder / "train.log", level=settings.env.log_level)
    if joined:
        found = dist.only_on_main(lambda: begin(settings, backend=backend, geometry=geometry))
    plan: ResumePlan = dist.on_main(lambda: found.plan)  # type: ignore[union-attr]  # rank 0 has found it
    start = found.start if found else None
    start = start or build_start(settings.with_seed(plan.seed).with_base(plan.base), plan, geometry=geometry)
    return settings, plan, start, hooks, found.findings if found else ()


def _named(settings: Settings, named: Named) -> Settings:
    """With the name of the run and its folder; a warning about the folder is logged once the log is there."""
    if named.why:
        log.warn_at_setup(named.why)
    return settings.named(named.name, named.folder)
