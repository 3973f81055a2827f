"""The checks of a dry run, in their order, and what runs them: ``Options`` in, a list of results out.

It starts no training, and writes and locks nothing of the run. In a job of several processes rank 0 makes all checks,
on its machine. A check is a function of what is ``Known`` that returns its results: it calls a stage of the start
(``runner/start/stages.py``), adds the result to ``Known``, asks with ``need`` for what it cannot do without, and may
raise: every error is one more problem of the list. A new check is a function here, or in a module of its own, and a row
of ``CHECKS``; one of a user's own is registered in ``DRY_RUN_CHECKS``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

from unigen_ds.checkpoint.home import same
from unigen_ds.checks.dry_run.batches import check_batches, check_collectives
from unigen_ds.checks.dry_run.known import Checked, Known, Options, not_checked, ok, problem, results_of, warning
from unigen_ds.checks.dry_run.this_machine import check_devices, check_folders, check_job, check_paths
from unigen_ds.checks.resume import as_launched
from unigen_ds.config.registry import DRY_RUN_CHECKS
from unigen_ds.core.choices import AUTO
from unigen_ds.core.errors import ConfigError
from unigen_ds.data.batches.statistics import start_lines
from unigen_ds.hooks.save.best import MetricHook
from unigen_ds.optim.optimizer import AUTO_PRECISION
from unigen_ds.resume.plan import NOT_RESUMED
from unigen_ds.runner.settings.naming import name_and_folder
from unigen_ds.runner.settings.tree import Settings, read_config
from unigen_ds.runner.start.build import build_hooks, check_states
from unigen_ds.runner.start.stages import build_engine, plan_start, read_start, run_checklist, settle
from unigen_ds.tracking.settings import Visualizer

Check = Callable[[Known], Iterable[Checked]]


def check_config(known: Known) -> Iterator[Checked]:
    """Adds ``settings``."""
    settings = Settings.from_config(known.config)
    known.settings = settings.with_resume(AUTO) if known.options.resume_auto else settings
    yield ok(f"{known.options.config}: every key and value")


def check_backend(known: Known) -> Iterator[Checked]:
    """Adds ``backend`` and ``geometry``: versions, precision and the split of the batch."""
    settings, hardware = known.need("settings"), known.hardware
    if hardware.count and not hardware.bf16:
        if settings.optim_wrapper.precision == "bf16":
            yield problem(
                f"precision is 'bf16', which {hardware.name} cannot compute",
                allowed="bf16 on a device of compute capability 8.0 or more",
                remedy="optim_wrapper.precision='fp16', 'fp32', or 'auto'",
            )
        if settings.optim_wrapper.precision == AUTO_PRECISION:
            settings = known.settings = settings.with_choices(seed=settings.randomness.seed, precision="fp16")
    known.backend, known.geometry = build_engine(settings)
    engine = known.backend.topology()["engine"]
    yield ok(f"{engine}, {settings.optim_wrapper.precision}; {known.geometry} sequences per update")
    if hardware.count and "RANK" in os.environ and known.per_node > hardware.count:
        yield problem(
            f"{known.per_node} processes are on a machine with {hardware.count} CUDA devices",
            remedy=f"start at most {hardware.count} processes on a machine, one for each device",
        )


def check_trackers(known: Known) -> Iterator[Checked]:
    """Packages and keys of log writers; no server is asked."""
    for component in Visualizer.parse(known.config.values.get("visualizer") or {}).vis_backends:
        writer = component.build()
        errors = [*getattr(writer, "lacks", list)()]
        yield from (result for error in errors for result in results_of(error))
        if not errors:
            yield ok(f"{component.name}: installed, and with a key where it needs one; its server was not asked")


def check_hooks(known: Known) -> Iterator[Checked]:
    """All hooks can be built, and their states can be stored."""
    hooks = known.hooks = build_hooks(known.need("settings"))
    check_states(hooks)
    yield ok(", ".join(hook.name or type(hook).__name__ for hook in hooks))


def check_start(known: Known) -> Iterator[Checked]:
    """Adds ``start``: the checkpoint to begin with, the checklist of a resume, and all data sets."""
    settings, backend, geometry = known.need("settings"), known.need("backend"), known.need("geometry")
    settings = settings.with_name(*name_and_folder(settings, geometry))
    plan = plan_start(settings, hashes=False)
    yield from (warning(message) for message in plan.messages if message.startswith(NOT_RESUMED))
    if settings.work_dir and not same(settings.folder, settings.checkpoints):
        yield ok(f"checkpoints in {settings.checkpoints}")
    settings, geometry = settle(settings, plan, backend=backend, geometry=geometry)
    known.settings, known.geometry = settings, geometry
    start = known.start = read_start(settings, plan, geometry=geometry)
    if plan.mode == "resume":
        yield ok(f"resumes from {plan.checkpoint} (its files' sizes were compared, not their content)")
        for finding in run_checklist(start, plan, backend=backend, hashed=False):
            text = f"{finding.id}: {finding.was} -> {finding.now}. {finding.why}"
            if finding.status == "block":
                yield problem(text, remedy=finding.remedy or None)
            elif finding.status == "warn":
                yield warning(text)
    else:
        yield ok("a new run" + (f" with the weights of {plan.checkpoint}" if plan.checkpoint else ""))
    for source in start.data.skipped_sources:
        yield warning(f"data set {source.name} is skipped (on_error='skip'): {source.why}")
    stream = start.data.stream
    yield from (warning(line) for warns, line in start_lines(stream) if warns)
    yield ok(
        f"{sum(map(len, stream.datasets)):,} records of {len(stream.names)} data set(s),"
        f" {stream.sequences_per_epoch:,} sequences an epoch"
    )


def check_model(known: Known) -> Iterator[Checked]:
    """Adds ``model``, without memory, with the files of published weights read; too small a vocabulary is refused, and
    so is a metric to follow that no evaluation of this model has."""
    model = known.model = known.need("start").meta_model
    number = sum(p.numel() for p in model.parameters() if p.requires_grad)
    yield ok(f"{type(model).__name__}: {sum(p.numel() for p in model.parameters()):,} parameters, {number:,} trained")
    run: Any = SimpleNamespace(
        hooks=known.hooks, validation=known.need("start").data.validation, backend=SimpleNamespace(model=model)
    )
    for hook in known.hooks:
        if isinstance(hook, MetricHook):
            hook.evaluation(run)


def check_schedule(known: Known) -> Iterator[Checked]:
    """The parameter groups, the curves of their learning rates, and the model's positions for the longest sample."""
    start, model = known.need("start"), known.need("model")
    start.check_positions(model)
    groups, _, schedules = start.optimization([*model.named_parameters(remove_duplicate=False)])
    yield ok(f"{len(groups)} parameter group(s), {len(schedules.curves)} curve(s) of the learning rate")


