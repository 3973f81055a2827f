"""Plot ``metrics.jsonl`` of one run or several: losses and ``val/loss``, learning rate, gradient norm, time; over
the data consumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from unigen_ds.core.errors import DataError
from unigen_ds.evaluation.metric_lines import (
    Line,
    interpolate,
    known_sequences,
    lines_of_updates,
    number,
    validation_losses,
    well_formed,
)
from unigen_ds.system.journals import in_effect, parse_lines

_PANELS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("loss", (), "log"),
    ("learning rate", ("lr",), "linear"),
    ("gradient norm", ("grad_norm",), "log"),
    ("tokens per second", ("tokens_per_second",), "linear"),
)


def plot_curves(metrics_files: Path | Mapping[str, Path], path: Path) -> None:
    """Write a picture of a run, or of several by their names: one curve for each; lines that a resume voided do not
    count. Raises ``DataError`` for a file without an update.
    """
    from matplotlib.figure import Figure

    files = {"": metrics_files} if isinstance(metrics_files, Path) else metrics_files
    valid = {name: in_effect(well_formed(parse_lines(file)[0])[0]) for name, file in files.items()}
    runs = {name: lines_of_updates(lines) for name, lines in valid.items()}
    for name, lines in runs.items():
        if not lines:
            raise DataError(f"{files[name]} holds no update", remedy="train first, or name the work dir of a run")
    several = len(runs) > 1
    figure = Figure(figsize=(12, 6.5 + (0.25 * len(runs) if several else 0)), layout="constrained")
    for axis, (title, names, scale) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        for index, (name, lines) in enumerate(runs.items()):
            color = {"color": f"C{index}"} if several else {}
            keys = names
            if not names:  # the total and the terms; those of single sources are in a report
                parts = dict.fromkeys(key for line in lines for key in line if key.partition("/")[0] == "loss")
                keys = ("loss",) if several else tuple(key for key in parts if key.count("/") < 2)
            for key in keys:
                points = [(line["sequences"], line[key]) for line in lines if line.get(key) is not None]
                if points:
                    axis.plot(*zip(*points, strict=True), label=name if several else key, linewidth=1.2, **color)
            for key, points in _validation(valid[name], lines).items() if not names else ():
                style = {"linestyle": "--", "marker": ".", "linewidth": 1.2, **color}
                axis.plot(*zip(*points, strict=True), label=f"{name} {key}".strip(), **style)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("sequences consumed", fontsize=9)
        axis.set_yscale(scale)
        axis.grid(alpha=0.3)
        if len(axis.lines) > 1 and not several:
            axis.legend(fontsize=8)
    if several:  # one for all panels, beside none of their curves
        drawn_lines = figure.axes[0].lines
        labels = [shorten(str(line.get_label())) for line in drawn_lines]
        columns = 1 if max(map(len, labels)) > 40 else 2
        figure.legend(drawn_lines, labels, loc="outside lower center", ncols=columns, fontsize=8)
    figure.savefig(path, dpi=90)


def shorten(name: str, *, most: int = 80) -> str:
    """Shorten a name to ``most`` characters: the middle is left out, since names often differ at one of the ends."""
    end = (most - 1) // 2
    return name if len(name) <= most else f"{name[:end]}…{name[-end:]}"


def _validation(valid: list[Line], updates: list[Line]) -> dict[str, list[tuple[float, float]]]:
    """``val/loss``, or that of each set -> (sequences consumed, value) of each evaluation; the last where an update was
    evaluated twice.
    """
    known, curves = known_sequences(updates), {}
    for key in validation_losses(key for line in valid for key in line):
        values = {line["update"]: n for line in valid if "update" in line and (n := number(line.get(key))) is not None}
        pairs = [(interpolate(known, update), value) for update, value in sorted(values.items())]
        if points := [(at, value) for at, value in pairs if at is not None]:
            curves[key] = points
    return curves
