"""Line charts as inline SVG with labels in HTML, so that text keeps its size at every width.

The SVG is stretched to its frame (``preserveAspectRatio="none"``; strokes keep their width); labels are placed in
percent. The numbers are in the page once more as JSON, for the values under the pointer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from unigen_ds.evaluation.report.markup import Html, grouped, join, number_text, script_json, tag

WIDTH, HEIGHT = 1000, 300
NUM_COLOURS = 8
MOST_POINTS = 800
"""Of a series; from more of them the smallest and the largest of each interval are drawn."""
_LOG_RATIO = 30.0
_SMOOTHED_FROM = 80
_LABEL_DISTANCE = 3.0  # percent of the width


@dataclass(frozen=True)
class Series:
    """A curve. ``points`` are (x, y), ordered by x."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    style: str = ""
    """``faint`` for work that does not count, ``dots`` for few values."""
    scale: bool = True
    """Whether it takes part in the choice of the axes."""
    smooth: bool = True
    """Whether a long curve is drawn smoothed, over its values."""


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
    x_label: str,
    marks: Sequence[Mark] = (),
    unit: str = "",
    log: bool | None = None,
    compact: bool = False,
    named: bool = False,
) -> Html | None:
    """A figure; None where no series has a point. ``log``: the scale of y; None chooses it from the values.
    ``named``: whether a single curve has its name below the title, too.
    """
    drawn = [one for one in series if one.points]
    if not drawn:
        return None
    frame = Frame.around(drawn, log=log)
    heights = [(_tick(y), f"top:{100 * frame.y(y) / HEIGHT:.2f}%") for y in frame.ticks]
    plot = tag(
        "div",
        tag("div", *(tag("span", text, style=height) for text, height in heights), class_="y"),
        tag("svg", *_paths(drawn, marks, frame), viewBox=f"0 0 {WIDTH} {HEIGHT}", preserveAspectRatio="none",
            aria_hidden="true"),
        tag("div", *_flags(marks, frame), class_="flags"),
        tag("div", *_x_labels(frame.left, frame.right), class_="x"),
        tag("div", class_="cursor", hidden=""),
        tag("script", script_json(_values(drawn, frame, x_label)), type="application/json"),
        class_="plot",
        role="img",
        aria_label=f"{title}: {drawn[0].name} from {number_text(drawn[0].points[0][1])} to"
        f" {number_text(drawn[0].points[-1][1])}",
    )  # fmt: skip
    notes = [unit] if unit else []
    if frame.log:
        notes.append("logarithmic scale")
    if any(len(one.points) > MOST_POINTS for one in drawn):
        most = max(len(one.points) for one in drawn)
        notes.append(f"extremes of {MOST_POINTS // 2} intervals of up to {grouped(most)} values")
    legend = tag("ul", *(_key(one) for one in drawn), class_="legend") if named or len(drawn) > 1 else None
    head = tag("figcaption", tag("h4", title), tag("p", " · ".join(notes)) if notes else None, legend)
    return tag("figure", head, plot, class_="chart compact" if compact else "chart")


