"""Figures as plain values for the template, which draws them as inline SVG with labels in HTML: line charts and
histograms.

The SVG is stretched to its frame (``preserveAspectRatio="none"``; strokes keep their width); labels are placed in
percent. The numbers are in the page once more as JSON, for the values under the pointer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unigen_ds.report.document import grouped, number_text

WIDTH, HEIGHT = 1000, 300
NUM_COLOURS = 8
NUM_BINS = 48
MOST_POINTS = 800
"""Of a series; from more of them the smallest and the largest of each interval are drawn."""
_LOG_RATIO = 30.0
_LONG = 80
"""Values from which on a curve is drawn as its moving average, too."""
_LABEL_DISTANCE = 3.0  # percent of the width
_WIDE_RATIO = 20.0
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Series:
    """A curve. ``points`` are (x, y), ordered by x."""

    name: str
    points: Points
    colour: int = 0
    style: str = ""
    """``faint`` for work that does not count, ``dots`` for few values."""
    scale: bool = True
    """Whether it takes part in the choice of the axes."""
    smooth: bool = True
    """Whether a long curve is drawn smoothed, over its values."""

    @property
    def css(self) -> str:
        return f"s{self.colour % NUM_COLOURS}" + (" dash" if self.colour >= NUM_COLOURS else "")


@dataclass(frozen=True)
class Mark:
    """A vertical line: a resume (``resume``), with another batch (``batch``) or on other processes (``topology``)."""

    x: float
    label: str
    kind: str
    text: str


@dataclass(frozen=True)
class Figure:
    """What the template draws. Shapes are in units of the SVG, labels at percent of its width or height."""

    title: str
    spoken: str
    """The description for a screen reader."""
    legend: Sequence[tuple[str, str]]
    """CSS class and name of each curve."""
    grid: Sequence[str]
    y_labels: Sequence[tuple[str, str]]
    """Text and percent."""
    x_labels: Sequence[tuple[str, str]]
    values: Mapping[str, Any]
    """What the script displays under the pointer."""
    notes: Sequence[str] = ()
    compact: bool = True
    marks: Sequence[tuple[str, str]] = ()
    """x and kind."""
    flags: Sequence[tuple[str, Mark]] | None = None
    """Percent and mark of those with a label."""
    paths: Sequence[tuple[str, str]] = ()
    """Path and CSS class."""
    bars: Sequence[tuple[str, str, str, str, str]] = ()
    """x, y, width, height, CSS class."""
    limit: str | None = None
    """x of a line over the bars."""


def chart(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str,
    marks: Sequence[Mark] = (),
    unit: str = "",
    log: bool | None = None,
    compact: bool = True,
) -> Figure | None:
    """A line chart; None where no series has a point. ``log``: the scale of y; None chooses it from the values."""
    curves = [one for one in series if one.points]
    if not curves:
        return None
    frame = Frame(curves, log=log)
    most = max(len(one.points) for one in curves)
    notes = [
        unit,
        "logarithmic scale" if frame.log else "",
        f"extremes of {MOST_POINTS // 2} intervals of up to {grouped(most)} values" if most > MOST_POINTS else "",
    ]
    first, last = curves[0].points[0][1], curves[0].points[-1][1]
    values = [
        {"n": one.name, "c": one.colour % NUM_COLOURS,
         "p": [[float(f"{value:.6g}") for value in point] for point in reduce_points(one.points)]}
        for one in curves if one.style != "faint"
    ]  # fmt: skip
    paths: list[tuple[str, str]] = []
    for one in curves:
        css = f"{one.css} {one.style}".strip()
        if one.smooth and one.style != "faint" and len(one.points) >= _LONG:
            paths += [(frame.path(one.points), f"{one.css} raw"), (frame.path(moving_average(one.points)), css)]
        else:
            paths.append((frame.path(one.points), css))
    flags: list[tuple[str, Mark]] = []
    before = -math.inf
    for mark in marks:  # a label that would cover the one before it is left out; its line is drawn
        at = 100 * frame.x(mark.x) / WIDTH
        if 0 <= at <= 100 and at - before >= _LABEL_DISTANCE:
            flags.append((f"{at:.2f}", mark))
            before = at
    left, right = frame.left, frame.right
    step = max(1.0, _step((right - left) / 6)) if right - left >= 5 else _step((right - left) / 5)
    ticks = [i * step for i in range(math.ceil(left / step), math.floor(right / step + 1e-9) + 1)]
    return Figure(
        title=title,
        spoken=f"{title}: {curves[0].name} from {number_text(first)} to {number_text(last)}",
        notes=[note for note in notes if note],
        legend=[("faint" if one.style == "faint" else one.css, one.name) for one in curves] if len(curves) > 1 else [],
        grid=frame.grid,
        y_labels=frame.labels(_tick),
        x_labels=[(_tick(x), f"{frame.x(x) / WIDTH:.2%}"[:-1]) for x in ticks],
        values={"x": x_label, "left": left, "right": right, "series": values},
        compact=compact,
        marks=[(f"{frame.x(one.x):.1f}", one.kind) for one in marks if left <= one.x <= right],
        flags=flags,
        paths=paths,
    )


class Frame:
    """The limits of both axes, and the values of y that have a line. ``log``: None chooses it from the values; a
    logarithmic scale needs values above 0.
    """

    def __init__(self, curves: Sequence[Series], *, log: bool | None) -> None:
        values = [y for one in ([s for s in curves if s.scale] or curves) for _, y in one.points]
        self.log = min(values) > 0 and (max(values) / min(values) > _LOG_RATIO if log is None else log)
        self.low, self.high, self.ticks = _log_axis(values) if self.log else _axis(values)
        xs = [x for one in curves for x, _ in one.points]
        margin = 0.5 if min(xs) == max(xs) else 0.0
        self.left, self.right = min(xs) - margin, max(xs) + margin

    def x(self, x: float) -> float:
        return (x - self.left) / (self.right - self.left) * WIDTH

    def y(self, y: float) -> float:
        """Values outside of the axis (of work that does not count) are drawn just beyond its end."""
        if self.log:
            share = math.log(max(y, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (y - self.low) / (self.high - self.low)
        return (1 - min(1.05, max(-0.05, share))) * HEIGHT

    @property
    def grid(self) -> list[str]:
        return [f"{self.y(y):.1f}" for y in self.ticks]

    def labels(self, text: Any) -> list[tuple[str, str]]:
        return [(text(y), f"{100 * self.y(y) / HEIGHT:.2f}") for y in self.ticks]

    def path(self, points: Points) -> str:
        """The line through the points, a dot for a single one."""
        ends = [f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in reduce_points(points)]
        return "M" + "L".join(ends) + ("h0" if len(ends) == 1 else "")


def moving_average(points: Points) -> list[tuple[float, float]]:
    """The mean of a window of a fortieth of the values, centred; shorter at both ends."""
    number, half = len(points), max(1, len(points) // 80)
    sums = np.cumsum([0.0, *(y for _, y in points)])
    reach = np.minimum(half, np.minimum(np.arange(number), np.arange(number)[::-1]))
    at = np.arange(number)
    means = (sums[at + reach + 1] - sums[at - reach]) / (2 * reach + 1)
    return [(x, mean) for (x, _), mean in zip(points, means.tolist(), strict=True)]


def reduce_points(points: Points) -> Points:
    """Return about ``MOST_POINTS`` at most: the smallest and the largest value of each interval, in their order."""
    if len(points) <= MOST_POINTS:
        return points
    size = len(points) / (MOST_POINTS // 2)
    extremes = [points[0]]
    for i in range(MOST_POINTS // 2):
        part = points[int(i * size) : int((i + 1) * size)]
        extremes += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return [*extremes, points[-1]]


def _axis(values: Sequence[float]) -> tuple[float, float, list[float]]:
    low, high = min(values), max(values)
    if low == high:
        low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
    if 0 < low < 0.4 * high:
        low = 0.0
    step = _step((high - low) / 4)
    ticks = [step * i for i in range(math.floor(low / step), math.ceil(high / step) + 1)]
    return ticks[0], ticks[-1], ticks


def _log_axis(values: Sequence[float]) -> tuple[float, float, list[float]]:
    low, high = min(values) / 1.1, max(values) * 1.1
    exponents = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    ticks = [10.0**e for e in exponents if low <= 10.0**e <= high]
    if len(ticks) < 3:
        ticks = [m * 10.0**e for e in exponents for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    every = math.ceil(len(ticks) / 6) or 1
    return low, high, ticks[::every]


def _step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)


def _tick(value: float) -> str:
    if abs(value) < 1e-12:
        return "0"
    for size, ending in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{ending}"
    return f"{value:.3g}".replace("e-0", "e-")


def histogram(
    title: str, groups: Mapping[str, NDArray[Any]], *, unit: str, count: str, limit: tuple[str, int]
) -> Figure | None:
    """Stacked bars of whole numbers in bins of equal width on the page; None where there is no number. Where the values
    are spread widely, the limits of the bins grow by a factor.

    Args:
        groups: name -> values, stacked in this order.
        unit: of the values: ``tokens``.
        count: what is counted: ``records``.
        limit: name and value of a line, which is always within the axis.
    """
    groups = {name: np.asarray(values) for name, values in groups.items() if len(values)}
    if not groups:
        return None
    together = np.concatenate([*groups.values()])
    low, high = min(int(together.min()), limit[1]), max(int(together.max()), limit[1]) + 1
    if high - low > NUM_BINS and high / max(float(np.percentile(together, 5)), 1.0) > _WIDE_RATIO:
        spread = np.round(np.geomspace(max(low, 1), high, NUM_BINS + 1)).astype(int).tolist()
        edges = sorted({low, *spread})
    else:
        step = -(-(high - low) // NUM_BINS)
        edges = [*range(low, high + step, step)]
    number = len(edges) - 1
    counts = {name: np.histogram(values, edges)[0] for name, values in groups.items()}
    top = int(np.sum([*counts.values()], axis=0).max())
    frame = Frame([Series("", [(0, 0), (number, top)])], log=False)
    width = WIDTH / number
    bars = []
    base: NDArray[Any] = np.zeros(number)
    for k, own in enumerate(counts.values()):
        for i in np.flatnonzero(own).tolist():
            bottom, ceiling = frame.y(base[i]), frame.y(base[i] + own[i])
            height = f"{max(bottom - ceiling, 0.8):.1f}"
            colour = f"s{k % NUM_COLOURS}"
            bars.append((f"{(i + 0.06) * width:.1f}", f"{ceiling:.1f}", f"{0.88 * width:.1f}", height, colour))
        base = base + own
    labels = [
        f"{grouped(first)} to {grouped(after - 1)} {unit}" for first, after in zip(edges, edges[1:], strict=False)
    ]
    values = [
        {"n": f"{name} ({count})" if name else count, "c": k % NUM_COLOURS,
         "p": [[i + 0.5, int(n)] for i, n in enumerate(counts[name])]}
        for k, name in enumerate(groups)
    ]  # fmt: skip
    legend = [(f"s{k % NUM_COLOURS}", name) for k, name in enumerate(groups) if name]
    line = float(np.interp(limit[1] + 1, edges, range(number + 1)))
    return Figure(
        title=title,
        spoken=f"{title}: {grouped(len(together))} {count} of {grouped(low)} to {grouped(high - 1)} {unit}",
        legend=[*legend, ("limit", f"{limit[0]} {grouped(limit[1])}")],
        grid=frame.grid,
        y_labels=frame.labels(number_text),
        x_labels=[(grouped(edges[i]), f"{100 * i / number:.2f}") for i in range(0, number + 1, max(1, number // 7))],
        values={"x": unit, "left": 0, "right": number, "labels": labels, "series": values},
        bars=bars,
        limit=f"{line * width:.1f}",
    )
