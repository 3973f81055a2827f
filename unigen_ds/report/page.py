"""The page about one run, or about several: their key numbers, and the differences of their configs. Here are the
values of the parts; the templates have the words around them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from unigen_ds.checkpoint.home import is_locked
from unigen_ds.checkpoint.store import Candidate, current
from unigen_ds.core.progress import Skip, merged_skips
from unigen_ds.report.charts import NO_POINTS, Mark, Points, Series, chart
from unigen_ds.report.document import (
    TableCell,
    data_uri,
    document_text,
    group_digits,
    number_text,
    percent,
    plural,
    seconds_text,
    value_text,
    write_document,
)
from unigen_ds.report.goodput import PARTS, TimeSpent, spent_by_start
from unigen_ds.report.reading import (
    POSITION,
    Line,
    WorkDir,
    attempt,
    changes,
    finite,
    flat,
    read_work_dir,
    run_names,
    validation_losses,
)
from unigen_ds.system.files import size_text
from unigen_ds.system.journals import PROFILE_FILE

MAX_PICTURES = 16 * 2**20
"""Bytes of all pictures of a page."""
_NOT_COMPARED = ("work_dir", "checkpoint_dir", "resume")
_STATES = {"ok": "good", "warn": "warn", "block": "bad"}
_GIT_NOTES = {"True": " with changes that are not committed", "False": " no changes"}
_MAIN = {"loss", "grad_norm", "tokens_per_second", "memory", "memory_reserved", "time/update", "time/data"}
_BATCH = ("geometry.batch_size", "geometry.accumulative_counts", "geometry.dp_size")
_PROCESSES = ("topology.", "machine.")


def write_report(work_dirs: Sequence[Path], out: Path, *, max_pictures: int = MAX_PICTURES) -> Path:
    """Write the report of some runs. Raises ``CheckpointError`` for what is none, ``ConfigError`` for a bad ``out``."""
    return write_document(out, report_text(work_dirs, max_pictures=max_pictures))


def report_text(work_dirs: Sequence[Path], *, max_pictures: int = MAX_PICTURES, every_s: float | None = None) -> str:
    """The page. ``every_s``: how often it asks its server for the present one; None: it is a file, and does not."""
    runs = {name: read_work_dir(path) for name, path in run_names(work_dirs).items()}
    source = ", ".join(str(run.path) for run in runs.values())
    values: dict[str, Any] = {"title": " · ".join(runs), "source": source, "every_s": every_s}
    if len(runs) > 1:
        return document_text("runs.html.j2", **values, **comparison(runs))
    (run,) = runs.values()
    return document_text("run.html.j2", **values, view=view_of(run, budget=max_pictures))


def comparison(runs: Mapping[str, WorkDir]) -> dict[str, Any]:
    """Key numbers, and the keys of the configs of the last starts that differ."""
    rows = []
    for name, run in runs.items():
        time, last = sum(spent_by_start(run.starts), TimeSpent()), run.last
        rows.append((
            name, last.get("update"), last.get("sequences"), finite(last.get("loss")), (run.best_loss or [None])[0],
            finite(last.get("tokens_per_second")), time.goodput, time.total, len(run.starts),
        ))  # fmt: skip
    configs = {name: flat(run.config, names=True) for name, run in runs.items() if run.config}
    keys = sorted({key for config in configs.values() for key in config if key not in _NOT_COMPARED})
    texts = {key: [value_text(c[key]) if key in c else "not given" for c in configs.values()] for key in keys}
    differences = [(key, *values) for key, values in texts.items() if len(set(values)) > 1]
    return {
        "rows": rows,
        "with_config": [*configs],
        "differences": differences,
        "num_equal": len(keys) - len(differences),
        "not_compared": _NOT_COMPARED,
        "without_config": [name for name in runs if name not in configs],
    }


def view_of(run: WorkDir, *, budget: int) -> dict[str, Any]:
    """Everything that the template displays of a run. ``budget``: bytes of its pictures."""
    pictures, picture_note = previews_of(run, budget=budget)
    config, config_text, file = flat(run.config), run.config_text, run.path / PROFILE_FILE
    table, profile = TypeAdapter(list[dict[str, float]]), list[dict[str, float]]()
    if file.exists():
        profile = attempt(PROFILE_FILE, lambda: table.validate_json(file.read_bytes()), profile, run.problems)
    if config_text is not None and "***" in config.values():  # the file has what is masked
        config_text = json.dumps(run.config, indent=1, default=str)
    main, more = curves(run) if run.updates else ([], [])
    lines = [*run.updates[: -1 : max(1, len(run.updates) // 20)], *run.updates[-1:]]
    newest = current(run.checkpoints, run.lineage)[-1:]
    skips = [Skip(*skip) for one in newest if one.manifest for skip in one.manifest.loader.get("skips", ())]
    columns = ("update", "epoch", "sequences", "loss", "lr", "grad_norm", "tokens_per_second")
    return {
        "run": run,
        "chips": _chips(run),
        "last": {key: finite(run.last.get(key)) for key in ("update", "loss", "epoch", "tokens_per_second")},
        "best_loss": run.best_loss,
        "time": _time(run),
        "profile": profile,
        "curves": main,
        "more_curves": more,
        "numbers": [[line.get(key) for key in columns] for line in lines],
        "validation": _validation(run),
        "pictures": pictures,
        "picture_note": picture_note,
        "checkpoints": [_checkpoint(run, entry, is_newest=entry in newest) for entry in run.checkpoints],
        "resumes": _resumes(run),
        "left_out": [(str(skip), skip.why) for skip in merged_skips([*skips, *run.lineage.skips])],
        "skipped": Counter(str(line.get("why", "–")) for line in run.skips).most_common(),
        "environment": _environment(run),
        "config": sorted((key, value_text(value)) for key, value in config.items()),
        "config_text": config_text,
    }


def points_by_key(lines: Sequence[Line], keys: Iterable[str]) -> dict[str, Points]:
    """(update, value) of every line that has a finite number, by key: in the order of their first ones."""
    updates = np.array([finite(line.get("update")) for line in lines], dtype=float)
    points: dict[str, Points] = {}
    for key in keys:
        values = np.array([finite(line.get(key)) for line in lines], dtype=float)
        if (rows := ~np.isnan(values + updates)).any():
            points[key] = np.stack((updates, values), axis=1)[rows]
    return dict(sorted(points.items(), key=lambda pair: float(pair[1][0, 0])))


def marks_of(run: WorkDir) -> list[Mark]:
    """A mark at each start after the first, with what it changed."""
    marks = []
    for number, (start, differences) in enumerate(zip(run.starts[1:], changes(run.starts), strict=True), start=2):
        kind = "topology" if any(key.startswith(_PROCESSES) for key in differences) else "resume"
        kind = "batch" if any(key in differences for key in _BATCH) else kind
        edits = ", ".join(
            f"{key.partition('.')[2]} {value_text(before)} → {value_text(now)}"
            for key, (before, now) in differences.items()
            if key.startswith(("geometry.", *_PROCESSES))
        )
        text = f"start {number} from update {start.update}" + (f": {edits}" if edits else "")
        marks.append(Mark(start.update, str(number), kind, text))
    return marks


def curves(run: WorkDir) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The charts of the training: the main ones, and all others."""
    lines, marks = run.updates, marks_of(run)
    curve_of = points_by_key(lines, dict.fromkeys(key for line in lines for key in line))
    terms = [key for key in curve_of if key.startswith("loss/")]
    rates = [key for key in curve_of if key == "lr" or key.startswith("lr/")]

    def figure(title: str, names: Sequence[str], *, unit: str = "", log: bool | None = None) -> dict[str, Any] | None:
        several = [
            Series(name.partition("/")[2] or name, curve_of.get(name, NO_POINTS), i, smooth=name not in rates)
            for i, name in enumerate(names)
        ]
        return chart(title, several, marks=marks, unit=unit, log=log)

    losses = [Series("loss", curve_of.get("loss", NO_POINTS))]
    losses += [
        Series(f"made void by a resume{f' ({i})' * (len(run.void_lines) > 1)}", points, style="faint")
        for i, part in enumerate(run.void_lines, start=1)
        for points in points_by_key(part, ["loss"]).values()
    ]
    main = [
        chart("Loss", losses, marks=marks, compact=False),
        figure("Loss by term", terms),
        figure("Learning rate", rates, log=False),
        figure("Gradient norm", ["grad_norm"]),
        figure("Tokens per second", ["tokens_per_second"], unit="all processes"),
        figure("Time of an update", ["time/update", "time/data"], unit="seconds"),
        figure("Memory", [key for key in curve_of if key.startswith("memory")], unit="MiB"),
    ]
    elsewhere = {*terms, *rates, *_MAIN, *POSITION, "applied"}
    rest: dict[str, list[str]] = {}
    for key in curve_of:
        if key not in elsewhere and not key.startswith("val/"):
            rest.setdefault(key.partition("/")[0], []).append(key)
    more = [figure(name.replace("_", " "), group) for name, group in rest.items()]
    return [one for one in main if one is not None], [one for one in more if one is not None]


