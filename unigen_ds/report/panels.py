"""The curves of a run over its updates, and of several runs over the data they consumed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from unigen_ds.evaluation.metric_lines import Line, interpolate, known_sequences, number, validation_losses
from unigen_ds.report.charts import Figure, Mark, Series, chart
from unigen_ds.report.document import value_text
from unigen_ds.report.goodput import changes
from unigen_ds.report.reading import WorkDir

_MAIN = {"loss", "grad_norm", "tokens_per_second", "memory", "memory_reserved"}
_NOT_CURVES = {"update", "iteration", "epoch", "sequences", "samples", "tokens", "applied"}
_BATCH = ("geometry.batch_size", "geometry.accumulative_counts", "geometry.dp_size")
_PROCESSES = ("topology.", "machine.")


def points(lines: Iterable[Line], key: str, *, x: str = "update") -> list[tuple[float, float]]:
    """(x, value) of every line that has finite numbers."""
    pairs = ((number(line.get(x)), number(line.get(key))) for line in lines)
    return [(at, value) for at, value in pairs if at is not None and value is not None]


def keys_of(lines: Iterable[Line]) -> list[str]:
    """Keys with a number in any line, in the order in which they first occur."""
    keys: dict[str, None] = {}
    for line in lines:
        keys |= dict.fromkeys(key for key in line if key not in keys and number(line[key]) is not None)
    return [*keys]


def marks_of(run: WorkDir) -> list[Mark]:
    """A mark at each start after the first, with what it changed."""
    marks = []
    for index, (start, changed) in enumerate(zip(run.starts, changes(run.starts), strict=True)):
        if not index:
            continue
        kind = "topology" if any(key.startswith(_PROCESSES) for key in changed) else "resume"
        kind = "batch" if any(key in changed for key in _BATCH) else kind
        edits = ", ".join(
            f"{key.partition('.')[2]} {value_text(before)} → {value_text(now)}"
            for key, (before, now) in changed.items()
            if key.startswith(("geometry.", *_PROCESSES))
        )
        text = f"start {index + 1} from update {start.update}" + (f": {edits}" if edits else "")
        marks.append(Mark(start.update, str(index + 1), kind, text))
    return marks


def curves(run: WorkDir) -> tuple[list[Figure], list[Figure]]:
    """The charts of the training: the main ones, and all others; of a statistic over ranks its average, maximum and
    minimum, and the time shares together.
    """
    lines, marks = run.updates, marks_of(run)
    keys = keys_of(lines)
    terms = [key for key in keys if key.startswith("loss/") and key.count("/") == 1]
    sources = [key for key in keys if key.startswith("loss/") and key.count("/") == 2]
    rates = [key for key in keys if key == "lr" or key.startswith("lr/")]
    shares = [key for key in keys if key in ("time/update", "time/data")]

    def figure(title: str, names: Sequence[str], *, unit: str = "", log: bool | None = None) -> Figure | None:
        several = [
            Series(label(name), points(lines, name), i, smooth=name not in rates) for i, name in enumerate(names)
        ]
        return chart(title, several, x_label="update", marks=marks, unit=unit, log=log, compact=True)

    void = [
        Series(f"made void by a resume{f' ({i})' * (len(run.abandoned) > 1)}", points(part, "loss"), style="faint",
               scale=False)
        for i, part in enumerate(run.abandoned, start=1)
    ]  # fmt: skip
    main = [
        chart("Loss", [Series("loss", points(lines, "loss")), *void], x_label="update", marks=marks),
        figure("Loss by term", terms),
        figure("Loss by source", sources),
        figure("Learning rate", rates, log=False),
        figure("Gradient norm", ["grad_norm"]),
        figure("Tokens per second", ["tokens_per_second"], unit="all processes"),
        figure("Time of an update", shares, unit="seconds"),
        figure("Memory", [key for key in keys if key in ("memory", "memory_reserved")], unit="MiB"),
    ]
    known = {*terms, *sources, *rates, *shares, *_MAIN, *_NOT_CURVES}
    rest: dict[str, list[str]] = {}
    for key in keys:
        if key not in known and not key.startswith("val/"):
            rest.setdefault(key.partition("/")[0], []).append(key)
    more = [figure(name.replace("_", " "), group) for name, group in rest.items()]
    statistics: dict[str, list[str]] = {}
    for key in keys_of(run.statistics):
        kind, _, name = key.partition("/")[2].partition("_")
        if kind in ("avg", "max", "min") and not name.startswith("share_"):
            statistics.setdefault(name, []).append(key)
        elif kind == "avg":
            statistics.setdefault("shares of the time", []).append(key)
    for name, group in statistics.items():
        several = [
            Series(label(key), points(run.statistics, key), i, smooth=False) for i, key in enumerate(group)
        ]  # fmt: skip
        title = f"Over ranks: {name.replace('_', ' ')}"
        more.append(chart(title, several, x_label="update", marks=marks, compact=True))
    return _present(main), _present(more)


def _present(figures: Iterable[Figure | None]) -> list[Figure]:
    return [one for one in figures if one is not None]


def label(key: str) -> str:
    """``loss/text`` -> ``text``: the title has the rest."""
    return key.partition("/")[2] or key


def validation_curves(run: WorkDir) -> list[Figure]:
    """A chart for each group of values: the total, then terms with their parts, then each metric."""
    groups: dict[str, dict[str, dict[float, float]]] = {}
    several = validation_losses(key for evaluation in run.evaluations for key in evaluation.values)
    sets = {key.split("/")[1] for key in several if key != "val/loss"}
    for evaluation in run.evaluations:
        for key, value in evaluation.values.items() if evaluation.update is not None else ():
            parts = key.split("/")
            if len(parts) > 2 and parts[1] in sets:
                parts = ["/".join(parts[:2]), *parts[2:]]
            group = "/".join(parts[: min(len(parts) - 1, 3)]) if len(parts) > 2 else key
            groups.setdefault(group, {}).setdefault(key, {})[float(evaluation.update or 0)] = value
    figures = []
    for group, series in groups.items():
        all_series = [
            Series("all" if key == group else key.removeprefix(f"{group}/"), sorted(values.items()), i, "dots")
            for i, (key, values) in enumerate(series.items())
        ]
        if any(len(one.points) > 1 for one in all_series):
            figures.append(chart(group, all_series, x_label="update", marks=marks_of(run), compact=True))
    return _present(figures)


def overlay(runs: Mapping[str, WorkDir]) -> list[Figure]:
    """Loss, validation loss and the rest of several runs, over sequences: updates of different batches differ."""
    keys = dict.fromkeys(key for run in runs.values() for key in keys_of(run.updates) if key.startswith("loss/"))
    titles = {
        "loss": "Loss",
        "val/loss": "Validation loss",
        **{key: f"Loss, {label(key)}" for key in keys if key.count("/") == 1},
        "lr": "Learning rate",
        "grad_norm": "Gradient norm",
        "tokens_per_second": "Tokens per second",
    }

    def points_of(run: WorkDir, key: str) -> list[tuple[float, float]]:
        if key != "val/loss":
            return points(run.updates, key, x="sequences")
        known = known_sequences(run.updates)
        values = [(one.update, one.values.get(run.validation_loss)) for one in run.evaluations]
        pairs = [(interpolate(known, update), value) for update, value in values if update is not None]
        return sorted((x, y) for x, y in pairs if x is not None and y is not None)

    figures = []
    for key, title in titles.items():
        more: dict[str, Any] = {"log": False if key == "lr" else None, "compact": key != "loss", "with_name": True}
        all_series = [
            Series(name, points_of(run, key), i, smooth=key != "lr") for i, (name, run) in enumerate(runs.items())
        ]
        figures.append(chart(title, all_series, x_label="sequences", **more))
    return _present(figures)
