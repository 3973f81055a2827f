"""The stages of a start before the model exists, in their order: each is a function of the results before it.

::

    settings ──> engine ──────> plan ───────> data ───────> checklist ──> hooks ─> model ─> schedules ─> engine prepared
    Settings     build_engine   plan_start    read_start    run_checklist └─────────── build.py ──────────┘

``parts.py`` runs them all over all processes; ``--dry-run`` and the tools as many as they need. All is computed from
the config, its data and the checkpoint's manifest: equal on every rank, without a process group or a device.
"""

from __future__ import annotations

import secrets
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unigen_ds.backends.base import Backend
from unigen_ds.checkpoint.base_files import find_base, read_base
from unigen_ds.checkpoint.foreign import Foreign, read_foreign
from unigen_ds.checkpoint.home import check_home
from unigen_ds.checkpoint.manifest import FileEntry, Manifest, current_versions
from unigen_ds.checkpoint.partial import LoadSettings
from unigen_ds.core.errors import ConfigError, DataError, ResumeBlocked
from unigen_ds.core.json_values import json_values
from unigen_ds.core.progress import Duration, Geometry, Progress, Ruler
from unigen_ds.data.batches.change import DataChange, OnDataChange, compare, continue_stream
from unigen_ds.data.batches.statistics import check_unusable
from unigen_ds.data.batches.stream import SequenceStream
from unigen_ds.data.datasets.dataset import check_readable
from unigen_ds.data.datasets.overflow import check_overflow, check_positions
from unigen_ds.data.order.order import Cursor
from unigen_ds.evaluation.scoring import Validation
from unigen_ds.models.weights import check_here
from unigen_ds.optim.optimizer import AUTO_PRECISION, ParamGroup, settled_precision
from unigen_ds.resume import checklist
from unigen_ds.resume.finding import BUILT_KEY, SAVES, Finding, Proposal
from unigen_ds.resume.geometry import keep_batch, lr_factor
from unigen_ds.resume.plan import ResumePlan, join_skips, plan_resume
from unigen_ds.runner.settings.tree import Settings
from unigen_ds.runner.start import build
from unigen_ds.schedule.schedule import Schedules
from unigen_ds.system import dist, log
from unigen_ds.system.files import check_digests


def build_engine(settings: Settings) -> tuple[Backend, Geometry]:
    """The engine, not yet prepared, and the geometry. Raises ``ConfigError`` where they cannot work."""
    world_size, meant = dist.env_world_size(), settings.world_size
    if meant not in (None, world_size) and settings.on_batch_change != "keep-batch":
        raise ConfigError(
            f"world_size is {meant}, and {world_size} process{'es were' if world_size > 1 else ' was'} started",
            remedy=f"start {meant} (torchrun --nproc_per_node {meant} on one node); or --cfg-options"
            f" world_size={world_size}, with a batch_size or accumulative_counts for the effective batch that you want;"
            " or --on-batch-change keep-batch",
        )
    backend: Backend = settings.backend.build()
    geometry = build.build_geometry(settings, dp_size=backend.dp_size)
    optimizer_cfg = build.build_optimizer_config(settings)
    backend.check(geometry=geometry, optimizer_cfg=optimizer_cfg)
    return backend, geometry