def validation_curves(run: WorkDir) -> list[dict[str, Any]]:
    """A chart for each group of values: the total, then terms with their parts, then each metric."""
    groups: dict[str, dict[str, dict[float, float]]] = {}
    losses = validation_losses(key for evaluation in run.evaluations for key in evaluation.values)
    heads = sorted((name.removesuffix("loss") for name in losses), key=len, reverse=True)
    for evaluation in run.evaluations:
        for key, value in evaluation.values.items() if evaluation.update is not None else ():
            head = next((one for one in heads if key.startswith(one)), "val/")
            parts = key.removeprefix(head).split("/")
            group = head + "/".join(parts[: min(len(parts) - 1, 2)]) if len(parts) > 1 else key
            groups.setdefault(group, {}).setdefault(key, {})[float(evaluation.update or 0)] = value
    figures = []
    for group, series in groups.items():
        all_series = [
            Series("all" if key == group else key.removeprefix(f"{group}/"), np.array(sorted(one.items())), i, "dots")
            for i, (key, one) in enumerate(series.items())
        ]
        if any(len(one.points) > 1 for one in all_series):
            figures.append(chart(group, all_series, marks=marks_of(run)))
    return [one for one in figures if one is not None]


def previews_of(run: WorkDir, *, budget: int) -> tuple[list[tuple[str, str]], str]:
    """(title, data URI) of the last pictures of the work dir, of at most ``budget`` bytes; and a note about others."""
    pictures = [*run.previews, *((None, file) for file in sorted(run.path.glob("*.png")))]
    figures, missing = list[tuple[str, str]](), 0
    for number_read, (update, file) in enumerate(reversed(pictures)):
        content = attempt(file.name, file.read_bytes, b"", run.problems)
        budget -= len(content)
        if budget < 0:
            missing = len(pictures) - number_read
            break
        if content:
            figures.append((file.name if update is None else f"update {group_digits(update)}", data_uri(content)))
    note = f"The first {plural(missing, 'picture')} of {group_digits(len(pictures))} left out (--max-pictures-mib)."
    return figures[::-1], note if missing else ""