@dataclass(frozen=True)
class Frame:
    """The limits of both axes, and the values of y that have a line."""

    left: float
    right: float
    low: float
    high: float
    ticks: Sequence[float]
    log: bool

    @classmethod
    def around(cls, drawn: Sequence[Series], *, log: bool | None) -> Frame:
        """``log``: None chooses it from the values. A logarithmic scale needs values above 0."""
        values = [y for one in ([s for s in drawn if s.scale] or drawn) for _, y in one.points]
        positive = min(values) > 0
        log = positive and (max(values) / min(values) > _LOG_RATIO if log is None else log)
        low, high, ticks = _log_axis(values) if log else _axis(values)
        xs = [x for one in drawn for x, _ in one.points]
        left, right = min(xs), max(xs)
        margin = 0.5 if left == right else 0.0
        return cls(left - margin, right + margin, low, high, ticks, log)

    def x(self, x: float) -> float:
        return (x - self.left) / (self.right - self.left) * WIDTH

    def y(self, y: float) -> float:
        """Values outside of the axis (of work that does not count) are drawn just beyond its end."""
        if self.log:
            share = math.log(max(y, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (y - self.low) / (self.high - self.low)
        return (1 - min(1.05, max(-0.05, share))) * HEIGHT


def _paths(drawn: Sequence[Series], marks: Sequence[Mark], frame: Frame) -> list[Html]:
    """Lines of the grid, marks, then the curves: a long one smoothed, over its values."""

    def curve(points: Sequence[tuple[float, float]], css: str) -> Html:
        text = "".join(f"{'L' if i else 'M'}{frame.x(x):.1f} {frame.y(y):.1f}" for i, (x, y) in enumerate(points))
        return tag("path", d=text + ("h0" if len(points) == 1 else ""), class_=css)  # h0: a dot

    heights = [f"{frame.y(y):.1f}" for y in frame.ticks]
    paths = [tag("line", x1=0, x2=WIDTH, y1=y, y2=y, class_="grid") for y in heights]
    for mark in marks:
        if frame.left <= mark.x <= frame.right:
            x = f"{frame.x(mark.x):.1f}"
            paths.append(tag("line", x1=x, x2=x, y1=0, y2=HEIGHT, class_=f"mark {mark.kind}"))
    for one in drawn:
        points, css = reduced(one.points), f"s{one.colour % NUM_COLOURS}"
        css += " dash" if one.colour >= NUM_COLOURS else ""
        if one.smooth and one.style != "faint" and len(one.points) >= _SMOOTHED_FROM:
            paths.append(curve(points, f"{css} raw"))
            points = reduced(smoothed(one.points))
        paths.append(curve(points, f"{css} {one.style}".strip()))
    return paths


def _values(drawn: Sequence[Series], frame: Frame, x_label: str) -> dict[str, object]:
    """What the script shows under the pointer."""
    shown = [one for one in drawn if one.style != "faint"]
    series = [
        {"n": one.name, "c": one.colour % NUM_COLOURS, "p": [[_short(x), _short(y)] for x, y in reduced(one.points)]}
        for one in shown
    ]
    return {"x": x_label, "left": frame.left, "right": frame.right, "series": series}


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The mean of a window of a fortieth of the values, centred; shorter at both ends."""
    half = max(1, len(points) // 80)
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    found = []
    for i, (x, _) in enumerate(points):
        reach = min(half, i, len(points) - 1 - i)
        found.append((x, (sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1)))
    return found


def reduced(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """At most about ``MOST_POINTS``: the smallest and the largest value of each interval, in their order."""
    if len(points) <= MOST_POINTS:
        return points
    size = len(points) / (MOST_POINTS // 2)
    found = [points[0]]
    for i in range(MOST_POINTS // 2):
        part = points[int(i * size) : int((i + 1) * size)]
        found += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return [*found, points[-1]]


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


def _x_labels(left: float, right: float) -> list[Html]:
    step = max(1.0, _step((right - left) / 6)) if right - left >= 5 else _step((right - left) / 5)
    first = math.ceil(left / step)
    ticks = [i * step for i in range(first, math.floor(right / step + 1e-9) + 1)]
    return [tag("span", _tick(x), style=f"left:{100 * (x - left) / (right - left):.2f}%") for x in ticks]


def _flags(marks: Sequence[Mark], frame: Frame) -> list[Html]:
    """Labels of marks; one that would cover the label before it is left out (its line is drawn)."""
    found: list[Html] = []
    before = -math.inf
    for mark in marks:
        position = 100 * frame.x(mark.x) / WIDTH
        if 0 <= position <= 100 and position - before >= _LABEL_DISTANCE:
            found.append(tag("span", mark.label, class_=mark.kind, title=mark.text, style=f"left:{position:.2f}%"))
            before = position
    return found


def _key(one: Series) -> Html:
    colour = "faint" if one.style == "faint" else f"s{one.colour % NUM_COLOURS}"
    line = "faint" if one.style == "faint" else "dash" if one.colour >= NUM_COLOURS else ""
    return tag("li", tag("i", class_=f"{colour} {line}".strip()), one.name)


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def bar(parts: Sequence[tuple[str, str, float]], *, spoken: str) -> Html:
    """One horizontal bar of (css class, title, share 0 .. 1)."""
    shown = [
        tag("span", class_=css, title=title, style=f"width:{100 * share:.3f}%")
        for css, title, share in parts
        if share > 0
    ]
    return tag("div", join(shown), class_="bar", role="img", aria_label=spoken)
