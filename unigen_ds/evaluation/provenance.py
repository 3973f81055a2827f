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
from typing import Any

import numpy as np

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
        return {
            "values": {name: _finite(value) for name, value in self.values.items()},
            "provenance": dict(self.provenance),
            "replicates": {name: [_finite(one) for one in draws] for name, draws in self.replicates.items()},
        }


def write_results(path: Path, results: Sequence[Result]) -> None:
    """Store results in one file, completely or not at all."""
    content = {"format": FORMAT, "results": [result.as_json() for result in results]}
    write_text_atomic(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def read_results(path: Path) -> list[Result]:
    """The results of a file. Raises ``DataError`` naming what is wrong with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", allowed="a file that an evaluation wrote") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("results"), list):
        raise DataError(f"{path} is no file of results", allowed=f"JSON with format {FORMAT} and a list of results")
    return [_result(entry, where=f"{path}: result {number}") for number, entry in enumerate(content["results"])]


def _result(entry: Any, *, where: str) -> Result:
    names = ("values", "provenance", "replicates")
    parts = [entry[name] for name in names if isinstance(entry, dict) and isinstance(entry.get(name), dict)]
    if len(parts) < len(names):
        raise DataError(f"{where} has not the three objects values, provenance and replicates")
    values, provenance, replicates = parts
    missing = [name for name in REQUIRED if not isinstance(provenance.get(name), str)]
    if missing:
        raise DataError(f"{where} has no provenance {', '.join(missing)}", remedy="evaluate it again")
    try:
        return Result(
            {name: _number(value) for name, value in values.items()},
            provenance,
            {name: [_number(one) for one in draws] for name, draws in replicates.items()},
        )
    except TypeError as error:
        raise DataError(f"{where}: {error}") from error


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _number(value: Any) -> float:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise TypeError(f"{value!r} is no number")
    return math.nan if value is None else float(value)


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


@dataclass(frozen=True)
class Comparison:
    """Two files of results."""

    differences: Sequence[Difference]
    refusals: Sequence[str]
    """Why a metric is not compared, in words; empty: all are."""


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


def compare(a: Result, b: Result, *, level: float = 0.95) -> list[Difference]:
    """The difference of each value. Raises ``ConfigError`` with every reason where the results are unlike."""
    reasons = unlike(a, b)
    if reasons:
        raise ConfigError(
            f"{a.provenance['metric']} cannot be compared: {'; '.join(reasons)}",
            remedy="evaluate both checkpoints again with the same metric, samples and settings",
        )
    return [_difference(a, b, name, level) for name in a.values]


def _difference(a: Result, b: Result, name: str, level: float) -> Difference:
    draws = [np.asarray(result.replicates.get(name, ()), dtype=np.float64) for result in (a, b)]
    note = ""
    if not len(draws[0]) or not len(draws[1]):
        reasons = [result.provenance.get("resampling", "") for result in (a, b)]
        why = next((one.removeprefix(NO_DRAWS) for one in reasons if one.startswith(NO_DRAWS)), "")
        note = f"no interval: {why or _REMEDY}"
    elif len(draws[0]) != len(draws[1]) or a.provenance.get("resampling") != b.provenance.get("resampling"):
        descriptions = [
            result.provenance.get("resampling", f"{len(one)} draws") for result, one in zip((a, b), draws, strict=True)
        ]
        note = f"no interval: resampled with {descriptions[0]} and {descriptions[1]}"
    elif not np.isfinite(draws[0] - draws[1]).all():
        note = "no interval: a draw has no finite value"
    if note:
        return Difference(name, a.values[name], b.values[name], None, None, note)
    low, high = np.quantile(draws[1] - draws[0], [(1 - level) / 2, (1 + level) / 2])
    return Difference(name, a.values[name], b.values[name], float(low), float(high))


def compare_files(a: Path, b: Path) -> Comparison:
    """All metrics of two files of results. Raises ``DataError`` for a file that cannot be read."""
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
    return Comparison(differences, refusals)