def _chips(run: WorkDir) -> list[tuple[str, str]]:
    """How the run ended, on what it ran, its effective batch: text and CSS class."""
    end = run.starts[-1].end if run.starts else None
    states: dict[str | None, tuple[str, str]] = {
        "complete": ("complete", "good"),
        "stopped": ("stopped", ""),
        None: ("killed, or still running", "warn") if run.starts else ("no start recorded", "warn"),
    }
    chips = [("running", "") if is_locked(run.path) else states.get(end, ("ended with an error", "bad"))]
    topology, geometry = (run.starts[-1].record[name] if run.starts else {} for name in ("topology", "geometry"))
    if topology:
        parts = (topology.get(key) for key in ("engine", "sharding", "precision"))
        chips.append((" ".join(str(part) for part in parts if part), ""))
    if geometry and all(isinstance(value, int) for value in geometry.values()):
        chips.append((f"effective batch {math.prod(geometry.values())}", ""))
    return chips


def _time(run: WorkDir) -> dict[str, Any]:
    """Lost time and goodput, then a row for each start."""
    times = spent_by_start(run.starts)
    total = sum(times, TimeSpent())
    rows = []
    for i, (start, one) in enumerate(zip(run.starts, times, strict=True)):
        end = start.end or ("killed" if i + 1 < len(times) else "killed or running")
        updates = f"{group_digits(start.update)} – {group_digits(start.end_update)}"
        seconds = [getattr(one, part) for part in PARTS]
        rows.append((i + 1, start.record.get("time"), updates, end, one.goodput, *seconds))
    shares = [(part, getattr(total, part), getattr(total, part) / (total.total or 1)) for part in PARTS]
    return {
        "spent": total,
        "shares": shares,
        "bar": [(part, f"{PARTS[part]}: {seconds_text(seconds)}", share) for part, seconds, share in shares],
        "spoken": ", ".join(f"{PARTS[part]} {percent(share)}" for part, _, share in shares),
        "titles": PARTS,
        "rows": rows,
    }


