"""All stages of a start, over all processes: a config -> ``Parts``, everything that the loop uses.

What can be refused from files alone (keys, geometry, checkpoint, data) is refused before processes join and before the
model is built. The random generators are seeded just before the model is built, so initial weights depend on the seed
and on nothing that was built earlier.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from unigen_ds.backends.base import Backend
from unigen_ds.backends.memory import on_meta
from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.foreign import read_foreign
from unigen_ds.checkpoint.layouts.safetensors import open_reader, open_shards, restore_rng
from unigen_ds.checkpoint.manifest import current_versions
from unigen_ds.checkpoint.partial import DIFFERENCES, REPORT_FILE, FittedReader, fit
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.json_values import by_name, dotted_name, json_values, leaves
from unigen_ds.core.progress import Geometry
from unigen_ds.core.shards import ShardReader, first_names
from unigen_ds.data.batches.loader import UpdateLoader
from unigen_ds.data.batches.statistics import start_lines
from unigen_ds.data.order.order import Cursor
from unigen_ds.hooks.base import GoBack, Hook
from unigen_ds.resume.finding import Finding, model_findings, other_model, other_sizes, refuse
from unigen_ds.resume.plan import NOT_RESUMED, ResumePlan
from unigen_ds.runner.settings.environment import apply_environment, apply_variables
from unigen_ds.runner.settings.naming import PLACE, name_and_folder
from unigen_ds.runner.settings.tree import Settings
from unigen_ds.runner.start import build, stages
from unigen_ds.runner.start.log_lines import memory_line, model_line, run_line, schedule_line
from unigen_ds.runner.start.stages import Start
from unigen_ds.schedule.schedule import Schedules
from unigen_ds.system import dist, log, rank_errors
from unigen_ds.system.files import write_text_atomic
from unigen_ds.system.log import logger
from unigen_ds.system.machine import source_digest
from unigen_ds.system.seeding import derive_seed, seed_everything


@dataclass(frozen=True)
class Parts:
    settings: Settings
    plan: ResumePlan
    start: Start
    findings: Sequence[Finding]
    """Findings of the resume's checklist; on rank 0 alone."""
    hooks: Sequence[Hook]
    backend: Backend
    geometry: Geometry
    schedules: Schedules
    parameters: list[dict[str, Any]]
    plain_config: dict[str, Any]
    loader: UpdateLoader
    loader_at: Callable[[Geometry, Cursor], UpdateLoader]
    """Makes another loader of this rank, without workers: to read data again."""
    max_updates: int | None
    began: float
    """When they were begun, of ``time.perf_counter``."""


def build_parts(config: Any, *, max_updates: int | None = None) -> Parts:
    """Build everything. Raises ``ConfigError``, ``DataError``, ``CheckpointError`` or ``ResumeBlocked``."""
    began = time.perf_counter()
    settings = Settings.from_config(config)
    apply_variables(settings.env)
    dist.launcher_environment(settings.launcher)
    backend, geometry = stages.build_engine(settings)
    plan, start, findings, hooks = _begin(settings, backend, geometry, max_updates)
    settings, data, geometry = start.settings, start.data, start.geometry
    agree_on_data(settings, data, total_sequences=start.total_sequences)
    logger = log.logger()
    if dist.is_main():
        for warns, line in start_lines(data.stream):
            logger.log(WARNING if warns else INFO, line)
        for line in data.validation.start_lines():
            logger.info(line)
        logger.info("Effective batch: %s sequences per update; %d per epoch.",
                    geometry, start.ruler.sequences_per_epoch)  # fmt: skip
    seed_everything(settings.seed, rank=dist.rank())
    model: Any = build.build_model(settings, data.processor, seed=settings.seed, stream=True)
    start.check_positions(model)
    initial = model.initial_weights(seed=settings.seed) if on_meta(model) else None
    named_parameters = [*model.named_parameters(remove_duplicate=False)]  # tied ones under every name
    logger.info(model_line(settings.model.name, named_parameters))
    groups, parameters, schedules = start.optimization(named_parameters)
    build.prepare_engine(settings, backend, model, groups)
    if initial is not None and (plan.mode != "resume" or backend.left_out):  # all else is in the checkpoint
        backend.load_tensors(initial, weights_only=True)
    seed_everything(settings.seed, rank=dist.rank())
    logger.info(memory_line(backend))
    logger.info(schedule_line(start, schedules, hooks, max_updates=max_updates))
    return Parts(
        settings=settings,
        plan=plan,
        start=start,
        findings=findings,
        hooks=hooks,
        backend=backend,
        geometry=geometry,
        schedules=schedules,
        parameters=parameters,
        plain_config=stages.plain_config(settings, model=model),
        max_updates=max_updates,
        began=began,
        **_loaders(start, backend, geometry),
    )


