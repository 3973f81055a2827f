"""The checks of a dry run, in their order: each a function of what is ``Known`` that returns its results.

A check adds what it has built to ``Known``, asks with ``need`` for what it cannot do without, and may raise: every
error is one more problem of the list. A new check is a function here, or in a module of its own, and a row of
``CHECKS``; one of a user's own is registered in ``DRY_RUN_CHECKS``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from unigen_ds.checkpoint.home import check_home, other_owner, same
from unigen_ds.checks.dry_run.batch_checks import check_batches
from unigen_ds.checks.dry_run.context import NOWHERE, Known, Unknown, usable_settings
from unigen_ds.checks.dry_run.given_paths import path_results, writable_results
from unigen_ds.checks.dry_run.job import launched_world_size, launcher_results, slurm_results
from unigen_ds.checks.dry_run.rank_calls import check_collectives
from unigen_ds.checks.dry_run.resources import check_disk, check_memory, check_time, check_workers
from unigen_ds.checks.dry_run.result import Checked, find_hardware, ok, problem, problems_of, unchecked, warning
from unigen_ds.checks.resume import announced
from unigen_ds.config.overrides import stated_world_size
from unigen_ds.config.paths import expand_paths
from unigen_ds.config.registry import DRY_RUN_CHECKS, TOKENIZERS, build
from unigen_ds.config.section import Component
from unigen_ds.core.choices import AUTO
from unigen_ds.core.errors import ConfigError, UnigenError
from unigen_ds.core.progress import Geometry
from unigen_ds.data.datasets.dataset import check_readable
from unigen_ds.optim.optimizer import AUTO as AUTO_PRECISION
from unigen_ds.resume.plan import NOT_RESUMED, ResumePlan, plan_resume
from unigen_ds.runner.settings.naming import PLACE, name_and_folder
from unigen_ds.runner.settings.tree import Settings, read_config
from unigen_ds.runner.start.begin import build_start, check_resume, settle, with_base, with_choices
from unigen_ds.runner.start.build import build_hooks, build_model, build_processor, check_states
from unigen_ds.runner.start.parts import build_engine
from unigen_ds.schedule.schedule import Schedules
from unigen_ds.system import dist
from unigen_ds.system.versions import ALLOWED, installed, version_problems
from unigen_ds.tracking.settings import Visualizer

Check = Callable[[Known], Iterable[Checked]]
_STARTED = {"pytorch": "RANK", "slurm": "SLURM_PROCID", "mpi": "OMPI_COMM_WORLD_RANK"}
"""Launcher -> a variable that each of its processes has."""


def check_packages(known: Known) -> Iterator[Checked]:
    """torch and transformers; DeepSpeed's version is checked with the engine that needs it."""
    found = [*version_problems()]
    yield from (result for error in found for result in problems_of(error))
    if not found:
        names = [*ALLOWED, "deepspeed"]
        yield ok(", ".join(f"{name} {version}" for name in names if (version := installed(name))))


def check_devices(known: Known) -> Iterator[Checked]:
    """Adds ``hardware``. Before anything else that asks torch for a device."""
    hardware = known.hardware = find_hardware()
    if not hardware.count:
        yield unchecked("this machine has no CUDA device: what a device must have is not checked, all else is")
        return
    gib = 2**30
    yield ok(
        f"{hardware.count} x {hardware.name}, {hardware.memory / gib:.1f} GiB each, {hardware.free / gib:.1f} of the"
        " first free"
    )


def check_config(known: Known) -> Iterator[Checked]:
    """Adds ``given``, also of a config with mistakes, the number of processes, and ``settings`` of one without."""
    config = read_config(known.asked.config, known.asked.overrides)
    known.given = config.values
    with suppress(ConfigError):  # reported by ``check_job``
        _count_processes(known)
    with announced(known.world_size, per_node=known.per_node):
        try:
            settings = Settings.from_config(config)
            known.settings = settings.with_resume(AUTO) if known.asked.resume_auto else settings
        except ConfigError as error:
            yield from problems_of(error)
            known.settings, known.changed, known.replaced = usable_settings(known.given)
            return
    yield ok(f"{known.asked.config}: every key and value")