def plan_start(settings: Settings, *, hashes: bool = True) -> ResumePlan:
    """The checkpoint to begin with, the seed, the precision and a base's files: on rank 0, which sends them.

    Without ``hashes`` only sizes are compared. Raises ``ConfigError``, ``CheckpointError`` or ``ResumeBlocked``.
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
    manifest, precision = plan.manifest if plan.mode == "resume" else None, settings.optim_wrapper.precision
    old = None if manifest is None else manifest.topology.get("precision")
    choice = settled_precision(precision, old)
    if precision == AUTO_PRECISION:
        why = "as the checkpoint has it" if choice == old else "as this device computes it"
        log.logger().info("optim_wrapper.precision is 'auto': this run computes in %s, %s.", choice, why)
    seed = settings.randomness.seed
    if seed is None and manifest is not None:
        seed = int(manifest.loader["seed"])
    if seed is None:
        seed = secrets.randbelow(2**31)
        log.logger().info(
            "randomness.seed is None: this run draws %d. Checkpoints record it, and a resume uses it.", seed
        )
    base, folders = None, settings.base or settings.model.get("pretrained")
    if settings.lora is not None and folders:  # their base's files are read and hashed
        if manifest is not None and manifest.base is not None:  # they must be the recorded ones
            path = find_base(manifest.base, folder=settings.base, checkpoint=plan.checkpoint)
            base = replace(manifest.base, path=path)
        else:
            base = read_base(folders)
    return replace(plan, seed=seed, precision=choice, base=base)


def check_weights(pretrained: Any, *, where: str = "model.pretrained") -> None:
    """Raise, before all data is read, ``ConfigError`` or ``CheckpointError`` for missing or changed weights."""
    if isinstance(pretrained, Mapping):
        for key, value in pretrained.items():
            check_weights(value, where=f"{where}.{key}")
    elif isinstance(pretrained, str):
        path = Path(pretrained).expanduser()
        if pretrained.startswith(("/", "~", "./", "../")):
            check_here(path, where=where)
        if path.exists():
            check_digests(path)


def settle(settings: Settings, plan: ResumePlan, *, backend: Backend, geometry: Geometry) -> tuple[Settings, Geometry]:
    """The settings with the plan's choices, and the geometry. Raises ``ConfigError`` where the engine cannot work."""
    assert plan.precision is not None, "rank 0 has chosen one"
    optimizer_cfg, own = build.build_optimizer_config(settings), geometry
    if settings.on_batch_change == "keep-batch" and plan.mode == "resume" and plan.manifest is not None:
        old = plan.manifest.geometry
        most = settings.train_dataloader.batch_size or plan.manifest.ruler.geometry.batch_size
        geometry = keep_batch(old.global_batch_size, own.dp_size, most=most)
        if geometry != old:
            log.logger().info("on_batch_change is 'keep-batch': %s; it was %s.", geometry, old)
    if (plan.precision, geometry) != (optimizer_cfg.precision, own):
        backend.check(geometry=geometry, optimizer_cfg=replace(optimizer_cfg, precision=plan.precision))
    return settings.with_choices(seed=plan.seed, precision=plan.precision, base=plan.base), geometry


@dataclass(frozen=True)
class Start:
    """The data, the position in it, and the lengths in data of the units that a config uses."""

    settings: Settings
    geometry: Geometry
    manifest: Manifest | None
    """That of the checkpoint to resume from (by ``adopt`` where another trainer wrote it); None on a fresh start."""
    unknown: tuple[str, ...]
    """What the files of another trainer's checkpoint do not state."""
    data: build.Data
    change: DataChange
    """What differs from the data of the checkpoint; false where nothing does, and on a fresh start."""
    cursor: Cursor
    ruler: Ruler
    limits: list[Duration]
    total_sequences: float

    def optimization(
        self, parameters: Sequence[tuple[str, nn.Parameter]]
    ) -> tuple[list[ParamGroup], list[dict[str, Any]], Schedules]:
        """Groups and table of a model's parameters, and the curves of the groups' learning rates: the config's; on a
        resume the stored ones if those are equal, scaled by ``on_batch_change``.
        """
        settings, manifest, total = self.settings, self.manifest, self.total_sequences
        groups = build.build_groups(settings, parameters)
        base = [{"name": group.name, "lr": group.lr} for group in groups]
        curves = Schedules.from_cfg(settings.param_scheduler, ruler=self.ruler, base=base, total_sequences=total)
        if manifest is not None:
            old, was = Schedules.from_state_dict(manifest.schedule), manifest.geometry.global_batch_size
            same = (old.base, old.total_sequences) == (curves.base, total) and old.same_curves(curves)
            factor = lr_factor(settings.on_batch_change, was=was, now=self.geometry.global_batch_size)
            curves = replace(old if same else curves, lr_scale=old.lr_scale * factor)
        return groups, build.parameter_table(parameters, groups), curves

    def check_positions(self, model: nn.Module) -> None:
        """Raise ``DataError`` where a sample is longer than the model has positions."""
        for part in self.data.parts:
            check_positions(part.fitted_sources, part.names, limit=getattr(model, "max_document_tokens", None))

    @cached_property
    def meta_model(self) -> nn.Module:
        """The model without memory, built at the first use."""
        with torch.device("meta"):
            return build.build_model(self.settings, self.data.processor, seed=self.settings.seed)


