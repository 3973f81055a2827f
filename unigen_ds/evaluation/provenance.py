"""Values of a metric with where they come from: stored as JSON, and compared where they are alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator

from unigen_ds.core.errors import DataError
from unigen_ds.system.files import write_text_atomic

REQUIRED_KEYS = ("metric", "version", "settings", "resize", "precision", "seed", "model", "num_samples", "checkpoint")
"""Keys that every stored provenance has."""


@dataclass(frozen=True)
class Result:
    """The values of one metric."""

    values: Mapping[str, Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]]
    """Name -> value; in a file a number that is not finite is null, which JSON has."""
    provenance: Mapping[str, str]
    """``REQUIRED_KEYS``, and what else the metric and its caller record."""


class _StoredFile(BaseModel, strict=True):
    format: Literal[1]
    results: list[Result]


def write_results(path: Path, results: Sequence[Result]) -> None:
    """Store results in one file, completely or not at all."""
    file = _StoredFile.model_validate({"format": 1, "results": [*map(vars, results)]}, strict=False)
    write_text_atomic(path, file.model_dump_json(indent=1) + "\n")


def read_results(path: Path) -> list[Result]:
    """The results of a file. Raises ``DataError`` naming what is wrong with it."""
    try:
        results = _StoredFile.model_validate_json(path.read_bytes()).results
    except (OSError, ValueError) as error:
        problem = f"{path} is no file of results: {' '.join(str(error).split())[:300]}"
        raise DataError(problem, allowed="a file that an evaluation wrote") from error
    missing = [name for one in results for name in REQUIRED_KEYS if name not in one.provenance]
    if missing:
        raise DataError(f"{path} has results without {', '.join(missing)}", remedy="evaluate it again")
    return results


def unlike(a: Result, b: Result) -> list[str]:
    """Why the values of two results cannot be compared: a line for each part of the provenance that differs."""
    reasons = [
        f"{name} is {a.provenance.get(name, 'not recorded')} and {b.provenance.get(name, 'not recorded')}"
        for name in dict.fromkeys((*a.provenance, *b.provenance))
        if name != "checkpoint" and a.provenance.get(name) != b.provenance.get(name)
    ]
    if set(a.values) != set(b.values):
        reasons.append(f"the values are {', '.join(sorted(a.values))} and {', '.join(sorted(b.values))}")
    return reasons


def compare_files(a: Path, b: Path) -> tuple[dict[str, tuple[float, float]], list[str]]:
    """Name -> both values, of the metrics of two files; and why others cannot be compared. Raises ``DataError``."""
    sides = [{result.provenance["metric"]: result for result in read_results(path)} for path in (a, b)]
    pairs: dict[str, tuple[float, float]] = {}
    refusals: list[str] = []
    for metric in dict.fromkeys((*sides[0], *sides[1])):
        missing = [path for path, side in zip((a, b), sides, strict=True) if metric not in side]
        if missing:
            refusals.append(f"{metric} is not in {missing[0]}")
            continue
        first, second = (side[metric] for side in sides)
        if reasons := unlike(first, second):
            refusals.append(
                f"{metric} cannot be compared: {'; '.join(reasons)}. Remedy: evaluate both checkpoints again with the"
                " same metric, samples and settings"
            )
        else:
            pairs |= {name: (value, second.values[name]) for name, value in first.values.items()}
    return pairs, refusals
