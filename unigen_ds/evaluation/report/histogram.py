"""Histograms in the style of the line charts: stacked bars of one height for each bin, the numbers once more as JSON.

Bins are of equal width on the page. Where the values are spread widely, their limits grow by a factor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unigen_ds.evaluation.report.charts import HEIGHT, NUM_COLOURS, WIDTH, Frame, Series
from unigen_ds.evaluation.report.markup import Html, grouped, number_text, plural, script_json, tag

NUM_BINS = 48
_WIDE_RATIO = 20.0
_X_LABELS = 7


def histogram(
    title: str,
    groups: Mapping[str, NDArray[Any]],
    *,
    unit: str,
    count: str,
    limit: tuple[str, int] | None = None,
    note: str = "",
) -> Html | None:
    """A figure of whole numbers; None where there is none.

    Args:
        groups: name -> values, stacked in this order.
        unit: of the values: ``tokens``.
        count: what is counted: ``records``.
        limit: name and value of a line, which is always within the axis.
    """
    groups = _fewer({name: np.asarray(values) for name, values in groups.items() if len(values)})
    if not groups:
        return None
    edges = edges_of(np.concatenate([*groups.values()]), *([limit[1]] if limit else []))
    counts = {name: np.histogram(values, edges)[0] for name, values in groups.items()}
    top = int(np.sum([*counts.values()], axis=0).max())
    frame = Frame.around([Series("", [(0, 0), (len(edges) - 1, top)])], log=False)
    line = None if limit is None else position(edges, limit[1])
    labels = [_range_text(int(a), int(b) - 1, unit) for a, b in zip(edges, edges[1:], strict=False)]
    values = [
        {"n": f"{name} ({count})" if name else count, "c": k % NUM_COLOURS,
         "p": [[i + 0.5, int(number)] for i, number in enumerate(counts[name])]}
        for k, name in enumerate(groups)
    ]  # fmt: skip
    heights = [(number_text(y), f"top:{100 * frame.y(y) / HEIGHT:.2f}%") for y in frame.ticks]
    plot = tag(
        "div",
        tag("div", *(tag("span", text, style=height) for text, height in heights), class_="y"),
        tag("svg", *_shapes(counts, frame, line), viewBox=f"0 0 {WIDTH} {HEIGHT}", preserveAspectRatio="none",
            aria_hidden="true"),
        tag("div", *_x_labels(edges), class_="x"),
        tag("div", class_="cursor", hidden=""),
        tag("script", script_json({"x": unit, "left": 0, "right": len(edges) - 1, "labels": labels, "series": values}),
            type="application/json"),
        class_="plot",
        role="img",
        aria_label=f"{title}: {grouped(sum(map(len, groups.values())))} {count} of {number_text(float(edges[0]))} to"
        f" {number_text(float(edges[-1] - 1))} {unit}",
    )  # fmt: skip
    keys = [tag("li", tag("i", class_=f"s{k % NUM_COLOURS}"), name) for k, name in enumerate(groups) if name]
    if limit is not None:
        keys.append(tag("li", tag("i", class_="limit"), f"{limit[0]} {grouped(limit[1])}"))
    head = tag("figcaption", tag("h4", title), tag("p", note) if note else None, tag("ul", *keys, class_="legend"))
    return tag("figure", head, plot, class_="chart compact")


def edges_of(values: NDArray[Any], *shown: int) -> list[int]:
    """The limits of the bins, whole numbers: all values are in a bin, and ``shown`` are within the axis."""
    low, high = min([int(values.min()), *shown]), max([int(values.max()), *shown])
    if high - low < NUM_BINS:
        return [*range(low, high + 2)]
    if high / max(float(np.percentile(values, 5)), 1.0) > _WIDE_RATIO:
        found = np.round(np.geomspace(max(low, 1), high + 1, NUM_BINS + 1)).astype(int).tolist()
        return sorted({low, *found})
    step = -(-(high + 1 - low) // NUM_BINS)
    return [*range(low, high + step + 1, step)]


def position(edges: Sequence[int], value: float) -> float:
    """Where a value is on the axis, in bins; after the values that are equal to it."""
    k = min(max(bisect_right(edges, value) - 1, 0), len(edges) - 2)
    return k + min((value + 1 - edges[k]) / (edges[k + 1] - edges[k]), 1.0)


def _fewer(groups: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """At most ``NUM_COLOURS`` groups: the last ones together."""
    names = [*groups]
    if len(names) <= NUM_COLOURS:
        return dict(groups)
    kept, rest = names[: NUM_COLOURS - 1], names[NUM_COLOURS - 1 :]
    joined = np.concatenate([groups[name] for name in rest])
    return {**{name: groups[name] for name in kept}, plural(len(rest), "further source"): joined}


def _shapes(counts: Mapping[str, NDArray[Any]], frame: Frame, line: float | None) -> list[Html]:
    heights = [f"{frame.y(y):.1f}" for y in frame.ticks]
    shapes = [tag("line", x1=0, x2=WIDTH, y1=y, y2=y, class_="grid") for y in heights]
    width = WIDTH / max(1, round(frame.right - frame.left))
    base: NDArray[Any] = np.zeros(len(next(iter(counts.values()))))
    for k, numbers in enumerate(counts.values()):
        for i in np.flatnonzero(numbers).tolist():
            low, high = frame.y(base[i]), frame.y(base[i] + numbers[i])
            shapes.append(tag("rect", x=f"{(i + 0.06) * width:.1f}", width=f"{0.88 * width:.1f}", y=f"{high:.1f}",
                              height=f"{max(low - high, 0.8):.1f}", class_=f"s{k % NUM_COLOURS}"))  # fmt: skip
        base = base + numbers
    if line is not None:
        x = f"{line * width:.1f}"
        shapes.append(tag("line", x1=x, x2=x, y1=0, y2=HEIGHT, class_="limit"))
    return shapes


def _x_labels(edges: Sequence[int]) -> list[Html]:
    number = len(edges) - 1
    every = max(1, round(number / _X_LABELS))
    single = edges[-1] - edges[0] == number  # a bin for each number: its label is below its middle
    shown = [*range(0, number, every)] if single else [*range(0, number + 1, every)]
    return [tag("span", grouped(edges[i]), style=f"left:{100 * (i + 0.5 * single) / number:.2f}%") for i in shown]


def _range_text(first: int, last: int, unit: str) -> str:
    return f"{grouped(first)} {unit}" if first == last else f"{grouped(first)} to {grouped(last)} {unit}"