def _count_processes(known: Known) -> None:
    """Adds ``world_size`` and ``per_node``: as asked for, as started, or as the config has it.

    Raises ``ConfigError`` for variables of the launcher that are missing or wrong.
    """
    launcher, missing = str(known.given.get("launcher") or "none"), None
    if launcher in _STARTED and _STARTED[launcher] in os.environ:
        try:
            dist.launcher_environment(launcher)
        except ConfigError as error:
            missing = error
    started = launched_world_size(os.environ)
    known.world_size = known.asked.world_size or started or stated_world_size(known.given)
    on_node = dist.env_processes_per_node() if started == known.world_size and started > 1 else None
    known.per_node = min(known.asked.per_node or on_node or 8, known.world_size)
    if missing is not None:
        raise missing


def check_job(known: Known) -> Iterator[Checked]:
    """What the launcher has set, against the number of processes."""
    launcher = str(known.given.get("launcher") or "none")
    yield from (result for error in known.wrong_numbers for result in problems_of(error))
    try:
        _count_processes(known)
    except ConfigError as error:
        yield from problems_of(error)
    yield from launcher_results(os.environ, launcher=launcher, world_size=known.world_size)
    loader = known.given.get("train_dataloader")
    workers = loader.get("num_workers") if isinstance(loader, Mapping) else 0
    num_workers = workers if isinstance(workers, int) else 0
    yield from slurm_results(os.environ, launcher=launcher, world_size=known.world_size, num_workers=num_workers)
    dist.check_port()


def check_paths(known: Known) -> Iterator[Checked]:
    """Files and folders that are read."""
    missing = []
    for result, path in path_results(known.given):
        missing += [path] if path else []
        yield result
    known.paths = missing


def check_folders(known: Known) -> Iterator[Checked]:
    """Folders that are written: permissions, and whether another run uses them."""
    folders = {key: known.given.get(key) for key in ("work_dir", "checkpoint_dir")}
    for key, text in folders.items():
        if not isinstance(text, str):
            continue
        folder = Path(os.path.expanduser(os.path.expandvars(text.partition(PLACE)[0] or ".")))
        yield from writable_results(folder, key=key)
        if owner := other_owner(folder):
            yield problem(
                f"another process trains in {key} {folder} ({owner})",
                remedy=f"wait until it has ended, stop it, or choose another --{key.replace('_', '-')}",
            )


def check_engine(known: Known) -> Iterator[Checked]:
    """Adds ``backend`` and ``geometry``: versions, precision and the split of the batch."""
    known.section("backend").backend.build()  # refuses what the engine cannot do with any optimizer
    settings = known.section("backend", "optim_wrapper")
    hardware = known.hardware
    precision = settings.optim_wrapper.precision
    if hardware is not None and hardware.count:
        if precision == "bf16" and not hardware.bf16:
            yield problem(
                f"precision is 'bf16', which {hardware.name} cannot compute",
                allowed="bf16 on a device of compute capability 8.0 or more",
                remedy="optim_wrapper.precision='fp16', 'fp32', or 'auto'",
            )
        if precision == AUTO_PRECISION and not hardware.bf16:
            settings = known.settings = settings.with_precision("fp16")
    known.backend, known.geometry = build_engine(settings)
    topology = known.backend.topology()
    yield ok(f"{topology['engine']}, {settings.optim_wrapper.precision}; {known.geometry} sequences per update")
    devices = known.hardware.count if known.hardware else 0
    if devices and "WORLD_SIZE" in os.environ and known.per_node > devices:
        yield problem(
            f"{known.per_node} processes are on a machine with {devices} CUDA devices",
            remedy=f"start at most {devices} processes on a machine, one for each device",
        )


