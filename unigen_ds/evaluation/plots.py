"""Plot ``metrics.jsonl``: losses, learning rate, gradient norm and time over the data consumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unigen_ds.core.errors import DataError
from unigen_ds.core.metrics import read_lines

_PANELS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("loss", (), "log"),
    ("learning rate", ("lr",), "linear"),
    ("gradient norm", ("grad_norm",), "log"),
    ("tokens per second", ("tokens_per_second",), "linear"),
)


def plot_curves(metrics_file: Path, path: Path) -> None:
    """Write a picture of a run; lines that a resume voided do not count. Raises ``DataError`` for an empty file."""
    from matplotlib.figure import Figure

    lines = [line for line in read_lines(metrics_file) if "loss" in line and "event" not in line]
    if not lines:
        raise DataError(f"{metrics_file} holds no update", remedy="train first, or name the work dir of a run")
    latest: dict[int, dict[str, Any]] = {line["update"]: line for line in lines}
    ordered = [latest[update] for update in sorted(latest)]
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    losses = tuple(dict.fromkeys(key for line in ordered for key in line if key.partition("/")[0] == "loss"))
    for axis, (title, given, scale) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        keys = given or losses
        for key in keys:
            points = [(line["sequences"], line[key]) for line in ordered if line.get(key) is not None]
            if points:
                axis.plot(*zip(*points, strict=True), label=key, linewidth=1.2)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("sequences consumed", fontsize=9)
        axis.set_yscale(scale)
        axis.grid(alpha=0.3)
        if len(keys) > 1:
            axis.legend(fontsize=8)
    figure.savefig(path, dpi=90)
