"""Values of a metric with where they come from: stored as JSON, and compared where they are alike.

Two results whose numbers are unlike are refused; the difference of others has an interval, the paired percentile
bootstrap (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13; for metrics of a corpus: Koehn,
"Statistical Significance Tests for Machine Translation Evaluation", EMNLP 2004): draw r is the same samples on both
sides, so the differences of the draws are a sample of the difference.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel

from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.system.files import write_text_atomic

FORMAT = 1
REQUIRED = ("metric", "version", "settings", "resize", "precision", "seed", "model", "num_samples", "checkpoint")
"""Of every stored provenance."""
MAY_DIFFER = frozenset({"checkpoint", "resampling"})
"""What is compared, and what changes no value."""
NO_DRAWS = "none, since "
"""Begins a recorded ``resampling`` that has a reason for having no draws."""
_REMEDY = "EvaluateHook draws no samples again; for one: tools/evaluate.py CKPT --metrics ... --out FILE, of both"


@dataclass(frozen=True)
class Result:
    """The values of one metric."""

    values: Mapping[str, float]
    """Name -> value."""
    provenance: Mapping[str, str]
    """``REQUIRED``, and what else the metric and its caller record."""
    replicates: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Name -> the values of bootstrap samples, of which draw r is the same samples in every result."""

    def with_prefix(self, set_name: str) -> Result:
        """The same, with ``set_name`` before all names: of one of several sets of validation data."""
        return Result(
            {f"{set_name}{name}": value for name, value in self.values.items()},
            {**self.provenance, "metric": f"{set_name}{self.provenance['metric']}"},
            {f"{set_name}{name}": draws for name, draws in self.replicates.items()},
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values; a number that is not finite is null, which JSON has."""

        def finite(value: float) -> float | None:
            return float(value) if math.isfinite(value) else None

        return {
            "values": {name: finite(value) for name, value in self.values.items()},
            "provenance": dict(self.provenance),
            "replicates": {name: [finite(one) for one in draws] for name, draws in self.replicates.items()},
        }


def write_results(path: Path, results: Sequence[Result]) -> None:
    """Store results in one file, completely or not at all."""
    content = {"format": FORMAT, "results": [result.as_json() for result in results]}
    write_text_atomic(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


class _StoredResult(BaseModel, strict=True):
    values: dict[str, float | None]
    provenance: dict[str, str]
    replicates: dict[str, list[float | None]]


class _StoredFile(BaseModel, strict=True):
    format: Literal[1]
    results: list[_StoredResult]


def read_results(path: Path) -> list[Result]:
    """The results of a file. Raises ``DataError`` naming what is wrong with it."""
    try:
        stored = _StoredFile.model_validate_json(path.read_bytes()).results
    except (OSError, ValueError) as error:
        problem = f"{path} is no file of results: {' '.join(str(error).split())[:300]}"
        raise DataError(problem, allowed="a file that an evaluation wrote") from error
    missing = [name for one in stored for name in REQUIRED if name not in one.provenance]
    if missing:
        raise DataError(f"{path} has results without {', '.join(missing)}", remedy="evaluate it again")

    def number(value: float | None) -> float:
        return math.nan if value is None else value

    return [
        Result(
            {name: number(value) for name, value in one.values.items()},
            one.provenance,
            {name: [*map(number, draws)] for name, draws in one.replicates.items()},
        )
        for one in stored
    ]


@dataclass(frozen=True)
class Difference:
    """One value of two evaluations; ``difference`` is b - a."""

    name: str
    a: float
    b: float
    low: float | None
    """Bounds of the interval; None: there is none, for the reason ``note``."""
    high: float | None
    note: str = ""

    @property
    def difference(self) -> float:
        return self.b - self.a

    def __str__(self) -> str:
        interval = self.note if self.low is None else f"95 % interval {self.low:+.6g} to {self.high:+.6g}"
        return f"{self.name}: {self.a:.6g} -> {self.b:.6g}, difference {self.difference:+.6g} ({interval})"


def unlike(a: Result, b: Result) -> list[str]:
    """Why the values of two results cannot be compared: a line for each part of the provenance that differs."""
    names = [name for name in dict.fromkeys((*a.provenance, *b.provenance)) if name not in MAY_DIFFER]
    reasons = [
        f"{name} is {a.provenance.get(name, 'not recorded')} and {b.provenance.get(name, 'not recorded')}"
        for name in names
        if a.provenance.get(name) != b.provenance.get(name)
    ]
    if set(a.values) != set(b.values):
        reasons.append(f"the values are {', '.join(sorted(a.values))} and {', '.join(sorted(b.values))}")
    return reasons


def compare(a: Result, b: Result) -> list[Difference]:
    """The difference of each value. Raises ``ConfigError`` with every reason where the results are unlike."""
    reasons = unlike(a, b)
    if reasons:
        raise ConfigError(
            f"{a.provenance['metric']} cannot be compared: {'; '.join(reasons)}",
            remedy="evaluate both checkpoints again with the same metric, samples and settings",
        )
    resampling = [result.provenance.get("resampling", "") for result in (a, b)]
    why = next((one.removeprefix(NO_DRAWS) for one in resampling if one.startswith(NO_DRAWS)), _REMEDY)
    differences = []
    for name in a.values:
        draws = [np.asarray(result.replicates.get(name, ()), dtype=np.float64) for result in (a, b)]
        low = high = note = None
        if not len(draws[0]) or not len(draws[1]):
            note = f"no interval: {why}"
        elif len(draws[0]) != len(draws[1]) or resampling[0] != resampling[1]:
            note = f"no interval: resampled with {' and '.join(resampling)}"
        elif not np.isfinite(draws[0] - draws[1]).all():
            note = "no interval: a draw has no finite value"
        else:
            low, high = map(float, np.quantile(draws[1] - draws[0], [0.025, 0.975]))
        differences.append(Difference(name, a.values[name], b.values[name], low, high, note or ""))
    return differences


def compare_files(a: Path, b: Path) -> tuple[list[Difference], list[str]]:
    """All metrics of two files of results, and why others are not compared. Raises ``DataError`` for a file that cannot
    be read.
    """
    sides = [{result.provenance["metric"]: result for result in read_results(path)} for path in (a, b)]
    differences: list[Difference] = []
    refusals: list[str] = []
    for metric in dict.fromkeys((*sides[0], *sides[1])):
        missing = [path for path, side in zip((a, b), sides, strict=True) if metric not in side]
        if missing:
            refusals.append(f"{metric} is not in {missing[0]}")
            continue
        try:
            differences += compare(sides[0][metric], sides[1][metric])
        except ConfigError as error:
            refusals.append(str(error))
    return differences, refusals
