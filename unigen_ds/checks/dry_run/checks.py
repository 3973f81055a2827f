"""The checks of a dry run, in their order: each a function of what is ``Known`` that returns its results.

A check calls a stage of the start (``runner/start/stages.py``), adds the result to ``Known``, asks with ``need`` for
what it cannot do without, and may raise: every error is one more problem of the list. A new check is a function here,
or in a module of its own, and a row of ``CHECKS``; one of a user's own is registered in ``DRY_RUN_CHECKS``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from unigen_ds.checkpoint.home import same
from unigen_ds.checks.dry_run.collectives import check_collectives
from unigen_ds.checks.dry_run.first_batches import FirstBatches, MadeBatch, make_first_batches
from unigen_ds.checks.dry_run.known import Checked, Known, Unknown, ok, problem, problems_of, unchecked, warning
from unigen_ds.checks.dry_run.resources import check_disk, check_memory, check_time
from unigen_ds.checks.dry_run.this_machine import (
    check_devices,
    check_folders,
    check_job,
    check_packages,
    check_paths,
    count_processes,
)
from unigen_ds.checks.dry_run.usable_settings import NOWHERE, usable_settings
from unigen_ds.checks.resume import as_launched
from unigen_ds.config.paths import expand_paths
from unigen_ds.config.registry import DRY_RUN_CHECKS, TOKENIZERS, build
from unigen_ds.config.section import Component
from unigen_ds.core.batch import check_counts
from unigen_ds.core.choices import AUTO
from unigen_ds.core.errors import ConfigError, UnigenError
from unigen_ds.core.progress import Geometry
from unigen_ds.data.datasets.dataset import PlannedDataset, check_readable
from unigen_ds.data.records.unusable import exceeds
from unigen_ds.optim.optimizer import AUTO as AUTO_PRECISION
from unigen_ds.optim.optimizer import settled_precision
from unigen_ds.resume.plan import NOT_RESUMED, ResumePlan
from unigen_ds.runner.settings.naming import name_and_folder
from unigen_ds.runner.settings.tree import Settings, read_config
from unigen_ds.runner.start.build import build_hooks, build_model, build_processor, check_states
from unigen_ds.runner.start.stages import Start, build_engine, plan_start, read_start, run_checklist, settle
from unigen_ds.schedule.schedule import Schedules
from unigen_ds.tracking.settings import Visualizer

Check = Callable[[Known], Iterable[Checked]]


def check_config(known: Known) -> Iterator[Checked]:
    """Adds ``given``, the number of processes, and ``settings``: of a config with mistakes those of the rest."""
    config = read_config(known.asked.config, known.asked.overrides)
    known.given = config.values
    with suppress(ConfigError):  # reported by ``check_job``
        count_processes(known)
    with as_launched(known.world_size, per_node=known.per_node):
        try:
            settings = Settings.from_config(config)
            yield ok(f"{known.asked.config}: every key and value")
        except Exception as error:  # of a user's own module, too
            yield from problems_of(error)
            usable = usable_settings(known.given)
            if usable is None:
                return
            settings, known.changed, known.replaced = usable
    known.settings = settings.with_resume(AUTO) if known.asked.resume_auto else settings


def check_engine(known: Known) -> Iterator[Checked]:
    """Adds ``backend`` and ``geometry``: versions, precision and the split of the batch."""
    known.section("backend").backend.build()  # refuses what the engine cannot do with any optimizer
    settings = known.section("backend", "optim_wrapper")
    hardware, precision = known.hardware, settings.optim_wrapper.precision
    if hardware.count and precision == "bf16" and not hardware.bf16:
        yield problem(
            f"precision is 'bf16', which {hardware.name} cannot compute",
            allowed="bf16 on a device of compute capability 8.0 or more",
            remedy="optim_wrapper.precision='fp16', 'fp32', or 'auto'",
        )
    if hardware.count and precision == AUTO_PRECISION and not hardware.bf16:
        settings = known.settings = settings.with_precision("fp16")
    known.backend, known.geometry = build_engine(settings)
    engine = known.backend.topology()["engine"]
    yield ok(f"{engine}, {settings.optim_wrapper.precision}; {known.geometry} sequences per update")
    if hardware.count and "WORLD_SIZE" in os.environ and known.per_node > hardware.count:
        yield problem(
            f"{known.per_node} processes are on a machine with {hardware.count} CUDA devices",
            remedy=f"start at most {hardware.count} processes on a machine, one for each device",
        )


def check_trackers(known: Known) -> Iterator[Checked]:
    """Packages and keys of log writers; no server is asked."""
    for component in Visualizer.parse(known.given.get("visualizer") or {}).vis_backends:
        writer = component.build()
        errors = [*getattr(writer, "lacks", list)()]
        yield from (result for error in errors for result in problems_of(error))
        if not errors:
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
    ids = {name: token_id for name in names if isinstance(token_id := getattr(tokenizer, name, None), int)}
    outside = {name: number for name, number in ids.items() if not 0 <= number < len(tokenizer)}
    for name, number in outside.items():
        yield problem(f"the tokenizer's {name} is {number}", allowed=f"0 to {len(tokenizer) - 1}")
    if not outside:
        yield ok(f"{len(tokenizer):,} ids; " + ", ".join(f"{name} {number}" for name, number in ids.items()))


def check_hooks(known: Known) -> Iterator[Checked]:
    """All hooks can be built, and their states can be stored."""
    settings = known.section("default_hooks", "custom_hooks", "visualizer")
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
    """Adds ``start``: the checkpoint to begin with, the checklist of a resume, and all data sets. Without an engine or
    a checkpoint that can be used, the data is checked as that of a new run.
    """
    settings: Settings = known.need("settings")
    geometry = known.geometry or Geometry(settings.train_dataloader.batch_size or 1, 1, known.world_size)
    known.loaded = geometry
    plan = None
    try:
        backend = known.need("backend")
        settings = settings.named(*name_and_folder(settings, geometry))
        plan = plan_start(settings, hashes=False)
        yield from (warning(message) for message in plan.messages if message.startswith(NOT_RESUMED))
        if settings.work_dir and not same(settings.folder, settings.checkpoints):
            yield ok(f"checkpoints in {settings.checkpoints}")
        settings = settle(settings, plan, backend=backend, geometry=geometry)
    except (Unknown, UnigenError) as error:
        missing = isinstance(error, Unknown)
        yield from [unchecked(f"the checkpoint to begin with: needs {error}")] if missing else problems_of(error)
        plan = None
        precision = settled_precision(settings.optim_wrapper.precision)
        settings = settings.with_seed(settings.randomness.seed or 0).with_precision(precision)
    known.settings = settings
    if wrong := known.replaced.intersection(("model", "tokenizer", "train_dataloader.dataset")):
        yield from () if "model" in wrong else _problems_of_sources(settings)
        raise Unknown(f"{', '.join(sorted(wrong))} without problems")
    try:
        start = known.start = read_start(settings, plan or ResumePlan("fresh"), geometry=geometry)
    except UnigenError as error:
        yield from [*_problems_of_sources(settings)] or problems_of(error)
        return
    if plan is not None and plan.mode == "resume":
        yield from _checklist(known, start, plan)
    else:
        if plan is not None:
            yield ok("a new run" + (f" with the weights of {plan.checkpoint}" if plan.checkpoint else ""))
        curves = Schedules.from_cfg(
            settings.param_scheduler, ruler=start.ruler, base=(), total_sequences=start.total_sequences
        )
        yield from map(warning, curves.warnings())
    stream = start.data.stream
    for skipped in start.data.skipped:
        yield warning(f"data set {skipped.name} is skipped (on_error='skip'): {skipped.why}")
    yield ok(
        f"{sum(map(len, stream.datasets)):,} records of {len(stream.names)} data set(s),"
        f" {stream.sequences_per_epoch:,} sequences an epoch"
    )


def _checklist(known: Known, start: Start, plan: ResumePlan) -> Iterator[Checked]:
    """What the checklist of a resume refuses or warns about."""
    yield ok(f"resumes from {plan.checkpoint} (its files' sizes were compared, not their content)")
    if known.changed:
        yield unchecked(f"the checklist of the resume: needs {', '.join(sorted(known.changed))} without problems")
        return
    backend, geometry = known.need("backend"), known.need("geometry")
    for finding in run_checklist(start, plan, backend=backend, geometry=geometry, hashed=False):
        text = f"{finding.id}: {finding.was} -> {finding.now}. {finding.why}"
        if finding.status == "block":
            yield problem(text, remedy=finding.remedy or None)
        elif finding.status == "warn":
            yield warning(text)


def _problems_of_sources(settings: Settings) -> Iterator[Checked]:
    """A problem of each data set that cannot be opened or read: a start names the first."""
    processor = build_processor(settings, seed=settings.seed)
    components: list[Component] = [*settings.train_dataloader.dataset]
    for loader in settings.val_dataloader.sets.values() if settings.val_dataloader else ():
        components += loader.dataset
    for component in components:
        if component.get("data_path") == NOWHERE:
            continue
        try:
            dataset = component.build(processor=processor)
            check_readable([dataset], [dataset.name])
        except UnigenError as error:
            yield from problems_of(error)


def check_model(known: Known) -> Iterator[Checked]:
    """Adds ``model``, without memory, with the files of published weights read; too small a vocabulary is refused."""
    settings = known.section("model", "lora", "tokenizer")
    if known.start is not None:
        processor, model = known.start.data.processor, known.start.meta_model
    else:  # the data has a problem, or the engine
        seed = settings.randomness.seed or 0
        processor = build_processor(settings, seed=seed)
        with torch.device("meta"):
            model = build_model(settings, processor, seed=seed)
    known.model = model
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    yield ok(f"{type(model).__name__}: {sum(p.numel() for p in model.parameters()):,} parameters, {trained:,} trained")


# ---- the first micro-batches -----------------------------------------------------------------------------------------

_SHOWN = 8


def check_batches(known: Known) -> Iterator[Checked]:
    """Adds ``batches``: samples that cannot be read, and how ranks differ."""
    settings, start, geometry = known.need("settings"), known.need("start"), known.need("loaded")
    batches = make_first_batches(settings, start, known.model, geometry, known.asked.num_batches)
    for text, number in batches.errors.most_common(_SHOWN):
        yield problem(f"{number} micro-batch(es): {text}")
    if len(batches.errors) > _SHOWN:
        yield problem(f"and {len(batches.errors) - _SHOWN} other errors")
    if batches.skipped:
        yield _skipped(batches, start.data.stream.datasets, settings.train_dataloader.max_skipped_fraction)
    if not batches.made:
        return
    known.batches = batches
    for one in batches.made:
        check_counts(one.targets, of="Batch", declared=settings.term_weights)
    seq_length = settings.train_dataloader.seq_length * geometry.batch_size
    by_rank = [[one for one in rank if one is not None] for rank in batches.of_rank]
    lines = [f"{len(batches.made):,} micro-batches of {len(by_rank)} rank(s), {_numbers(batches.made, seq_length)}"]
    order = sorted(range(len(by_rank)), key=lambda rank: sum(one.tokens for one in by_rank[rank]))
    for rank in sorted(order) if len(order) <= _SHOWN else (order[0], order[-1]):  # with the fewest and most tokens
        lines += [f"rank {rank}: {_numbers(by_rank[rank], seq_length)}"] * (len(order) > 1)
    yield ok("\n".join(lines))
    updates = [*batches.updates()]
    if len(by_rank) > 1 and updates:
        yield _imbalance(updates)


def _skipped(batches: FirstBatches, datasets: Sequence[PlannedDataset], limit: float) -> Checked:
    """Samples that padding replaces. Too many: of those that were made, or of all records, as headers show it."""
    samples = sum(one.samples for one in batches.made)
    examples = "; ".join(f"{one['sample']}: {one['why']}" for one in batches.skipped[:_SHOWN])
    text = f"{len(batches.skipped)} of {samples} samples cannot be read: {examples}"
    records, unreadable = sum(map(len, datasets)), sum(int((one.counts().unreadable > 0).sum()) for one in datasets)
    if unreadable > limit * records or exceeds(len(batches.skipped), samples, limit):
        return problem(text, allowed=f"a share of {limit:g} (train_dataloader.max_skipped_fraction)")
    return warning(text)


def _numbers(batches: Sequence[MadeBatch], seq_length: int) -> str:
    samples, tokens, images = (sum(getattr(one, name) for one in batches) for name in ("samples", "tokens", "images"))
    without = f", {sum(not one.images for one in batches)} without images" if images else ""
    share = tokens / max(seq_length * len(batches), 1)
    return f"{samples:,} samples, {tokens:,} tokens ({share:.1%} of the length), {images:,} images{without}"


def _imbalance(updates: Sequence[Sequence[Sequence[MadeBatch]]]) -> Checked:
    """How unevenly the ranks of an update are loaded."""
    mixed = sum(len({rank[k].kind for rank in update}) > 1 for update in updates for k in range(len(update[0])))
    costs = [[sum(one.flops or one.tokens for one in rank) for rank in update] for update in updates]
    waits = sum(1 - sum(ranks) / (len(ranks) * max(ranks)) for ranks in costs if max(ranks)) / len(costs)
    text = (
        f"in {mixed} of {sum(len(update[0]) for update in updates)} iterations the ranks have different kinds of"
        f" micro-batches; ranks that have less to compute wait for {waits:.1%} of the time"
    )
    more = f"{text}: packing=dict(...), or larger micro-batches, make them more equal"
    return warning(more) if waits > 0.25 else ok(text)


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