def check_trackers(known: Known) -> Iterator[Checked]:
    """Packages and keys of log writers; no server is asked."""
    for component in Visualizer.parse(known.given.get("visualizer") or {}).vis_backends:
        writer = component.build()
        found = [*getattr(writer, "lacks", list)()]
        yield from (result for error in found for result in problems_of(error))
        if not found:
            yield ok(f"{component.name}: installed, and with a key where it needs one; its server was not asked")


def check_tokenizer(known: Known) -> Iterator[Checked]:
    """The tokenizer loads, and has the special tokens of the processor."""
    given = known.given.get("tokenizer")
    if given is None:
        yield ok("the config has none")
        return
    expand_paths(given, where="tokenizer")
    tokenizer: Any = build(TOKENIZERS, given, where="tokenizer")
    names = ("bos_id", "eos_id", "pad_id", "image_start_id", "image_end_id", "image_id")
    ids = {name: found for name in names if isinstance(found := getattr(tokenizer, name, None), int)}
    outside = {name: number for name, number in ids.items() if not 0 <= number < len(tokenizer)}
    for name, number in outside.items():
        yield problem(f"the tokenizer's {name} is {number}", allowed=f"0 to {len(tokenizer) - 1}")
    if not outside:
        yield ok(f"{len(tokenizer):,} ids; " + ", ".join(f"{name} {number}" for name, number in ids.items()))


def check_hooks(known: Known) -> Iterator[Checked]:
    """All hooks can be built, and their states can be stored."""
    settings: Settings = known.section("default_hooks", "custom_hooks", "visualizer")
    try:
        hooks = build_hooks(settings)
    except Exception as error:
        for component in settings.custom_hooks:
            try:
                component.build()
            except Exception as own:
                yield from problems_of(own)
        yield from problems_of(error)  # listed once
        return
    check_states(hooks)
    yield ok(", ".join(hook.name or type(hook).__name__ for hook in hooks))


def check_start(known: Known) -> Iterator[Checked]:
    """Adds ``plan`` and ``start``: the checkpoint to begin with, the checklist of a resume, and all data sets. Without
    an engine or a checkpoint that can be used, the data is checked as that of a new run.
    """
    settings: Settings = known.need("settings")
    known.loaded = known.geometry or Geometry(settings.train_dataloader.batch_size or 1, 1, known.world_size)
    try:
        plan, settings = _plan(known, settings)
        yield from (warning(message) for message in plan.messages if message.startswith(NOT_RESUMED))
        if settings.work_dir and not same(settings.folder, settings.checkpoints):
            yield ok(f"checkpoints in {settings.checkpoints}")
        known.settings, known.plan = settings, plan
    except (Unknown, UnigenError) as error:
        missing = isinstance(error, Unknown)
        yield from [unchecked(f"the checkpoint to begin with: needs {error}")] if missing else problems_of(error)
        seed = settings.randomness.seed
        plan = ResumePlan("fresh")
        settings = known.settings = settings if seed is not None else settings.with_seed(0)
    if wrong := known.replaced.intersection(("model", "tokenizer", "train_dataloader")):
        yield from _of_each_source(settings) if "model" not in wrong else ()
        raise Unknown(f"{', '.join(sorted(wrong))} without problems")
    try:
        if plan.mode == "resume":
            backend = known.need("backend")
            known.start, findings = check_resume(settings, plan, backend=backend, geometry=known.loaded, hashed=False)
            for finding in findings:
                text = f"{finding.id}: {finding.was} -> {finding.now}. {finding.why}"
                if finding.status == "block":
                    yield problem(text, remedy=finding.remedy or None)
                elif finding.status == "warn":
                    yield warning(text)
            yield ok(f"resumes from {plan.checkpoint} (its files' sizes were compared, not their content)")
        else:
            start = known.start = build_start(settings, plan, geometry=known.loaded)
            curves = Schedules.from_cfg(
                settings.param_scheduler, ruler=start.ruler, base=(), total_sequences=start.total_sequences
            )
            yield from map(warning, curves.warnings())
            if known.plan is not None:
                yield ok("a new run" + (f" with the weights of {plan.checkpoint}" if plan.checkpoint else ""))
    except UnigenError as error:
        found = [*_of_each_source(settings)]
        yield from found or problems_of(error)
        return
    stream = known.start.data.stream
    for skipped in known.start.data.skipped:
        yield warning(f"data set {skipped.name} is skipped (on_error='skip'): {skipped.why}")
    yield ok(
        f"{sum(map(len, stream.datasets)):,} records of {len(stream.names)} data set(s),"
        f" {stream.sequences_per_epoch:,} sequences an epoch"
    )