def parts_after(back: GoBack, parts: Parts, model: Any) -> Parts:
    """The parts of a run that goes back to a checkpoint: all is new and checked but engine and model. Collective."""
    began, backend, geometry = time.perf_counter(), parts.backend, parts.geometry
    settings = parts.settings.going_back(back.checkpoint, back.skip)
    plan, start, findings, hooks = _begin(settings, backend, geometry, parts.max_updates)
    build.connect(model, start.data.processor)
    stages: dict[str, Any] = {"plan": plan, "start": start, "findings": findings, "hooks": hooks}
    return replace(parts, settings=start.settings, began=began, **stages, **_loaders(start, backend, geometry))


def _loaders(start: Start, backend: Backend, geometry: Geometry) -> dict[str, Any]:
    """The parts that read data; and a line for sequences that they leave out."""
    load = partial(build.build_loader, start.settings.train_dataloader, start.data, dp_rank=backend.dp_rank)
    if skips := start.data.stream.skips:
        texts = ", ".join(f"{skip} ({skip.why})" for skip in skips)
        number = sum(skip.stop - skip.first for skip in skips)
        log.logger().info("Left out: %d sequences, %s. They count in the position of the run.", number, texts)
    return {
        "loader": load(geometry=geometry, cursor=start.cursor),
        "loader_at": lambda geometry, cursor: load(geometry=geometry, cursor=cursor, workers=False),
    }


def _begin(
    settings: Settings, backend: Backend, geometry: Geometry, max_updates: int | None
) -> tuple[ResumePlan, Start, Sequence[Finding], list[Hook]]:
    """Rank 0 reads the files and, on a resume, runs the checklist; then the processes join, and each reads the data."""
    joined, own_folder = dist.is_joined(), PLACE in (settings.work_dir or "")
    outcome: tuple[ResumePlan, Start | None, list[Finding]] | None = None
    hooks: list[Hook] = []
    if joined:
        settings = settings.with_name(*dist.on_main(lambda: name_and_folder(settings, geometry)))
    else:
        dist.check_port()
        dist.open_store(timeout_s=settings.env.dist_timeout_s)
        if dist.env_rank() == 0:
            settings = settings.with_name(*name_and_folder(settings, geometry))
            hooks = build.build_hooks(settings)  # what they refuse is refused before data is read
            outcome = _plan(settings, backend, geometry)
    hooks = hooks or build.build_hooks(settings)
    apply_environment(settings.env)
    rank_errors.arrive(timeout_s=settings.env.dist_timeout_s)
    dist.init(timeout_s=settings.env.dist_timeout_s)
    check_settings(settings, max_updates=max_updates)
    if own_folder and not joined:  # all ranks use the one that rank 0 has named
        settings = settings.with_name(*dist.broadcast_object((settings.run_name, settings.work_dir)))
    log.setup(rank=dist.rank(), log_file=settings.folder / "train.log", level=settings.env.log_level)
    if joined:
        values: list[Any] = []
        dist.on_main(lambda: values.append(_plan(settings, backend, geometry)))
        outcome = values[0] if values else None
    plan: ResumePlan = dist.on_main(lambda: outcome[0])  # type: ignore[index]  # rank 0 has one
    _, start, findings = outcome or (plan, None, ())
    if start is None:
        settings, geometry = stages.settle(settings, plan, backend=backend, geometry=geometry)
        start = stages.read_start(settings, plan, geometry=geometry)
    return plan, start, findings, hooks


def _plan(settings: Settings, backend: Backend, geometry: Geometry) -> tuple[ResumePlan, Start | None, list[Finding]]:
    """Set up the log, and make the plan and, on a resume, the start and the checklist. On rank 0."""
    file, level = settings.folder / "train.log", settings.env.log_level
    logger = log.setup(rank=dist.env_rank(), log_file=file, level=level, new_start=True)
    if not dist.is_joined():
        logger.info(run_line(settings))
    plan = stages.plan_start(settings)
    for message in plan.messages:
        logger.log(WARNING if message.startswith(NOT_RESUMED) else INFO, message)  # updates are lost
    if plan.mode != "resume":
        return plan, None, []
    settings, geometry = stages.settle(settings, plan, backend=backend, geometry=geometry)
    start = stages.read_start(settings, plan, geometry=geometry)
    findings = stages.run_checklist(start, plan, backend=backend)
    for finding in findings:
        if finding.status == "warn":
            logger.warning("Checklist, %s: %s -> %s. %s", finding.id, finding.was, finding.now, finding.why)
    number = sum(finding.status == "ok" for finding in findings)
    logger.info("Checklist: %d of %d points are as they were or harmless (tools/resume.py shows all).",
                number, len(findings))  # fmt: skip
    refuse(findings)
    return plan, start, findings


