"""Whether a plan fits into given memory, and the plan as text and as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unigen_ds.checks.memory.planned import CHOSEN, EnginePlan, MemoryReport
from unigen_ds.checks.memory.traced import PHASES, Traced

GIB = 2**30


@dataclass(frozen=True)
class Reserve:
    """Bytes for what a trace cannot see, and the memory that there is (None: not given)."""

    device: int
    """Of a device: CUDA's context, NCCL's buffers, cuBLAS's workspaces."""
    fragmentation: float
    """Of what is traced on a device: gaps between the allocator's blocks."""
    process: int
    """Of a process in host memory: Python, libraries, the workers of its loader."""
    device_memory: int | None = None
    node_memory: int | None = None


def device_bytes(traced: Traced, reserve: Reserve) -> dict[str, int]:
    """Of one device in each phase, with the reserve."""
    return {phase: round(traced.device[phase] * (1 + reserve.fragmentation)) + reserve.device for phase in PHASES}


def host_bytes(traced: Traced, reserve: Reserve) -> dict[str, int]:
    """Of one process in each phase, with the reserve: the model while it is built, what offload holds, copies."""
    held = {"load": max(traced.built, traced.host), "save": traced.host + traced.largest}
    held["resume"] = max(traced.built, traced.host + traced.largest)
    return {phase: held.get(phase, traced.host) + reserve.process for phase in PHASES}


def fits(plan: EnginePlan, report: MemoryReport, reserve: Reserve) -> bool | None:
    """None where no memory was given, or there is no plan."""
    if plan.traced is None or (reserve.device_memory is None and reserve.node_memory is None):
        return None
    device, host = device_bytes(plan.traced, reserve), host_bytes(plan.traced, reserve)
    on_node = min(report.per_node, report.world_size)
    enough = [max(device.values()) <= (reserve.device_memory or float("inf"))]
    enough.append(on_node * max(host.values()) <= (reserve.node_memory or float("inf")))
    return all(enough)


def report_values(report: MemoryReport, reserve: Reserve) -> dict[str, Any]:
    """Plain JSON values, in bytes."""
    engines = []
    for plan in report.plans:
        values: dict[str, Any] = {"engine": plan.engine, "topology": plan.topology, "problem": plan.problem}
        values["fits"] = fits(plan, report, reserve)
        if plan.traced is not None:
            values |= {"device": device_bytes(plan.traced, reserve), "host": host_bytes(plan.traced, reserve)}
            values |= {"traced": vars(plan.traced), "step_of_rank": {**plan.ranks}}
        engines.append(values)
    return {
        "world_size": report.world_size,
        "per_node": report.per_node,
        "precision": report.precision,
        "geometry": str(report.geometry),
        "largest_tokens": report.largest.tokens,
        "sequences_looked_at": report.largest.sequences,
        "reserve": vars(reserve),
        "engines": engines,
    }


def report_lines(report: MemoryReport, reserve: Reserve) -> list[str]:
    """A table: GiB on a device and of a process, by phase."""
    lines = [
        f"{report.geometry} sequences per update, {report.precision}, {report.largest.text}.",
        f"GiB of one device, {100 * reserve.fragmentation:g} % for fragmentation and {reserve.device / GIB:.1f}"
        f" reserved included / GiB of one process on the host, {reserve.process / GIB:.1f} reserved included",
        f"{'engine':26}" + "".join(f"{phase:>15}" for phase in PHASES) + f"{'held':>9}{'checkpoint':>12}",
    ]
    for plan in report.plans:
        name = name_of(plan)
        if plan.traced is None:
            lines.append(f"{name:26} not planned: {plan.problem}")
            continue
        device, host = device_bytes(plan.traced, reserve), host_bytes(plan.traced, reserve)
        cells = "".join(f"{f'{device[phase] / GIB:.2f} / {host[phase] / GIB:.2f}':>15}" for phase in PHASES)
        verdict = {True: "  fits", False: "  too large", None: ""}[fits(plan, report, reserve)]
        held = f"{plan.traced.held / GIB:9.2f}{plan.traced.saved / GIB:12.2f}"
        lines.append(f"{name:26}{cells}{held}{verdict}")
    on_node = min(report.per_node, report.world_size)
    if on_node > 1:
        lines.append(f"A node has {on_node} processes: its host memory is {on_node} times that of one.")
    return lines


def name_of(plan: EnginePlan) -> str:
    """As ``--backend`` names it; the config's own by what it is."""
    if plan.engine != CHOSEN:
        return plan.engine
    topology: Mapping[str, Any] = plan.topology or {}
    detail = topology.get("sharding_strategy") or (f"zero{topology['zero_stage']}" if "zero_stage" in topology else "")
    return f"{topology.get('engine', 'engine')}{':' if detail else ''}{detail} (config)"
