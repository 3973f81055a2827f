"""The curves of a run over its updates, and of several runs over the data they consumed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from unigen_ds.evaluation.report.charts import Mark, Series, chart
from unigen_ds.evaluation.report.goodput import changes
from unigen_ds.evaluation.report.lines import Line, number
from unigen_ds.evaluation.report.markup import Html, details, plural, tag, value_text
from unigen_ds.evaluation.report.reading import WorkDir

_MAIN = {"loss", "grad_norm", "tokens_per_second", "memory", "memory_reserved"}
_NOT_CURVES = {"update", "iteration", "epoch", "sequences", "samples", "tokens", "applied"}
_BATCH = ("geometry.batch_size", "geometry.accumulative_counts", "geometry.dp_size")


def points(lines: Iterable[Line], key: str) -> list[tuple[float, float]]:
    """(update, value) of every line that has a finite number."""
    return [(float(line["update"]), n) for line in lines if (n := number(line.get(key))) is not None]


def keys_of(lines: Iterable[Line]) -> list[str]:
    """Keys with a number in any line, in the order in which they first occur."""
    found: dict[str, None] = {}
    for line in lines:
        found |= dict.fromkeys(key for key in line if key not in found and number(line[key]) is not None)
    return [*found]


def marks_of(run: WorkDir) -> list[Mark]:
    """A mark at each start after the first, with what it changed."""
    marks = []
    for index, (start, changed) in enumerate(zip(run.starts, changes(run.starts), strict=True)):
        if not index:
            continue
        kind = "resume"
        if any(key.startswith(("topology.", "machine.")) for key in changed):
            kind = "topology"
        if any(key in changed for key in _BATCH):
            kind = "batch"
        shown = ", ".join(
            f"{key.partition('.')[2]} {value_text(before)} → {value_text(now)}"
            for key, (before, now) in changed.items()
            if key.startswith(("geometry.", "topology.", "machine."))
        )
        text = f"start {index + 1} from update {start.update}" + (f": {shown}" if shown else "")
        marks.append(Mark(start.update, str(index + 1), kind, text))
    return marks


def curves(run: WorkDir) -> list[Html]:
    """The charts of the training, the main ones first; all others in a part that opens."""
    lines, marks = run.updates, marks_of(run)
    keys = keys_of(lines)

    def figure(title: str, names: Sequence[str], *, unit: str = "", log: bool | None = None) -> Html | None:
        drawn = [Series(label(name), points(lines, name), i, smooth=name not in rates) for i, name in enumerate(names)]
        return chart(title, drawn, x_label="update", marks=marks, unit=unit, log=log, compact=True)

    terms = [key for key in keys if key.startswith("loss/") and key.count("/") == 1]
    sources = [key for key in keys if key.startswith("loss/") and key.count("/") == 2]
    void = [Series("made void by a resume", points(part, "loss"), style="faint", scale=False) for part in run.abandoned]
    total = [Series("loss", points(lines, "loss"))]
    rates = [key for key in keys if key == "lr" or key.startswith("lr/")]
    shares = [key for key in keys if key in ("time/update", "time/data")]
    main = [
        chart("Loss", [*total, *_once(void)], x_label="update", marks=marks),
        figure("Loss by term", terms),
        figure("Loss by source", sources),
        figure("Learning rate", rates, log=False),
        figure("Gradient norm", ["grad_norm"]),
        figure("Tokens per second", ["tokens_per_second"], unit="all processes"),
        figure("Time of an update", shares, unit="seconds"),
        figure("Memory", [key for key in keys if key in ("memory", "memory_reserved")], unit="MiB"),
    ]
    shown = {*terms, *sources, *rates, *shares, *_MAIN, *_NOT_CURVES}
    rest: dict[str, list[str]] = {}
    for key in keys:
        if key not in shown and not key.startswith("val/"):
            rest.setdefault(key.partition("/")[0], []).append(key)
    more = [figure(name.replace("_", " "), group) for name, group in rest.items()]
    more += _statistics(run, marks)
    parts = [_grid(main)]
    if any(more):
        parts.append(details(f"Further curves ({sum(one is not None for one in more)})", _grid(more, first_wide=False)))
    return parts


def _statistics(run: WorkDir, marks: Sequence[Mark]) -> list[Html | None]:
    """A chart for each statistic over ranks, with its average, maximum and minimum; the time shares together."""
    groups: dict[str, list[str]] = {}
    for key in keys_of(run.statistics):
        kind, _, name = key.partition("/")[2].partition("_")
        if kind not in ("avg", "max", "min"):
            continue  # of single ranks
        of_shares = name.startswith("share_")
        if not of_shares:
            groups.setdefault(name, []).append(key)
        elif kind == "avg":
            groups.setdefault("shares of the time", []).append(key)
    return [
        chart(
            f"Over ranks: {name.replace('_', ' ')}",
            [Series(label(key), points(run.statistics, key), i, smooth=False) for i, key in enumerate(keys)],
            x_label="update", marks=marks, compact=True,
        )
        for name, keys in groups.items()
    ]  # fmt: skip


def _once(series: Sequence[Series]) -> list[Series]:
    """The same curves with one entry in the legend: they are one curve with gaps for the reader."""
    joined = [point for one in series for point in one.points]
    return [Series(series[0].name, joined, style="faint", scale=False)] if len(series) == 1 else [
        Series(f"{one.name} ({i})" if len(series) > 1 else one.name, one.points, style="faint", scale=False)
        for i, one in enumerate(series, start=1)
    ]  # fmt: skip


def _grid(figures: Sequence[Html | None], *, first_wide: bool = True) -> Html:
    found = [one for one in figures if one is not None]
    odd = (len(found) - first_wide) % 2
    cells = []
    for index, one in enumerate(found):
        wide = (first_wide and index == 0) or (odd and index == len(found) - 1)
        cells.append(tag("div", one, class_="wide" if wide else None))
    return tag("div", *cells, class_="grid2")


def label(key: str) -> str:
    """``loss/text`` -> ``text``: the title has the rest."""
    return key.partition("/")[2] or key


def validation_curves(run: WorkDir) -> Html | None:
    """A chart for each group of values: the total, then terms with their parts, then each metric."""
    groups: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for evaluated in run.evaluations:
        if evaluated.update is None:
            continue
        for key, value in evaluated.values.items():
            parts = key.split("/")
            group = "/".join(parts[: min(len(parts) - 1, 3)]) if len(parts) > 2 else key
            groups.setdefault(group, {}).setdefault(key, []).append((float(evaluated.update), value))
    figures = []
    for group, series in groups.items():
        drawn = [
            Series("all" if key == group else key.removeprefix(f"{group}/"), sorted(dict(found).items()), i, "dots")
            for i, (key, found) in enumerate(series.items())
        ]
        if any(len(one.points) > 1 for one in drawn):
            figures.append(chart(group, drawn, x_label="update", marks=marks_of(run), compact=True))
    return _grid(figures, first_wide=False) if any(figures) else None


def overlay(runs: Mapping[str, WorkDir]) -> list[Html]:
    """Loss, validation loss and the rest of several runs, over sequences: updates of different batches differ."""

    def trained(key: str) -> Callable[[WorkDir], list[tuple[float, float]]]:
        def of(run: WorkDir) -> list[tuple[float, float]]:
            found = ((number(line.get("sequences")), number(line.get(key))) for line in run.updates)
            return [(x, y) for x, y in found if x is not None and y is not None]

        return of

    def validated(run: WorkDir) -> list[tuple[float, float]]:
        found = [
            (run.sequences_at(e.update), e.values.get("val/loss")) for e in run.evaluations if e.update is not None
        ]
        return sorted((x, y) for x, y in found if x is not None and y is not None)

    keys = dict.fromkeys(key for run in runs.values() for key in keys_of(run.updates) if key.startswith("loss/"))
    wanted: list[tuple[str, Callable[[WorkDir], list[tuple[float, float]]]]] = [
        ("Loss", trained("loss")),
        ("Validation loss", validated),
        *((f"Loss, {label(key)}", trained(key)) for key in keys if key.count("/") == 1),
        ("Learning rate", trained("lr")),
        ("Gradient norm", trained("grad_norm")),
        ("Tokens per second", trained("tokens_per_second")),
    ]
    figures = []
    for index, (title, values) in enumerate(wanted):
        drawn = [Series(name, values(run), i) for i, (name, run) in enumerate(runs.items())]
        rate = title == "Learning rate"
        drawn = [replace(one, smooth=not rate) for one in drawn]
        log = False if rate else None
        figures.append(chart(title, drawn, x_label="sequences", log=log, compact=index > 0, named=True))
    empty = [name for name, run in runs.items() if not run.updates]
    note = f"{plural(len(empty), 'run')} without an update: {', '.join(empty)}" if empty else None
    return [_grid(figures), tag("p", note, class_="note")] if note else [_grid(figures)]