# What must be equal on all ranks: a rank with other values would train something else, or wait for ever. Paths on the
# disks of a node may differ; what is found there may not. So may what only rank 0 uses, and how a process computes.

_OWN = (
    "work_dir", "checkpoint_dir", "launcher", "visualizer", "env.num_threads", "env.cuda_allocator",
    "env.tokenizers_parallelism", "env.peak_tflops", "env.log_level",
)  # fmt: skip
_OWN_LAST = ("cache_dir", "num_workers", "index_workers", "prefetch_factor", "pin_memory")
_NAMED_ABOVE = ("names", "sizes", "digests", "records", "units")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".json")


class RanksDiffer(ConfigError):
    """Ranks have other settings, data, versions or code."""

    everywhere = True


def check_settings(settings: Settings, *, max_updates: int | None) -> None:
    """Raise ``RanksDiffer`` on all ranks where one has other settings, packages or code. Collective."""
    if dist.world_size() == 1:
        return
    facts: dict[str, Any] = {}
    for leaf, value in leaves(json_values(Settings.complete(settings.config), by_name)):
        key = dotted_name(leaf)
        if not (key.startswith(_OWN) or key.endswith(_OWN_LAST) or _is_local(value)):
            facts[key] = value
        elif key == "backend.config" and Path(value).is_file():
            facts[key] = Path(value).read_text(encoding="utf-8", errors="replace")
    for name in settings.custom_imports.imports:  # modules that register a user's own classes; of a package all files
        path = getattr(sys.modules.get(name), "__file__", None)
        facts[f"code of {name}"] = None if path is None else source_digest(Path(path))
    facts |= {f"version of {name}": version for name, version in current_versions().items()}
    _compare({**facts, "max_updates": max_updates, "code of unigen_ds": source_digest()})


def agree_on_data(settings: Settings, data: build.Data, *, total_sequences: float) -> None:
    """The same for the data that each rank has read, and for the files of published weights. Collective."""
    if dist.world_size() == 1:
        return
    facts: dict[str, Any] = {"total_sequences": total_sequences}
    for part in data.parts:
        kind = "data" if part is data.stream else "validation data"
        for name, dataset in zip(part.names, part.datasets, strict=True):
            facts[f"{kind} {name}: records"] = len(dataset)
            facts[f"{kind} {name}: fingerprint"] = dataset.fingerprint
    identity = data.stream.identity
    order = {key: value for key, value in identity["facts"].items() if key not in _NAMED_ABOVE}
    facts |= {dotted_name(leaf): value for leaf, value in leaves({"order": order, "phases": identity["phases"]})}
    for leaf, value in leaves({"pretrained": build.locate_pretrained(settings.model).get("pretrained")}):
        if isinstance(value, str):  # names and sizes: to read all weights would need minutes
            path = Path(value).expanduser()
            files = [path] if path.is_file() else sorted(path.rglob("*"))
            sizes = {str(file.relative_to(path)): file.stat().st_size for file in files if file.suffix in _WEIGHTS}
            value = {name: size for name, size in sizes.items() if not name.startswith(".cache")}
        facts[f"model.{dotted_name(leaf)}: files"] = value
    _compare(facts)


def _compare(own: Mapping[str, Any]) -> None:
    texts = {key: json.dumps(value, sort_keys=True, default=str) for key, value in own.items()}
    digest = hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()
    if len({*dist.gather_objects(digest)}) == 1:
        return
    ranks = dist.gather_objects(texts)
    everywhere = set.intersection(*map(set, ranks))
    lines = []
    for key in sorted({key for one in ranks for key in one}, key=lambda key: (key not in everywhere, key)):
        having: dict[str, list[str]] = defaultdict(list)
        for rank, one in enumerate(ranks):
            having[one.get(key, "not there")].append(str(rank))
        if len(having) > 1:
            values = (f"rank {', '.join(of_text[:8])}: {text[:80]}" for text, of_text in having.items())
            lines.append(f"{key}: {'; '.join(values)}")
    raise RanksDiffer(
        "the processes differ:\n  " + first_names(lines, "\n  "),
        remedy="start all of them with the same config, files, packages and code",
    )


