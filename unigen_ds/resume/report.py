"""Findings for people: a table in a terminal, the same as plain lines in a pipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console as RichOutput
from rich.table import Table

from unigen_ds.core.progress import Geometry
from unigen_ds.resume.finding import Finding
from unigen_ds.resume.geometry import MemoryPlan

_STYLE = {"ok": "green", "warn": "yellow", "block": "bold red"}


def show(findings: Sequence[Finding]) -> None:
    """Print the findings to stdout."""
    console = RichOutput()
    if not console.is_terminal:
        print("\n".join(plain(findings)))
        return
    table = Table(show_lines=True)
    for title in ("", "point", "was", "now", "why it matters, what to do"):
        table.add_column(title, overflow="fold")
    for f in findings:
        words = "\n".join(part for part in (f.why, f"-> {f.remedy}" if f.remedy else "") if part)
        table.add_row(f.status, _title(f), f.was, f.now, words, style=None if f.status == "ok" else _STYLE[f.status])
    console.print(table)


def plain(findings: Sequence[Finding]) -> Iterator[str]:
    """One line a finding, and one more for its reason and its remedy."""
    for f in findings:
        yield f"{f.status:<5}  {_title(f):<22}  {f.was}" + (f"  ->  {f.now}" if f.now != f.was else "")
        for part in (f.why, f.remedy and f"remedy: {f.remedy}"):
            if part:
                yield f"       {part}"


def _title(finding: Finding) -> str:
    return finding.id + (f" ({finding.guide} of 5)" if finding.guide else "")


def plans(geometries: Sequence[Geometry], memory: Sequence[MemoryPlan]) -> Iterator[str]:
    """The splits of the batch that keep the effective batch, and the plans for a device that is too small."""
    if geometries:
        total, ranks = geometries[0].global_batch_size, geometries[0].dp_size
        yield f"Splits of {total} sequences over {ranks} process(es), smallest memory first:"
        yield "  " + ", ".join(f"batch_size {g.batch_size} x {g.accumulative_counts} accumulated" for g in geometries)
    if memory:
        yield "If memory runs out (the effective batch stays):"
        for plan in memory:
            yield f"  plan {plan.name}: {plan.words}: {plan.geometry}"
