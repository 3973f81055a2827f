"""The page about one run or several: a heading, a comparison where there are several runs, and each run's parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unigen_ds.evaluation.metric_lines import number
from unigen_ds.report.document import write_document
from unigen_ds.report.goodput import total_spent
from unigen_ds.report.panels import overlay
from unigen_ds.report.reading import WorkDir, read_work_dir, run_names
from unigen_ds.report.results import flat
from unigen_ds.report.sections import view_of
from unigen_ds.report.value_formats import plural, value_text

MAX_PICTURES = 16 * 2**20
"""Bytes of all pictures of a page."""
_NOT_COMPARED = ("work_dir", "checkpoint_dir", "resume")


def write_report(work_dirs: Sequence[Path], out: Path, *, max_pictures: int = MAX_PICTURES) -> Path:
    """Write the report of one or several runs to ``out``. Raises ``CheckpointError`` where one is not a directory,
    ``ConfigError`` where ``out`` cannot be written.
    """
    runs = {name: read_work_dir(path) for name, path in run_names(work_dirs).items()}
    return write_document(
        out,
        "run.html.j2",
        title=" · ".join(runs) if len(runs) <= 3 else plural(len(runs), "run"),
        source=", ".join(str(run.path) for run in runs.values()),
        views={name: view_of(run, budget=max_pictures // len(runs)) for name, run in runs.items()},
        comparison=comparison(runs) if len(runs) > 1 else None,
    )


def comparison(runs: Mapping[str, WorkDir]) -> dict[str, Any]:
    """Key numbers, overlaid curves, and the keys of the configs that differ."""
    rows = []
    for name, run in runs.items():
        spent, last = total_spent(run.starts), run.last
        key = run.validation_loss
        best = min((one.values[key] for one in run.evaluations if key in one.values), default=None)
        rows.append((
            name, last.get("update"), last.get("sequences"), number(last.get("loss")), best,
            number(last.get("tokens_per_second")), spent.goodput, spent.total, len(run.starts),
        ))  # fmt: skip
    return {
        "rows": rows,
        "curves": overlay(runs),
        "empty": [name for name, run in runs.items() if not run.updates],
        **_config_differences(runs),
    }


def _config_differences(runs: Mapping[str, WorkDir]) -> dict[str, Any]:
    """Of the configs of the last start; keys that are the same in all runs are left out, with their number."""
    known = {name: flat(run.config, by_name=True) for name, run in runs.items() if run.config}
    keys = sorted({key for config in known.values() for key in config if key not in _NOT_COMPARED})
    texts = {key: [value_text(c[key]) if key in c else "not given" for c in known.values()] for key in keys}
    rows = [(key, *values) for key, values in texts.items() if len(set(values)) > 1]
    return {
        "with_config": [*known],
        "differences": rows,
        "num_equal": len(keys) - len(rows),
        "not_compared": _NOT_COMPARED,
        "without_config": [name for name in runs if name not in known],
    }