def _plan(known: Known, settings: Settings) -> tuple[ResumePlan, Settings]:
    """Where the run begins, and its settings with what that decides."""
    backend, geometry = known.need("backend"), known.need("geometry")
    if PLACE in (settings.work_dir or ""):
        named = name_and_folder(settings, geometry)
        settings = settings.named(named.name, named.folder)
    check_home(settings.folder, settings.checkpoints)
    plan = plan_resume(
        settings.checkpoints, resume=settings.resume or False, load_from=settings.load_from,
        load_cfg=settings.load_cfg, hashes=False,
    )  # fmt: skip
    plan = with_choices(with_base(plan, settings), settings)
    return plan, settle(settings, plan, backend=backend, geometry=geometry)


def _of_each_source(settings: Settings) -> Iterator[Checked]:
    """A problem of each data set that cannot be opened or read: a start names the first."""
    processor = build_processor(settings, seed=settings.seed)
    components: list[Component] = [*settings.train_dataloader.dataset]
    for loader in settings.val_dataloader.sets.values() if settings.val_dataloader else ():
        components += loader.dataset
    for component in components:
        if component.get("data_path") == NOWHERE:
            continue
        try:
            made = component.build(processor=processor)
            check_readable([made], [made.name])
        except UnigenError as error:
            yield from problems_of(error)


def check_model(known: Known) -> Iterator[Checked]:
    """Adds ``model``, without memory, with the files of published weights read; its vocabulary has all tokens."""
    settings: Settings = known.section("model", "lora", "tokenizer")
    seed = settings.randomness.seed or 0
    processor = known.start.data.processor if known.start else build_processor(settings, seed=seed)
    with torch.device("meta"):
        model = build_model(settings, processor, seed=seed)
    known.model = model
    tokenizer = getattr(processor, "tokenizer", None)
    ids, size = 0 if tokenizer is None else len(tokenizer), getattr(model, "vocab_size", None)
    if isinstance(size, int) and ids > size:
        yield problem(
            f"the tokenizer has {ids:,} ids, and the model's vocabulary {size:,}",
            allowed="a vocabulary with all ids",
            remedy=f"the tokenizer of the model, or vocab_size={ids} for a model from scratch",
        )
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    yield ok(f"{type(model).__name__}: {sum(p.numel() for p in model.parameters()):,} parameters, {trained:,} trained")


CHECKS: dict[str, Check] = {
    "packages": check_packages,
    "devices": check_devices,
    "config": check_config,
    "job": check_job,
    "paths": check_paths,
    "folders": check_folders,
    "engine": check_engine,
    "trackers": check_trackers,
    "tokenizer": check_tokenizer,
    "hooks": check_hooks,
    "start": check_start,
    "model": check_model,
    "batches": check_batches,
    "workers": check_workers,
    "collectives": check_collectives,
    "memory": check_memory,
    "disk": check_disk,
    "time": check_time,
}
"""Name -> check, in the order in which they run."""
LOCAL = ("packages", "devices", "config", "job", "paths", "folders")
"""Checks that every process of a launched job makes on its own machine."""


def all_checks() -> dict[str, Check]:
    """Also those of a user's own, after the others, once the config has imported them. Raises ``ConfigError``."""
    own = DRY_RUN_CHECKS.module_dict
    if both := sorted(own.keys() & CHECKS.keys()):
        raise ConfigError(f"DRY_RUN_CHECKS has {', '.join(both)}, a name in use", remedy="register_module(name='...')")
    return {**CHECKS, **own}
