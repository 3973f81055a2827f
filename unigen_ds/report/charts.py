"""Line charts over updates as plain values for the template, which draws them as inline SVG with labels in HTML.

The SVG is stretched to its frame (``preserveAspectRatio="none"``; strokes keep their width); labels are placed in
percent. The numbers are in the page once more as JSON, for the values under the pointer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unigen_ds.report.document import group_digits, number_text

WIDTH, HEIGHT = 1000, 300
NUM_COLOURS = 8
MOST_POINTS = 800
"""Points of a series that are drawn; of more points, the smallest and the largest of each interval are."""
_LOG_RATIO = 30.0
_LONG = 80
"""Values from which on a curve is drawn as its moving average, too."""
_LABEL_DISTANCE = 3.0  # percent of the width
Points = NDArray[np.float64]
"""A row (x, y) for each point, in the order of x."""
NO_POINTS: Points = np.empty((0, 2))


@dataclass(frozen=True)
class Series:
    name: str
    points: Points
    colour: int = 0
    style: str = ""
    """``faint`` for work that does not count, and does not choose the axes; ``dots`` for few values."""
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


def chart(
    title: str,
    series: Sequence[Series],
    *,
    marks: Sequence[Mark] = (),
    unit: str = "",
    log: bool | None = None,
    compact: bool = True,
) -> dict[str, Any] | None:
    """What the macro ``chart`` of the template draws; None where no series has a point. Shapes are in units of the SVG,
    labels at percent of its width or height. ``log``: the scale of y, for values above 0; None chooses it."""
    curves = [one for one in series if len(one.points)]
    if not curves:
        return None
    ys = np.concatenate([one.points[:, 1] for one in ([s for s in curves if s.style != "faint"] or curves)])
    low, high = float(ys.min()), float(ys.max())
    log = low > 0 and (high / low > _LOG_RATIO if log is None else log)
    low, high, y_ticks = _log_axis(low, high) if log else _axis(low, high)
    left, right = (float(end([one.points[at, 0] for one in curves])) for end, at in ((min, 0), (max, -1)))
    if left == right:
        left, right = left - 0.5, right + 0.5

    def across(x: float) -> float:
        return (x - left) / (right - left) * WIDTH

    def down(y: float) -> float:
        """Values outside of the axis (of work that does not count) are drawn just beyond its end."""
        share = math.log(max(y, low) / low) / math.log(high / low) if log else (y - low) / (high - low)
        return (1 - min(1.05, max(-0.05, share))) * HEIGHT

    def path(points: Points) -> str:
        ends = [f"{across(x):.1f} {down(y):.1f}" for x, y in reduce_points(points).tolist()]
        return "M" + "L".join(ends) + ("h0" if len(ends) == 1 else "")

    paths: list[tuple[str, str]] = []
    legend = [("faint" if one.style == "faint" else one.css, one.name) for one in curves]
    for one in curves:
        css = f"{one.css} {one.style}".strip()
        if one.smooth and one.style != "faint" and len(one.points) >= _LONG:
            paths += [(path(one.points), f"{one.css} raw"), (path(moving_average(one.points)), css)]
        else:
            paths.append((path(one.points), css))
    flags, before = list[tuple[str, Mark]](), -math.inf
    for mark in marks:  # a label that would cover the one before it is left out; its line is drawn
        at = 100 * across(mark.x) / WIDTH
        if 0 <= at <= 100 and at - before >= _LABEL_DISTANCE:
            flags.append((f"{at:.2f}", mark))
            before = at
    step = max(1.0, _step((right - left) / 6)) if right - left >= 5 else _step((right - left) / 5)
    x_ticks = [i * step for i in range(math.ceil(left / step), math.floor(right / step + 1e-9) + 1)]
    values = [
        {"n": one.name, "c": one.colour % NUM_COLOURS,
         "p": [[float(f"{value:.6g}") for value in point] for point in reduce_points(one.points).tolist()]}
        for one in curves if one.style != "faint"
    ]  # fmt: skip
    most = max(len(one.points) for one in curves)
    notes = [
        unit,
        "logarithmic scale" if log else "",
        f"extremes of {MOST_POINTS // 2} intervals of up to {group_digits(most)} values" if most > MOST_POINTS else "",
    ]
    first, last = number_text(curves[0].points[0][1]), number_text(curves[0].points[-1][1])
    return {
        "title": title,
        "spoken": f"{title}: {curves[0].name} from {first} to {last}",
        "notes": [note for note in notes if note],
        "legend": legend if len(legend) > 1 else [],
        "grid": [f"{down(y):.1f}" for y in y_ticks],
        "y_labels": [(_tick(y), f"{100 * down(y) / HEIGHT:.2f}") for y in y_ticks],
        "x_labels": [(_tick(x), f"{across(x) / WIDTH:.2%}"[:-1]) for x in x_ticks],
        "data": {"x": "update", "left": left, "right": right, "series": values},
        "compact": compact,
        "marks": [(f"{across(one.x):.1f}", one.kind) for one in marks if left <= one.x <= right],
        "flags": flags,
        "paths": paths,
    }


def moving_average(points: Points) -> Points:
    """The mean of a window of a fortieth of the values, centred; shorter at both ends."""
    at, sums = np.arange(len(points)), np.cumsum(np.append(0.0, points[:, 1]))
    reach = np.minimum(max(1, len(points) // 80), np.minimum(at, at[::-1]))
    means = (sums[at + reach + 1] - sums[at - reach]) / (2 * reach + 1)
    return np.stack((points[:, 0], means), axis=1)


def reduce_points(points: Points) -> Points:
    """Return about ``MOST_POINTS`` at most: the smallest and the largest value of each interval, in their order."""
    if len(points) <= MOST_POINTS:
        return points
    size = len(points) / (MOST_POINTS // 2)
    rows = [0]
    for i in range(MOST_POINTS // 2):
        first, stop = int(i * size), int((i + 1) * size)
        part = points[first:stop, 1]
        rows += sorted({first + int(part.argmin()), first + int(part.argmax())})
    return points[[*rows, -1]]


def _axis(low: float, high: float) -> tuple[float, float, list[float]]:
    if low == high:
        low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
    if 0 < low < 0.4 * high:
        low = 0.0
    step = _step((high - low) / 4)
    ticks = [step * i for i in range(math.floor(low / step), math.ceil(high / step) + 1)]
    return ticks[0], ticks[-1], ticks


def _log_axis(low: float, high: float) -> tuple[float, float, list[float]]:
    low, high = low / 1.1, high * 1.1
    exponents = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    ticks = [10.0**e for e in exponents if low <= 10.0**e <= high]
    if len(ticks) < 3:
        ticks = [m * 10.0**e for e in exponents for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    return low, high, ticks[:: math.ceil(len(ticks) / 6) or 1]


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
