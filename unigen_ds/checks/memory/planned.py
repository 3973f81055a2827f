"""Plans the memory of a run for its engine and for the others: each is traced in a process of its own, on the
micro-batches of the real data that need the most.

The processes are forked from this one, which has read the data and imported the engines: a process has one process
group, and DeepSpeed changes functions of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from itertools import islice
from typing import Any

import numpy as np
import torch
from rich.console import Console as RichOutput
from rich.progress import track

from unigen_ds.checks.memory.counted import Outcome, in_processes
from unigen_ds.checks.memory.traced import PHASES, RankMemory, fake_group, highest, trace
from unigen_ds.checks.resume import as_launched
from unigen_ds.config.overrides import backend_spec
from unigen_ds.core.batch import Batch
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.progress import Geometry
from unigen_ds.data.batches.loader import collate
from unigen_ds.data.batches.stream import PackedRow, SequenceStream
from unigen_ds.data.datasets.dataset import planned_tokens
from unigen_ds.data.samples.sample import unit_tokens
from unigen_ds.optim.optimizer import settled_precision
from unigen_ds.runner.settings.tree import Settings
from unigen_ds.runner.start.build import Data, build_model
from unigen_ds.runner.start.stages import build_engine, continue_data
from unigen_ds.system.machine import num_cores

ALTERNATIVES = (
    "single", "deepspeed:zero1", "deepspeed:zero2", "deepspeed:zero2_offload", "deepspeed:zero3",
    "deepspeed:zero3_offload", "fsdp:NO_SHARD", "fsdp:SHARD_GRAD_OP", "fsdp:FULL_SHARD", "fsdp:HYBRID_SHARD",
)  # fmt: skip
CONFIG_ENGINE = "config"
"""What the engine of the config is called, where it has settings of its own."""
GIB = 2**30


@dataclass(frozen=True)
class Largest:
    """The micro-batches with the most tokens, the most text targets (each has logits) and the most images."""

    batches: tuple[Batch, ...]
    """Different ones, that with the most tokens first."""
    tokens: int
    """Tokens of the longest micro-batch, as planned."""
    sequences: int
    """How many were looked at, from the first on."""
    per_epoch: int


def largest_batches(data: Data, geometry: Geometry, *, most: int = 100_000) -> Largest:
    """Look at ``most`` sequences of the first epoch, of all ranks. Reads only the samples of those it returns."""
    stream, step = data.stream, geometry.sequences_per_iteration
    number = max(min(most, stream.sequences_per_epoch) // step, 1) * step
    rows = [row for row, _ in islice(stream.rows(), number)]
    sizes = np.array([_size(row, stream) for row in rows])
    members = np.arange(number).reshape(-1, geometry.batch_size, geometry.dp_size).swapaxes(1, 2)
    members = members.reshape(-1, geometry.batch_size)  # the sequences of each micro-batch
    totals = sizes[members].sum(axis=1)
    indices = dict.fromkeys(int(totals[:, measure].argmax()) for measure in range(totals.shape[1]))
    batches = tuple(
        collate([rows[i] for i in members[one]], stream.sources, data.processor, seq_length=stream.sample_length,
                names=stream.names)
        for one in indices
    )  # fmt: skip
    return Largest(batches, int(totals[:, 0].max()), number, stream.sequences_per_epoch)


def _size(row: PackedRow, stream: SequenceStream) -> tuple[int, int, int]:
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
    memory: RankMemory | None = None
    topology: Mapping[str, Any] | None = None
    ranks: Mapping[int, int] = field(default_factory=dict)
    """The ranks that were traced, and the highest sum of bytes of each in an update; ``memory`` is the most of them."""


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
    config: Any, *, world_size: int, per_node: int | None = None, alternatives: bool = True
) -> MemoryReport:
    """Plan a run of ``world_size`` processes. Raises ``ConfigError`` and ``DataError`` where a start would."""
    per_node = per_node or min(8, world_size)
    with as_launched(world_size, per_node=per_node):
        settings = Settings.from_config(config)
        precision = settled_precision(settings.optim_wrapper.precision)
        settings = settings.with_choices(seed=settings.randomness.seed or 0, precision=precision)
        geometry = build_engine(settings)[1]
        data, *_ = continue_data(settings, None, geometry=geometry, on_change="refuse")
        largest = largest_batches(data, geometry)
        preload()
        with suppress(Exception), torch.device("meta"):  # imports what it needs; why it cannot be built: each trace
            build_model(settings, data.processor, seed=settings.seed)
        plans: dict[str, EnginePlan] = {}
        engines: dict[str, Settings] = {}
        for name in (CONFIG_ENGINE, *(ALTERNATIVES if alternatives else ())):
            try:
                one = settings
                if name != CONFIG_ENGINE:
                    one = Settings.from_config({**settings.config, "backend": backend_spec(name)})
                    one = one.with_choices(seed=settings.seed, precision=precision)
                topology = build_engine(one)[0].topology()
            except ConfigError as error:
                plans[name] = EnginePlan(name, str(error))
                continue
            if all(topology != plan.topology for plan in plans.values()):
                plans[name] = EnginePlan(name, None, topology=topology)
                engines[name] = one
        traces = trace_engines(engines, data.processor, largest, geometry, jobs=num_cores())
    plans |= {name: replace(plan, topology=plans[name].topology) for name, plan in traces.items()}
    return MemoryReport([*plans.values()], largest, geometry, precision, world_size, per_node)


def preload() -> None:
    """Import what every traced engine needs, before processes are forked."""
    for name in ("fsdp", "tensor", "checkpoint"):
        import_module(f"torch.distributed.{name}")
    import_module("torch._dynamo")


def trace_engines(
    engines: Mapping[str, Settings], processor: Any, largest: Largest, geometry: Geometry, *, jobs: int
) -> dict[str, EnginePlan]:
    """Each engine on rank 0, and on the ranks that need more. ``preload`` comes before, inside ``as_launched``."""

    def trace_rank(name: str, rank: int) -> RankMemory:
        backend, _ = build_engine(engines[name])
        with fake_group(geometry.dp_size, rank=rank):
            return trace(engines[name], backend, processor, largest.batches, geometry=geometry)

    def run(ranks: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Outcome]:
        outcomes = in_processes({one: partial(trace_rank, *one) for one in ranks}, jobs=jobs)
        console = RichOutput(stderr=True)
        return dict(track(outcomes, "planning", total=len(ranks), console=console, disable=not console.is_terminal))

    outcomes = run([(name, 0) for name in engines])
    outcomes |= run(
        [(name, rank) for (name, _), (one, _) in outcomes.items() if one is not None for rank in one.unlike]
    )
    plans = {}
    for name in engines:
        of_engine = {rank: outcome for (engine, rank), outcome in outcomes.items() if engine == name}
        problem = next((problem for _, problem in of_engine.values() if problem is not None), None)
        ranks = {rank: memory for rank, (memory, _) in of_engine.items() if memory is not None}
        steps = {rank: memory.peak["step"] for rank, memory in ranks.items()}
        plans[name] = EnginePlan(name, problem, None if problem else highest([*ranks.values()]), ranks=steps)
    return plans


# ---- whether a plan fits into the memory that there is; a plan as text and as values --------------------------------


@dataclass(frozen=True)
class Reserve:
    """Bytes for what a trace cannot see, and the memory that there is (None: not given)."""

    device: int
    """Bytes of each device besides: CUDA's context, NCCL's buffers, cuBLAS's workspaces."""
    fragmentation: float
    """Share that is added to what is traced on a device: gaps between the allocator's blocks."""
    process: int
    """Bytes of each process in host memory besides: Python, libraries, the workers of its loader."""
    device_memory: int | None = None
    node_memory: int | None = None