def read_start(settings: Settings, plan: ResumePlan, *, geometry: Geometry) -> Start:
    """Read the data as the plan continues it. Raises ``DataError``, ``ConfigError``, and what ``adopt`` raises."""
    manifest = plan.manifest if plan.mode == "resume" else None
    unknown: tuple[str, ...] = ()
    if plan.mode == "resume" and plan.checkpoint and manifest is None:
        foreign = read_foreign(plan.checkpoint)
        stream = build.build_data(settings, geometry=geometry_of(foreign), ruler=None).stream
        manifest, unknown = adopt(foreign, settings, stream), foreign.unknown
    data, change, cursor = continue_data(settings, manifest, geometry=geometry, on_change=settings.on_data_change)
    ruler = manifest.ruler if manifest else Ruler(geometry, data.stream.sequences_per_epoch)
    limits = settings.train_cfg.durations(ruler)
    total = build.total_sequences(limits, geometry, data.stream.tokens_per_sequence)
    skips = join_skips(settings.skip_sequences, manifest, plan.lineage, end=total)
    data = replace(data, stream=data.stream.skipping(skips))
    return Start(settings, geometry, manifest, unknown, data, change, cursor, ruler, limits, total)


def continue_data(
    settings: Settings, manifest: Manifest | None, *, geometry: Geometry, on_change: OnDataChange, check: bool = True
) -> tuple[build.Data, DataChange, Cursor]:
    """The data with the epochs and phases of its manifest, what has changed since then, and the position.

    Data that changed in a way that ``on_change`` does not allow stays as it is now. ``check``: refuse unusable data.
    """
    data = build.build_data(settings, geometry=geometry, ruler=manifest.ruler if manifest else None)
    for error in data_errors(settings, data.parts) if check else ():
        raise error
    if manifest is None:
        return data, DataChange(), Cursor()
    change, cursor = compare(manifest.loader, data.stream), Cursor.from_state_dict(manifest.loader["cursor"])
    if not change or on_change == "restart" or (on_change == "append" and change.only_appended):
        stream, cursor = continue_stream(manifest.loader, data.stream, on_change=on_change)
        data = replace(data, stream=stream)
    return data, change, cursor


def read_validation(settings: Settings, manifest: Manifest | None, *, geometry: Geometry) -> Validation:
    """The validation data as the run of ``manifest`` has it; data of the training only where those are divided.

    Raises as ``read_start`` does.
    """
    if settings.val_dataloader is not None and settings.val_dataloader.division[0] is not None:
        return continue_data(settings, manifest, geometry=geometry, on_change="append")[0].validation
    processor = build.build_processor(settings, seed=settings.seed)
    validation = build.build_validation(settings, processor, [], geometry=geometry)
    for error in data_errors(settings, [validation]):
        raise error
    return validation


def data_errors(settings: Settings, parts: Sequence[Any]) -> Iterator[DataError]:
    """Why a start would not use the data of ``parts``, as of ``Data.parts``."""
    for part in parts:
        unusable = partial(check_unusable, part.fitted_sources, limit=settings.train_dataloader.max_skipped_fraction)
        for check in (partial(check_readable, part.datasets), partial(check_overflow, part.fitted_sources), unusable):
            try:
                check(part.names)
            except DataError as error:
                yield error