CHECKS: dict[str, Check] = {
    "devices": check_devices,
    "job": check_job,
    "config": check_config,
    "paths": check_paths,
    "folders": check_folders,
    "engine": check_backend,
    "trackers": check_trackers,
    "hooks": check_hooks,
    "start": check_start,
    "model": check_model,
    "schedule": check_schedule,
    "batches": check_batches,
    "collectives": check_collectives,
}
"""Name -> check, in the order in which they run."""
BEFORE_CONFIG = ("devices", "job")
"""Checks after which the number of processes is known, for which the config is checked."""


def dry_run(options: Options) -> list[Checked]:
    """All results. Raises ``ConfigError`` for a config that cannot be read and a check that there is not."""
    known = Known(options, read_config(options.config, options.overrides))
    with mock.patch.dict(os.environ):  # checks set variables
        results = [*_results(known, CHECKS, BEFORE_CONFIG)]
        with as_launched(known.world_size, per_node=known.per_node):
            results += _results(known, CHECKS, ["config"])
            own = DRY_RUN_CHECKS.module_dict  # with those of the modules that the config imports
            if both := sorted(own.keys() & CHECKS.keys()):
                remedy = "register_module(name='...')"
                raise ConfigError(f"DRY_RUN_CHECKS has {', '.join(both)}, a name in use", remedy=remedy)
            checks = {**CHECKS, **own}
            if unknown := [name for name in options.skip if name not in checks]:
                raise ConfigError(f"--skip {unknown[0]}", allowed=", ".join(checks))
            results += _results(known, checks, [name for name in checks if name not in (*BEFORE_CONFIG, "config")])
    return results


def _results(known: Known, checks: Mapping[str, Check], names: Iterable[str]) -> Iterator[Checked]:
    """Results of the checks ``names``. Whatever a check raises is one of them."""
    for name in names:
        results: list[Checked] = []
        try:
            if name in known.options.skip:
                results.append(not_checked("left out (--skip)"))
            else:
                for result in checks[name](known):
                    results.append(result)  # also of a check that raises later
        except Exception as error:  # of a user's own class, too: the other checks continue
            results += results_of(error)
        yield from (replace(result, check=name) for result in results)


def lines(results: Sequence[Checked], *, title: str) -> Iterator[str]:
    """The results as lines of text: a title, each result, and how many problems there are."""
    yield title
    width = max(len(result.check) for result in results)
    for result in results:
        first, *rest = result.text.splitlines()
        yield f"{result.status:<11}  {result.check:<{width}}  {first}"
        yield from (" " * (15 + width) + line for line in rest)
    number = Counter(result.status for result in results)
    yield (
        f"{number['problem']} problem(s), {number['warning']} warning(s), {number['not checked']} not checked."
        " The work dir is as it was."
    )