def _is_local(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(map(_is_local, value))
    return isinstance(value, str) and value.startswith(("/", "~", "./", "../"))


# ---- the state that a run begins with --------------------------------------------------------------------------------


def restore(parts: Parts, hooks: Sequence[Hook], *, home: Path) -> dict[str, Any] | None:
    """Load what the plan names: weights; on a resume also moments, hook states and, last, the random generators.

    Returns the argument of ``after_load_checkpoint``, or None. Raises ``CheckpointError`` or ``ResumeBlocked``.
    """
    checkpoint, manifest = parts.plan.checkpoint, parts.start.manifest
    if checkpoint is None:
        return None
    if parts.plan.manifest is not None:
        reader: ShardReader = open_reader(checkpoint, parts.plan.manifest)
        table, stored_config = parts.plan.manifest.parameters, parts.plan.manifest.config
    else:
        foreign = read_foreign(checkpoint)
        reader, table, stored_config = foreign.reader, foreign.parameters, {"model": foreign.sizes}
    if manifest is None:
        fit_weights(parts, reader, table, stored_config)
        return None
    refuse(model_findings(manifest, parameters=parts.parameters, config=parts.plain_config))
    parts.backend.load_tensors(reader, keep=parts.backend.left_out)
    states, readers = store.read_hook_states(checkpoint, manifest), open_shards(checkpoint, manifest)
    for hook in hooks:
        if hook.name in states:
            hook.load_state_dict(states[hook.name])
        hook.load_shards(readers)
    if names := sorted(set(states) - {hook.name for hook in hooks}):
        logger().warning("State of hooks that this config does not have is dropped: %s.", ", ".join(names))
    if not restore_rng(checkpoint, manifest):
        seed = derive_seed(parts.settings.seed, "resume", manifest.progress.updates)
        seed_everything(seed, rank=dist.rank())
        logger().warning("The checkpoint is of another number of processes: network dropout is seeded anew.")
    lineage = parts.plan.lineage
    assert lineage is not None, "planned with a resume"
    lineage = replace(lineage, skips=parts.start.data.stream.skips)
    dist.on_main(lambda: store.continue_from(home, checkpoint, lineage))
    findings = [asdict(finding) for finding in parts.findings]
    return {**manifest.state_dict(), "path": str(checkpoint), "findings": findings}


def fit_weights(
    parts: Parts, reader: ShardReader, table: Sequence[Mapping[str, Any]], stored_config: Mapping[str, Any]
) -> None:
    """Weights for another model, as ``load_cfg`` allows: differences are in ``load_report.json``, or refused."""
    sizes = other_sizes(stored_config, parts.plain_config, hidden=True)
    cfg, report_file = parts.plan.load_cfg, parts.settings.folder / REPORT_FILE
    base = parts.backend.left_out
    if parts.settings.lora is not None and (parts.plan.manifest is None or not parts.plan.manifest.config.get("lora")):
        raise ConfigError(
            f"load_from is {parts.plan.checkpoint}, which has no adapters, and lora is set",
            remedy="adapters need a published directory: tools/export.py CHECKPOINT DIR, then model.pretrained='DIR'",
        )
    table, own = ([row for row in rows if row["name"] not in base] for rows in (table, parts.parameters))
    buffers = {name: buffer.numel() for name, buffer in parts.backend.buffers().items() if name not in base}
    match = fit(reader, table, parameters=own, buffers=buffers, cfg=cfg, sizes=sizes)
    report = {"checkpoint": str(parts.plan.checkpoint), **match.state_dict()}
    dist.on_main(lambda: write_text_atomic(report_file, json.dumps(report, indent=1) + "\n"))
    match.check(cfg, first=other_model(stored_config, parts.plain_config))
    if dist.is_main():
        for kind, line in match.lines():
            logger().log(WARNING if kind in DIFFERENCES else INFO, "Weights: %s.", line)
        numbers = len(match.sources), len(match.initial_names)
        logger().info("Weights: %d tensors are the checkpoint's, %d stay as initialised. What differs: %s.",
                      *numbers, report_file)  # fmt: skip
    parts.backend.load_tensors(FittedReader(reader, match), weights_only=True, keep={*match.initial_names, *base})
    logger().info("Loaded weights only from %s; progress starts at zero.", parts.plan.checkpoint)
