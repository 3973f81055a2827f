"""A metric's values with where they come from, as JSON: what ``comparison`` reads."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unigen_ds.core.errors import DataError
from unigen_ds.system.files import write_text_atomic

FORMAT = 1
REQUIRED = ("metric", "version", "settings", "resize", "precision", "seed", "model", "num_samples", "checkpoint")
"""Of every stored provenance."""


@dataclass(frozen=True)
class Result:
    """The values of one metric."""

    values: Mapping[str, float]
    """Name -> value."""
    provenance: Mapping[str, str]
    """``REQUIRED``, and what else the metric and its caller record."""
    replicates: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Name -> the values of bootstrap samples, of which draw r is the same samples in every result."""

    def named(self, set_name: str) -> Result:
        """The same, with ``set_name`` before all names: of one of several sets of validation data."""
        return Result(
            {f"{set_name}{name}": value for name, value in self.values.items()},
            {**self.provenance, "metric": f"{set_name}{self.provenance['metric']}"},
            {f"{set_name}{name}": drawn for name, drawn in self.replicates.items()},
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values; a number that is not finite is null, which JSON has."""
        return {
            "values": {name: _finite(value) for name, value in self.values.items()},
            "provenance": dict(self.provenance),
            "replicates": {name: [_finite(one) for one in drawn] for name, drawn in self.replicates.items()},
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
            {name: [_number(one) for one in drawn] for name, drawn in replicates.items()},
        )
    except TypeError as error:
        raise DataError(f"{where}: {error}") from error


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _number(value: Any) -> float:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise TypeError(f"{value!r} is no number")
    return math.nan if value is None else float(value)