def report_values(report: MemoryReport, reserve: Reserve) -> dict[str, Any]:
    """Plain JSON values, in bytes, with the reserve. ``fits`` is None where no memory was given, or without a plan.

    Of the host: the model while it is built, what offload holds, and one tensor at a time of a save or a load.
    """
    engines = []
    on_node = min(report.per_node, report.world_size)
    for plan in report.plans:
        values: dict[str, Any] = {"engine": plan.engine, "topology": plan.topology, "problem": plan.problem}
        values["fits"] = None
        if plan.memory is not None:
            memory, gaps = plan.memory, 1 + reserve.fragmentation
            device = {phase: round(memory.device[phase] * gaps) + reserve.device for phase in PHASES}
            build, save = max(memory.built, memory.host), memory.host + memory.largest
            host = {"load": build, "save": save, "resume": max(build, save)}
            host = {phase: host.get(phase, memory.host) + reserve.process for phase in PHASES}
            values |= {"device": device, "host": host, "traced": vars(memory), "step_of_rank": {**plan.ranks}}
            if reserve.device_memory is not None or reserve.node_memory is not None:
                on_device = max(device.values()) <= (reserve.device_memory or float("inf"))
                values["fits"] = on_device and on_node * max(host.values()) <= (reserve.node_memory or float("inf"))
        engines.append(values)
    return {
        "world_size": report.world_size,
        "per_node": report.per_node,
        "precision": report.precision,
        "geometry": str(report.geometry),
        "largest_tokens": report.largest.tokens,
        "sequences_looked_at": report.largest.sequences,
        "sequences_per_epoch": report.largest.per_epoch,
        "reserve": vars(reserve),
        "engines": engines,
    }


def report_lines(values: Mapping[str, Any]) -> list[str]:
    """``report_values`` as a table: GiB on a device and of a process, by phase."""
    reserve, sequences = values["reserve"], values["sequences_looked_at"]
    lines = [
        f"{values['geometry']} sequences per update, {values['precision']}, largest micro-batch:"
        f" {values['largest_tokens']:,} tokens (of {sequences:,} of {values['sequences_per_epoch']:,} sequences).",
        f"GiB of one device, {100 * reserve['fragmentation']:g} % for fragmentation and {reserve['device'] / GIB:.1f}"
        f" reserved included / GiB of one process on the host, {reserve['process'] / GIB:.1f} reserved included",
        f"{'engine':26}" + "".join(f"{phase:>15}" for phase in PHASES) + f"{'held':>9}",
    ]
    for plan in values["engines"]:
        name, topology = plan["engine"], plan["topology"] or {}
        if name == CONFIG_ENGINE:  # by what it is
            stage = f"zero{topology['zero_stage']}" if "zero_stage" in topology else None
            details = [topology.get("engine", "engine"), topology.get("sharding_strategy") or stage]
            name = ":".join(filter(None, details)) + " (config)"
        if plan["problem"] is not None:
            lines.append(f"{name:26} not planned: {plan['problem']}")
            continue
        pairs = [f"{plan['device'][phase] / GIB:.2f} / {plan['host'][phase] / GIB:.2f}" for phase in PHASES]
        verdict = {True: "  fits", False: "  too large", None: ""}[plan["fits"]]
        resident = plan["traced"]["held"] / GIB
        lines.append(f"{name:26}" + "".join(f"{pair:>15}" for pair in pairs) + f"{resident:9.2f}{verdict}")
    on_node = min(values["per_node"], values["world_size"])
    if on_node > 1:
        lines.append(f"A node has {on_node} processes: its host memory is {on_node} times that of one.")
    return lines
