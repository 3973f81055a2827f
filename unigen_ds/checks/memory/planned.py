"""Plans the memory of a run for its engine and for the others: each is traced in a process of its own, on the
micro-batches of the real data that need the most.

The processes are forked from this one, which has read the data and imported the engines: a process has one process
group, and DeepSpeed changes functions of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from itertools import islice
from typing import Any

import numpy as np
from rich.console import Console as RichOutput
from rich.progress import Progress as RichBar

from unigen_ds.checks.memory.counted import in_processes
from unigen_ds.checks.memory.traced import Traced, fake_group, highest, trace
from unigen_ds.checks.resume import as_launched
from unigen_ds.config.backend_option import backend_spec
from unigen_ds.core.batch import Batch
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.progress import Geometry
from unigen_ds.data.batches.loader import collate
from unigen_ds.data.batches.stream import Row, SequenceStream
from unigen_ds.data.datasets.dataset import planned_tokens
from unigen_ds.data.samples.sample import unit_tokens
from unigen_ds.optim.optimizer import settled_precision
from unigen_ds.runner.settings.tree import Settings
from unigen_ds.runner.start.build import Data, build_data
from unigen_ds.runner.start.stages import build_engine

ALTERNATIVES = (
    "single", "deepspeed:zero1", "deepspeed:zero2", "deepspeed:zero2_offload", "deepspeed:zero3",
    "deepspeed:zero3_offload", "fsdp:NO_SHARD", "fsdp:SHARD_GRAD_OP", "fsdp:FULL_SHARD", "fsdp:HYBRID_SHARD",
)  # fmt: skip
CHOSEN = "config"
"""What the engine of the config is called, where it has settings of its own."""
_PRELOADED = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "torch.distributed.checkpoint")


MOST_SEQUENCES = 100_000
"""Sequences that are looked at."""


@dataclass(frozen=True)
class Largest:
    """The micro-batches with the most tokens, the most text targets (each has logits) and the most images."""

    batches: tuple[Batch, ...]
    """Different ones, that with the most tokens first."""
    tokens: int
    """Of the longest micro-batch, as planned."""
    sequences: int
    """How many were looked at, from the first on."""
    per_epoch: int

    @property
    def text(self) -> str:
        share = "all" if self.sequences >= self.per_epoch else f"the first {self.sequences:,} of {self.per_epoch:,}"
        return f"largest micro-batch: {self.tokens:,} tokens (of {share} sequences of the first epoch)"


def largest_batches(data: Data, geometry: Geometry, *, most: int = MOST_SEQUENCES) -> Largest:
    """Look at the micro-batches of all ranks in the first epoch. Reads only the samples of those it returns."""
    stream, step = data.stream, geometry.sequences_per_iteration
    number = max(min(most, stream.sequences_per_epoch) // step, 1) * step
    rows = [row for row, _ in islice(stream.rows(), number)]
    sizes = np.array([_size(row, stream) for row in rows])
    members = np.arange(number).reshape(-1, geometry.batch_size, geometry.dp_size).swapaxes(1, 2)
    members = members.reshape(-1, geometry.batch_size)  # the sequences of each micro-batch
    totals = sizes[members].sum(axis=1)
    chosen = dict.fromkeys(int(totals[:, measure].argmax()) for measure in range(totals.shape[1]))
    batches = tuple(
        collate([rows[i] for i in members[one]], stream.sources, data.processor, seq_length=stream.sample_length,
                names=stream.names)
        for one in chosen
    )  # fmt: skip
    return Largest(batches, int(totals[:, 0].max()), number, stream.sequences_per_epoch)


def _size(row: Row, stream: SequenceStream) -> tuple[int, int, int]:
    """(tokens, text targets, images) of a sequence, as planned; of a streamed source the tokens alone are known."""
    tokens = targets = images = 0
    for draw in row:
        source = stream.sources[draw.source]
        tokens += unit_tokens(planned_tokens(source, draw.index), draw.piece, stream.sample_length)
        if not stream.walks:
            counts = source.counts()
            targets += int(counts.text_targets[draw.index])
            images += int(counts.images[draw.index])
    return tokens, targets, images


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
    with as_launched(world_size, per_node=per_node):
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
                one = settings
                if name != CHOSEN:
                    one = Settings.from_config({**settings.given, "backend": backend_spec(name)})
                    one = one.with_seed(settings.seed).with_precision(settings.optim_wrapper.precision)
                topology = build_engine(one)[0].topology()
            except ConfigError as error:
                plans[name] = EnginePlan(name, str(error))
                continue
            if all(topology != plan.topology for plan in plans.values()):
                plans[name] = EnginePlan(name, None, topology=topology)
                engines[name] = one
        traces = trace_engines(engines, data.processor, largest, geometry, jobs=jobs)
    plans |= {name: replace(plan, topology=plans[name].topology) for name, plan in traces.items()}
    precision = settings.optim_wrapper.precision
    return MemoryReport([*plans.values()], largest, geometry, precision, world_size, per_node)


def preload() -> None:
    """Import what every traced engine needs, before processes are forked."""
    for name in _PRELOADED:
        import_module(name)


def trace_engines(
    engines: Mapping[str, Settings], processor: Any, largest: Largest, geometry: Geometry, *, jobs: int
) -> dict[str, EnginePlan]:
    """Each engine on rank 0, and on the ranks that need more. ``preload`` comes before, inside ``announced``."""
    run = partial(_trace_ranks, engines, processor, largest, geometry, jobs=jobs)
    outcomes = run([(name, 0) for name in engines])
    outcomes |= run(
        [(name, rank) for (name, _), (one, _) in outcomes.items() if one is not None for rank in one.unlike]
    )
    plans = {}
    for name in engines:
        of_engine = {rank: outcome for (engine, rank), outcome in outcomes.items() if engine == name}
        problem = next((problem for _, problem in of_engine.values() if problem is not None), None)
        ranks = {rank: traced for rank, (traced, _) in of_engine.items() if traced is not None}
        steps = {rank: traced.peak["step"] for rank, traced in ranks.items()}
        plans[name] = EnginePlan(name, problem, None if problem else highest([*ranks.values()]), ranks=steps)
    return plans


def _trace_ranks(
    engines: Mapping[str, Settings],
    processor: Any,
    largest: Largest,
    geometry: Geometry,
    ranks: Sequence[tuple[str, int]],
    *,
    jobs: int,
) -> dict[tuple[str, int], tuple[Traced | None, str | None]]:
    """By (engine, rank): what was traced, or why it could not be."""

    def trace_rank(name: str, rank: int) -> Traced:
        backend, _ = build_engine(engines[name])
        with fake_group(geometry.dp_size, rank=rank):
            return trace(engines[name], backend, processor, largest.batches, geometry=geometry)

    console = RichOutput(stderr=True)
    with RichBar(console=console, auto_refresh=False, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("planning", total=len(ranks))
        tasks = {(name, rank): partial(trace_rank, name, rank) for name, rank in ranks}
        return in_processes(tasks, jobs=jobs, ended=lambda number: bar.update(task, completed=number, refresh=True))
