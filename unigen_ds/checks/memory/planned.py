"""Plans the memory of a run for its engine and for the others: each is traced in a process of its own.

The processes are forked from this one, which has read the data and imported the engines: a process has one process
group, and DeepSpeed changes functions of torch.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any

from rich.console import Console as RichOutput
from rich.progress import Progress as RichBar

from unigen_ds.checks.memory.counted import in_processes
from unigen_ds.checks.memory.largest import Largest, largest_batches
from unigen_ds.checks.memory.traced import Traced, fake_group, highest, num_phases, trace
from unigen_ds.checks.resume import announced
from unigen_ds.config.backend_option import backend_spec
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.progress import Geometry
from unigen_ds.optim.optimizer import settled_precision
from unigen_ds.runner.settings.tree import Settings
from unigen_ds.runner.start.build import build_data
from unigen_ds.runner.start.stages import build_engine

ALTERNATIVES = (
    "single", "deepspeed:zero1", "deepspeed:zero2", "deepspeed:zero2_offload", "deepspeed:zero3",
    "deepspeed:zero3_offload", "fsdp:NO_SHARD", "fsdp:SHARD_GRAD_OP", "fsdp:FULL_SHARD", "fsdp:HYBRID_SHARD",
)  # fmt: skip
CHOSEN = "config"
"""What the engine of the config is called, where it has settings of its own."""
_PRELOADED = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "torch.distributed.checkpoint")


@dataclass(frozen=True)
class EnginePlan:
    """One engine's plan, or why there is none."""

    engine: str
    problem: str | None
    traced: Traced | None = None
    topology: Mapping[str, Any] | None = None
    ranks: Mapping[int, int] = field(default_factory=dict)
    """The ranks that were traced, and the highest sum of bytes of each in an update; ``traced`` is the most of them."""


@dataclass(frozen=True)
class MemoryReport:
    """All plans. The first is of the config's engine."""

    plans: Sequence[EnginePlan]
    largest: Largest
    geometry: Geometry
    precision: str
    world_size: int
    per_node: int


def plan_memory(
    config: Any, *, world_size: int, per_node: int | None = None, alternatives: bool = True, jobs: int = 2
) -> MemoryReport:
    """Plan a run of ``world_size`` processes. Raises ``ConfigError`` and ``DataError`` where a start would."""
    per_node = per_node or min(8, world_size)
    with announced(world_size, per_node=per_node):
        settings = Settings.from_config(config)
        settings = settings.with_seed(settings.randomness.seed or 0)
        settings = settings.with_precision(settled_precision(settings.optim_wrapper.precision))
        geometry = build_engine(settings)[1]
        data = build_data(settings, geometry=geometry, ruler=None)
        largest = largest_batches(data, geometry)
        preload()
        plans: dict[str, EnginePlan] = {}
        engines: dict[str, Settings] = {}
        for name in (CHOSEN, *(ALTERNATIVES if alternatives else ())):
            try:
                one = settings if name == CHOSEN else _with_engine(settings, name)
                topology = build_engine(one)[0].topology()
            except ConfigError as error:
                plans[name] = EnginePlan(name, str(error))
                continue
            if all(topology != plan.topology for plan in plans.values()):
                plans[name] = EnginePlan(name, None, topology=topology)
                engines[name] = one
        found = trace_engines(engines, data.processor, largest, geometry, jobs=jobs)
    plans |= {name: replace(plans[name], **vars(one)) for name, one in found.items()}
    precision = settings.optim_wrapper.precision
    return MemoryReport([*plans.values()], largest, geometry, precision, world_size, per_node)


def preload() -> None:
    """Import what every traced engine needs, before processes are forked."""
    for name in _PRELOADED:
        import_module(name)


def _with_engine(settings: Settings, name: str) -> Settings:
    found = Settings.from_config({**settings.given, "backend": backend_spec(name)})
    return found.with_seed(settings.seed).with_precision(settings.optim_wrapper.precision)


@dataclass(frozen=True)
class EngineTrace:
    """The fields of ``EnginePlan`` that a trace fills in."""

    problem: str | None
    traced: Traced | None
    ranks: Mapping[int, int]


def trace_engines(
    engines: Mapping[str, Settings], processor: Any, largest: Largest, geometry: Geometry, *, jobs: int
) -> dict[str, EngineTrace]:
    """Each engine on rank 0, and on the ranks that need more. ``preload`` comes before, inside ``announced``."""
    run = partial(_trace_ranks, engines, processor, largest, geometry, jobs=jobs)
    found = run([(name, 0) for name in engines])
    found |= run([(name, rank) for (name, _), (one, _) in found.items() if one is not None for rank in one.unlike])
    traces = {}
    for name in engines:
        problem = next((text for (engine, _), (_, text) in found.items() if engine == name and text is not None), None)
        ranks = {rank: one for (engine, rank), (one, _) in found.items() if engine == name and one is not None}
        steps = {rank: one.peak["step"] for rank, one in ranks.items()}
        traces[name] = EngineTrace(problem, None if problem else highest([*ranks.values()]), steps)
    return traces


def _trace_ranks(
    engines: Mapping[str, Settings],
    processor: Any,
    largest: Largest,
    geometry: Geometry,
    ranks: Iterable[tuple[str, int]],
    *,
    jobs: int,
) -> dict[tuple[str, int], tuple[Traced | None, str | None]]:
    """By (engine, rank): what was traced, or why it could not be."""
    ranks = [*ranks]
    each = max(1, jobs // max(1, len(ranks)))
    ended = multiprocessing.get_context("fork").Value("i", 0)  # of all processes together

    def phase_ended() -> None:
        with ended:
            ended.value += 1

    tasks = {
        (name, rank): partial(
            _traced, engines[name], processor, largest, geometry, rank, jobs=each, phase_ended=phase_ended
        )
        for name, rank in ranks
    }
    console = RichOutput(stderr=True)
    with RichBar(console=console, auto_refresh=False, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("planning", total=len(ranks) * num_phases(largest.batches))
        found = in_processes(
            tasks, jobs=jobs, waiting_for=lambda: bar.update(task, completed=ended.value, refresh=True)
        )
    return {key: (None if problem else Traced(**value), problem) for key, (value, problem) in found.items()}


def _traced(
    settings: Settings,
    processor: Any,
    largest: Largest,
    geometry: Geometry,
    rank: int,
    *,
    jobs: int,
    phase_ended: Callable[[], None],
) -> dict[str, Any]:
    backend, _ = build_engine(settings)
    with fake_group(geometry.dp_size, rank=rank):
        traced = trace(
            settings, backend, processor, largest.batches, geometry=geometry, jobs=jobs, phase_ended=phase_ended
        )
        return asdict(traced)
