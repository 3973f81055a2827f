"""The page: a heading, a comparison where there are several runs, and each run's parts. One file, without a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unigen_ds.evaluation.report import sections
from unigen_ds.evaluation.report.document import document, write_document
from unigen_ds.evaluation.report.lines import number
from unigen_ds.evaluation.report.markup import (
    Html,
    grouped,
    join,
    number_text,
    percent,
    plural,
    seconds_text,
    table,
    tag,
    value_text,
)
from unigen_ds.evaluation.report.panels import overlay
from unigen_ds.evaluation.report.reading import WorkDir, read_work_dir, run_names
from unigen_ds.evaluation.report.results import flat

MAX_PICTURES = 16 * 2**20
"""Bytes of all pictures of a page."""


def write_report(work_dirs: Sequence[Path], out: Path, *, max_pictures: int = MAX_PICTURES) -> Path:
    """Write the report of one or several runs to ``out``. Raises ``CheckpointError`` where one is not a directory,
    ``ConfigError`` where ``out`` cannot be written.
    """
    return write_document(out, render(named(work_dirs), max_pictures=max_pictures))


def named(work_dirs: Sequence[Path]) -> dict[str, WorkDir]:
    """Runs by the name of their folder; by more of the path where two are equal."""
    names = run_names(work_dirs)
    return {name: read_work_dir(path) for name, path in names.items()}


def render(runs: Mapping[str, WorkDir], *, max_pictures: int = MAX_PICTURES) -> str:
    """The page as text."""
    several = len(runs) > 1
    title = " · ".join(runs) if len(runs) <= 3 else plural(len(runs), "run")
    body: list[Any] = []
    if several:
        links = [tag("a", "Comparison", href="#comparison")]
        links += [tag("a", name, href=f"#run{i}") for i, name in enumerate(runs, start=1)]
        head = tag("header", tag("h1", f"Comparison of {plural(len(runs), 'run')}"), tag("p", title, class_="soft"),
                   tag("nav", *links, aria_label="Runs"))  # fmt: skip
        body.append(comparison(runs))
        body += [
            tag("section", tag("h2", name), *_run(run, f"run{i}-", budget=max_pictures // len(runs)), id=f"run{i}",
                class_="run")
            for i, (name, run) in enumerate(runs.items(), start=1)
        ]  # fmt: skip
    else:
        ((name, run),) = runs.items()
        head = tag("header", tag("h1", name), *_run_head(run, ""))
        body += _run_body(run, "", budget=max_pictures)
    return document(f"{title} – training report", head, body, ", ".join(str(run.path) for run in runs.values()))


_NOT_COMPARED = ("work_dir", "checkpoint_dir", "resume")
_PARTS = (
    ("time", "Time and goodput"),
    ("curves", "Curves"),
    ("validation", "Validation and metrics"),
    ("previews", "Previews"),
    ("checkpoints", "Checkpoints"),
    ("resumes", "Resumes"),
    ("skipped", "Skipped samples"),
    ("log", "Warnings"),
    ("environment", "Environment"),
    ("config", "Config"),
)


def _run(run: WorkDir, prefix: str, *, budget: int) -> list[Any]:
    return [*_run_head(run, prefix), *_run_body(run, prefix, budget=budget)]


def _run_head(run: WorkDir, prefix: str) -> list[Any]:
    text, css = sections.state_of(run)
    chips = [tag("span", text, class_=f"chip {css}".strip())]
    record = next((start.record for start in reversed(run.starts) if start.record), None) or {}
    topology, geometry = record.get("topology"), record.get("geometry")
    if isinstance(topology, Mapping):
        chips.append(tag("span", " ".join(str(topology[k]) for k in ("engine", "sharding", "precision")
                                          if topology.get(k)), class_="chip"))  # fmt: skip
    if isinstance(geometry, Mapping) and all(isinstance(v, int) for v in geometry.values()):
        batch = 1
        for value in geometry.values():
            batch *= value
        chips.append(tag("span", f"effective batch {batch}", class_="chip"))
    links = [tag("a", title, href=f"#{prefix}{name}") for name, title in _PARTS]
    return [
        tag("p", tag("code", str(run.path)), class_="soft"),
        tag("div", *chips, class_="chips"),
        sections.tiles(run),
        sections.problems_part(run),
        tag("nav", *links, aria_label=f"Parts of {run.name}"),
    ]


def _run_body(run: WorkDir, prefix: str, *, budget: int) -> list[Any]:
    found = {
        "time": sections.time_part(run),
        "curves": sections.curves_part(run),
        "validation": sections.validation_part(run),
        "previews": sections.previews_part(run, budget=budget),
        "checkpoints": sections.checkpoints_part(run),
        "resumes": sections.resumes_part(run),
        "skipped": sections.skipped_part(run),
        "log": sections.log_part(run),
        "environment": sections.environment_part(run),
        "config": sections.config_part(run),
    }
    heading = "h3" if prefix else "h2"
    return [tag("section", tag(heading, title), *found[name], id=f"{prefix}{name}") for name, title in _PARTS]


def comparison(runs: Mapping[str, WorkDir]) -> Html:
    """Key numbers, overlaid curves, and the keys of the configs that differ."""
    rows = []
    for name, run in runs.items():
        spent, last = sections.total_spent(run), run.last
        best = min((e.values["val/loss"] for e in run.evaluations if "val/loss" in e.values), default=None)
        rows.append((tag("b", name), value_text(last.get("update")), value_text(last.get("sequences")),
                     number_text(number(last.get("loss"))), number_text(best),
                     number_text(number(last.get("tokens_per_second"))), percent(spent.goodput),
                     seconds_text(spent.total), grouped(len(run.starts))))  # fmt: skip
    heads = ("Run", "Updates", "Sequences", "Loss", "Best val loss", "Tokens/s", "Goodput", "Time", "Starts")
    return tag(
        "section",
        tag("h2", "Comparison"),
        table(heads, rows, numbers=range(1, len(heads))),
        tag(
            "p",
            "Curves are over the sequences consumed: an update of another effective batch is another amount of data.",
            class_="note",
        ),
        *overlay(runs),
        tag("section", tag("h3", "Config differences"), *_config_differences(runs)),
        id="comparison",
    )


def _config_differences(runs: Mapping[str, WorkDir]) -> list[Any]:
    """Of the configs as given in the last start; keys that are the same in all runs are left out, with their number."""
    known = {name: flat(run.config, by_name=True) for name, run in runs.items() if run.config}
    without = [name for name in runs if name not in known]
    parts: list[Any] = []
    if len(known) > 1:
        keys = sorted({key for config in known.values() for key in config if key not in _NOT_COMPARED})
        texts = {key: [value_text(c[key]) if key in c else "not given" for c in known.values()] for key in keys}
        rows = [(tag("code", key), *values) for key, values in texts.items() if len(set(values)) > 1]
        same = plural(len(keys) - len(rows), "key is", "keys are")
        parts.append(table(("Key", *known), rows) if rows else None)
        parts.append(tag("p", f"{same} equal in all of them. Not compared: {', '.join(_NOT_COMPARED)}.", class_="note"))
    if without:
        parts.append(sections.missing(f"No config is recorded: {', '.join(without)}."))
    return [join(parts)]