def run_checklist(start: Start, plan: ResumePlan, *, backend: Backend, hashed: bool = True) -> list[Finding]:
    """All findings of a resume's checklist. ``hashed``: whether the plan has read the checkpoint's files."""
    settings, manifest, plain = start.settings, start.manifest, plain_config(start.settings)
    assert manifest is not None, "only a resume is checked"
    if all(plain.get(key) == manifest.config.get(key) for key in ("model", "lora", "tokenizer")):  # the stored model
        named_parameters = []
        for row in manifest.parameters:
            with torch.device("meta"):
                parameter = nn.Parameter(torch.empty(row["shape"]), requires_grad=row["trainable"])
            named_parameters += [(name, parameter) for name in (row["name"], *row.get("tied", ()))]
    else:
        named_parameters = [*start.meta_model.named_parameters(remove_duplicate=False)]
    _, parameters, schedules = start.optimization(named_parameters)
    home = settings.checkpoints
    folder = next((one for one in (home, *home.resolve().parents) if one.exists()), None)
    hook = settings.default_hooks.checkpoint
    proposal = Proposal(
        checkpoint=str(plan.checkpoint),
        config=plain,
        complete=lambda config: Settings.complete(config) if config.get("model") else config,
        saves=SAVES if hook is None else {key: hook.get(key, value) for key, value in SAVES.items()},
        averages=any(hook.cls.__name__.startswith("EMAHook") for hook in settings.custom_hooks),
        geometry=start.geometry,
        topology=backend.topology(),
        schedules=schedules,
        parameters=parameters,
        data=start.change,
        versions=current_versions(),
        on_batch_change=settings.on_batch_change,
        on_data_change=settings.on_data_change,
        free_bytes=shutil.disk_usage(folder).free if folder else None,
        hashed=hashed,
        unknown=start.unknown,
    )
    return checklist.run(manifest, proposal)


def plain_config(settings: Settings, *, model: Any = None) -> dict[str, Any]:
    """The config as plain JSON values, as a manifest keeps it; with ``model`` also its arguments as it was built."""
    values: dict[str, Any] = json_values(settings.config)
    if hasattr(model, "arguments"):
        values |= json_values({BUILT_KEY: {"model": model.arguments()}})
    return values


# ---- a checkpoint of another trainer --------------------------------------------------------------------------------

# The order of its data is not known, so the run continues after as many sequences as the checkpoint was trained on, in
# the order of this project. What could not be determined is in ``Foreign.unknown`` and in the checklist.


def geometry_of(foreign: Foreign) -> Geometry:
    """The geometry it was trained with. Raises ``ResumeBlocked`` with the command that loads its weights alone."""
    if foreign.updates is None or foreign.geometry is None:
        what = "of such files the weights alone are read"
        if foreign.updates is not None:
            what = "its files do not state the whole effective batch size"
        raise ResumeBlocked(
            f"{foreign.directory} ({foreign.writer}) cannot be resumed: {what}",
            remedy=f"a new run with them: --load-from {shlex.quote(str(foreign.directory))} --work-dir NEW",
        )
    return foreign.geometry


def adopt(foreign: Foreign, settings: Settings, stream: SequenceStream) -> Manifest:
    """A manifest for ``--resume``. ``stream`` is built with the geometry of ``geometry_of``."""
    geometry, updates = geometry_of(foreign), foreign.updates or 0
    sequences = updates * geometry.global_batch_size
    ruler = Ruler(geometry, stream.sequences_per_epoch)
    cursor = stream.seek(sequences)
    optimizer, limits = settings.optim_wrapper.optimizer, settings.train_cfg.durations(ruler)
    schedules = Schedules.from_cfg(
        settings.param_scheduler,
        ruler=ruler,
        base=[{"name": "default", "lr": optimizer.lr}],
        total_sequences=build.total_sequences(limits, geometry, stream.tokens_per_sequence),
    )
    return Manifest(
        commit=0,
        parent=None,
        progress=Progress(
            sequences=sequences,
            samples=round(sequences * stream.samples_per_sequence),
            tokens=round(sequences * stream.tokens_per_sequence),
            updates=updates,
            skipped_updates=foreign.skipped_updates or 0,
            epoch=cursor.epoch,
        ),
        geometry=geometry,
        ruler=ruler,
        topology={"engine": foreign.writer, "dp_size": geometry.dp_size, "precision": foreign.precision},
        schedule=schedules.state_dict(),
        loader={"cursor": cursor.state_dict(), **stream.identity},
        parameters=foreign.parameters,
        config={"optim_wrapper": {"optimizer": {"type": optimizer.type}}},
        versions={},
        layout=foreign.layout,
        files=[FileEntry(p.name, p.stat().st_size, "") for p in sorted(foreign.directory.iterdir()) if p.is_file()],
    )