def _validation(run: WorkDir) -> dict[str, Any]:
    """Curves, a row with the extremes and the last value of each, and where each value came from."""
    by_key: dict[tuple[str, str], list[tuple[int | None, float]]] = {}
    for evaluation in run.evaluations:
        for key, value in evaluation.values.items():
            by_key.setdefault((key, evaluation.origin), []).append((evaluation.update, value))
    rows = []
    for (key, origin), pairs in by_key.items():
        values = [value for _, value in pairs]
        update, last = max(pairs, key=lambda pair: -1 if pair[0] is None else pair[0])
        rows.append((key, len(pairs), min(values), max(values), last, value_text(update), origin))
    made_alike: dict[str, Any] = {}  # the values of all checkpoints that were computed alike: the last one is displayed
    for one in run.evaluations:
        if one.provenance:
            same = {key: value for key, value in one.provenance.items() if key != "checkpoint"}
            made_alike[json.dumps(same, sort_keys=True)] = one
    return {
        "curves": validation_curves(run),
        "rows": rows,
        "provenance": [
            (f"{', '.join([*one.values][:4])} ({one.origin})",
             [(key, value_text(value)) for key, value in flat(one.provenance).items()])
            for one in made_alike.values()
        ],
    }  # fmt: skip


def _checkpoint(run: WorkDir, entry: Candidate, *, is_newest: bool) -> tuple[Any, ...]:
    manifest = entry.manifest
    chips: list[tuple[str, ...]] = []
    if entry.problem is not None:
        chips.append(("damaged", "bad", entry.problem))
    elif manifest is not None and manifest.commit in run.lineage.abandoned:
        chips.append(("abandoned", "warn"))
    elif is_newest:
        chips.append(("newest", ""))
    if entry.path.name == run.best:
        chips.append(("★ best", "good"))
    if manifest is None:
        return entry.path.name, None, "–", "–", "–", None, "–", "–", chips
    split = manifest.geometry.batch_size, manifest.geometry.dp_size, manifest.geometry.accumulative_counts
    metrics = ", ".join(f"{name} {number_text(finite(value))}" for name, value in manifest.metrics.items())
    return (
        entry.path.name,
        manifest.progress.updates,
        f"{manifest.geometry.global_batch_size} = {' × '.join(map(str, split))}",
        str(manifest.topology.get("engine", "–")),
        size_text(sum(file.size for file in manifest.files)),
        manifest.created,
        TableCell(manifest.parent, "code") if manifest.parent else "fresh start",
        metrics or "–",
        chips,
    )


def _resumes(run: WorkDir) -> list[dict[str, Any]]:
    resumes = []
    configs = pairwise(flat(start.record["config"]) for start in run.starts)
    later = zip(run.starts[1:], changes(run.starts), configs, strict=True)
    for number, (start, differences, (before, now)) in enumerate(later, start=2):
        keys = sorted({*before, *now} - {"resume", "load_from"}) if before and now else ()
        edits = {f"config.{k}": (before.get(k), now.get(k)) for k in keys if before.get(k) != now.get(k)}
        findings = []
        for one in start.record["findings"]:
            status = str(one.get("status"))
            advice = " ".join(str(one[key]) for key in ("why", "remedy") if one.get(key))
            values = value_text(one.get("was")), value_text(one.get("now"))
            findings.append(([(status, _STATES.get(status, ""))], str(one.get("id", "")), *values, advice))
        resumes.append({
            "number": number,
            "update": start.update,
            "source": str(start.record.get("checkpoint") or "the beginning"),
            "num_edited": len(edits),
            "differences": [(key, *map(value_text, values)) for key, values in {**differences, **edits}.items()],
            "noted": [row for row in findings if row[0][0][0] != "ok"],
            "findings": findings,
        })  # fmt: skip
    return resumes


def _environment(run: WorkDir) -> list[tuple[str, Any]]:
    """Machine, code and versions of the last start; versions of a checkpoint where no start is recorded."""
    if not run.starts:
        manifests = [one.manifest for one in run.checkpoints if one.manifest is not None]
        return [(str(key), str(value)) for key, value in manifests[-1].versions.items()] if manifests else []
    record = run.starts[-1].record
    entries: dict[str, Any] = {}
    for name in ("machine", "topology", "geometry"):
        entries |= {key: value_text(value) for key, value in record[name].items()}
    for name, part in record["git"].items():
        if isinstance(part, Mapping):
            commit, note = str(part.get("commit", "–"))[:40], _GIT_NOTES.get(str(part.get("changed")), "")
            entries[f"git commit of the {name}"] = TableCell(commit, "code", note)
    if not record["git"]:
        entries["git commit"] = "none: the code is in no git repository"
    entries |= {key: str(value) for key, value in record["versions"].items()}
    return [(key.replace("_", " "), value) for key, value in entries.items()]
