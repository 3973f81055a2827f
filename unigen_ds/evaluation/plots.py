"""Plot ``metrics.jsonl`` of one run or several: losses and ``val/loss``, learning rate, gradient norm, time; over
the data consumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from unigen_ds.core.errors import DataError
from unigen_ds.evaluation.metric_lines import (
    Line,
    interpolated,
    known_sequences,
    read_updates,
    read_values,
    validation_losses,
)
from unigen_ds.system.journals import parse_lines

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
    runs = {name: _updates(file) for name, file in files.items()}
    several = len(runs) > 1
    figure = Figure(figsize=(12, 6.5 + (0.25 * len(runs) if several else 0)), layout="constrained")
    for axis, (title, keys, scale) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        num_lines = 0
        for index, (name, lines) in enumerate(runs.items()):
            color = {"color": f"C{index}"} if several else {}
            for key in keys or (("loss",) if several else _losses(lines)):
                points = [(line["sequences"], line[key]) for line in lines if line.get(key) is not None]
                if points:
                    axis.plot(*zip(*points, strict=True), label=name if several else key, linewidth=1.2, **color)
                num_lines += 1
            for key, points in _validation(files[name], lines).items() if not keys else ():
                style = {"linestyle": "--", "marker": ".", "linewidth": 1.2, **color}
                axis.plot(*zip(*points, strict=True), label=f"{name} {key}".strip(), **style)
                num_lines += 1
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("sequences consumed", fontsize=9)
        axis.set_yscale(scale)
        axis.grid(alpha=0.3)
        if num_lines > 1 and not several:
            axis.legend(fontsize=8)
    if several:  # one for all panels, beside none of their curves
        drawn_lines = figure.axes[0].lines
        labels = [shortened(str(line.get_label())) for line in drawn_lines]
        figure.legend(
            drawn_lines, labels, loc="outside lower center", ncols=1 if max(map(len, labels)) > 40 else 2, fontsize=8
        )
    figure.savefig(path, dpi=90)


def shortened(name: str, *, most: int = 80) -> str:
    """Shorten a name to ``most`` characters: the middle is left out, since names often differ at one of the ends."""
    end = (most - 1) // 2
    return name if len(name) <= most else f"{name[:end]}…{name[-end:]}"


def _updates(metrics_file: Path) -> list[Line]:
    lines = read_updates(metrics_file)
    if not lines:
        raise DataError(f"{metrics_file} holds no update", remedy="train first, or name the work dir of a run")
    return lines


def _validation(metrics_file: Path, lines: list[Line]) -> dict[str, list[tuple[float, float]]]:
    """``val/loss``, or that of each set -> (sequences consumed, value) of each evaluation."""
    known, curves = known_sequences(lines), {}
    for key in validation_losses(key for line in parse_lines(metrics_file)[0] for key in line):
        pairs = [(interpolated(known, update), value) for update, value in read_values(metrics_file, key)]
        if points := [(at, value) for at, value in pairs if at is not None]:
            curves[key] = points
    return curves


def _losses(lines: list[Line]) -> tuple[str, ...]:
    """The total and the terms; those of single sources are in a report."""
    keys = dict.fromkeys(key for line in lines for key in line if key.partition("/")[0] == "loss")
    return tuple(key for key in keys if key.count("/") < 2)
