"""Figures as plain values for the template, which draws them as inline SVG with labels in HTML: line charts and
histograms.

The SVG is stretched to its frame (``preserveAspectRatio="none"``; strokes keep their width); labels are placed in
percent. The numbers are in the page once more as JSON, for the values under the pointer.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unigen_ds.report.document import grouped, number_text, plural

WIDTH, HEIGHT = 1000, 300
NUM_COLOURS = 8
NUM_BINS = 48
MOST_POINTS = 800
"""Of a series; from more of them the smallest and the largest of each interval are drawn."""
_LOG_RATIO = 30.0
_SMOOTHED_FROM = 80
_LABEL_DISTANCE = 3.0  # percent of the width
_WIDE_RATIO = 20.0
_BIN_LABELS = 7
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
    notes: Sequence[str]
    legend: Sequence[tuple[str, str]] | None
    """CSS class and name of each curve; None: no legend."""
    grid: Sequence[str]
    y_labels: Sequence[tuple[str, str]]
    """Text and percent."""
    x_labels: Sequence[tuple[str, str]]
    values: Mapping[str, Any]
    """What the script displays under the pointer."""
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
    compact: bool = False,
    with_name: bool = False,
) -> Figure | None:
    """A line chart; None where no series has a point. ``log``: the scale of y; None chooses it from the values.
    ``with_name``: whether a single curve has its name below the title, too.
    """
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
        if one.smooth and one.style != "faint" and len(one.points) >= _SMOOTHED_FROM:
            paths += [(frame.path(one.points), f"{one.css} raw"), (frame.path(smoothed(one.points)), css)]
        else:
            paths.append((frame.path(one.points), css))
    flags: list[tuple[str, Mark]] = []
    before = -math.inf
    for mark in marks:  # a label that would cover the one before it is left out; its line is drawn
        at = 100 * frame.x(mark.x) / WIDTH
        if 0 <= at <= 100 and at - before >= _LABEL_DISTANCE:
            flags.append((f"{at:.2f}", mark))
            before = at
    return Figure(
        title=title,
        spoken=f"{title}: {curves[0].name} from {number_text(first)} to {number_text(last)}",
        notes=[note for note in notes if note],
        legend=[("faint" if one.style == "faint" else one.css, one.name) for one in curves]
        if with_name or len(curves) > 1
        else None,
        grid=frame.grid,
        y_labels=frame.labels(_tick),
        x_labels=_x_labels(frame.left, frame.right),
        values={"x": x_label, "left": frame.left, "right": frame.right, "series": values},
        compact=compact,
        marks=[(f"{frame.x(one.x):.1f}", one.kind) for one in marks if frame.left <= one.x <= frame.right],
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


def smoothed(points: Points) -> list[tuple[float, float]]:
    """The mean of a window of a fortieth of the values, centred; shorter at both ends."""
    number, half = len(points), max(1, len(points) // 80)
    sums = [0.0, *accumulate(y for _, y in points)]
    means = []
    for i, (x, _) in enumerate(points):
        reach = min(half, i, number - 1 - i)
        means.append((x, (sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1)))
    return means


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


def _x_labels(left: float, right: float) -> list[tuple[str, str]]:
    step = max(1.0, _step((right - left) / 6)) if right - left >= 5 else _step((right - left) / 5)
    first = math.ceil(left / step)
    ticks = [i * step for i in range(first, math.floor(right / step + 1e-9) + 1)]
    return [(_tick(x), f"{100 * (x - left) / (right - left):.2f}") for x in ticks]


def histogram(
    title: str,
    groups: Mapping[str, NDArray[Any]],
    *,
    unit: str,
    count: str,
    limit: tuple[str, int] | None = None,
) -> Figure | None:
    """Stacked bars of whole numbers in bins of equal width on the page; None where there is no number.

    Args:
        groups: name -> values, stacked in this order.
        unit: of the values: ``tokens``.
        count: what is counted: ``records``.
        limit: name and value of a line, which is always within the axis.
    """
    groups = {name: np.asarray(values) for name, values in groups.items() if len(values)}
    if not groups:
        return None
    if len(groups) > NUM_COLOURS:  # the last ones are joined
        rest = [*groups][NUM_COLOURS - 1 :]
        joined = np.concatenate([groups[name] for name in rest])
        groups = {k: v for k, v in groups.items() if k not in rest} | {plural(len(rest), "further source"): joined}
    edges = edges_of(np.concatenate([*groups.values()]), *([limit[1]] if limit else []))
    number = len(edges) - 1
    counts = {name: np.histogram(values, edges)[0] for name, values in groups.items()}
    top = int(np.sum([*counts.values()], axis=0).max())
    frame = Frame([Series("", [(0, 0), (number, top)])], log=False)
    width = WIDTH / number
    bars = []
    base: NDArray[Any] = np.zeros(number)
    for k, own in enumerate(counts.values()):
        for i in np.flatnonzero(own).tolist():
            low, high = frame.y(base[i]), frame.y(base[i] + own[i])
            height = f"{max(low - high, 0.8):.1f}"
            bars.append((f"{(i + 0.06) * width:.1f}", f"{high:.1f}", f"{0.88 * width:.1f}", height, f"s{k}"))
        base = base + own
    ranges = [(first, after - 1) for first, after in zip(edges, edges[1:], strict=False)]
    labels = [f"{grouped(a)} {unit}" if a == b else f"{grouped(a)} to {grouped(b)} {unit}" for a, b in ranges]
    single = edges[-1] - edges[0] == number  # a bin for each number: its label is below its middle
    labelled = range(0, number + (not single), max(1, round(number / _BIN_LABELS)))
    values = [
        {"n": f"{name} ({count})" if name else count, "c": k % NUM_COLOURS,
         "p": [[i + 0.5, int(n)] for i, n in enumerate(counts[name])]}
        for k, name in enumerate(groups)
    ]  # fmt: skip
    legend = [(f"s{k % NUM_COLOURS}", name) for k, name in enumerate(groups) if name]
    legend += [] if limit is None else [("limit", f"{limit[0]} {grouped(limit[1])}")]
    total = grouped(sum(map(len, groups.values())))
    return Figure(
        title=title,
        spoken=f"{title}: {total} {count} of {number_text(edges[0])} to {number_text(edges[-1] - 1)} {unit}",
        notes=[],
        legend=legend,
        grid=frame.grid,
        y_labels=frame.labels(number_text),
        x_labels=[(grouped(edges[i]), f"{100 * (i + 0.5 * single) / number:.2f}") for i in labelled],
        values={"x": unit, "left": 0, "right": number, "labels": labels, "series": values},
        bars=bars,
        limit=None if limit is None else f"{position(edges, limit[1]) * width:.1f}",
    )


def edges_of(values: NDArray[Any], *within: int) -> list[int]:
    """The limits of the bins, whole numbers: all values are in a bin, and ``within`` are within the axis. Where the
    values are spread widely, the limits grow by a factor.
    """
    low, high = min([int(values.min()), *within]), max([int(values.max()), *within])
    if high - low < NUM_BINS:
        return [*range(low, high + 2)]
    if high / max(float(np.percentile(values, 5)), 1.0) > _WIDE_RATIO:
        spread = np.round(np.geomspace(max(low, 1), high + 1, NUM_BINS + 1)).astype(int).tolist()
        return sorted({low, *spread})
    step = -(-(high + 1 - low) // NUM_BINS)
    return [*range(low, high + step + 1, step)]


def position(edges: Sequence[int], value: float) -> float:
    """Where a value is on the axis, in bins; after the values that are equal to it."""
    k = min(max(bisect_right(edges, value) - 1, 0), len(edges) - 2)
    return k + min((value + 1 - edges[k]) / (edges[k + 1] - edges[k]), 1.0)
