"""Validations and evaluations of a run: lines of ``metrics.jsonl`` and files of results."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from unigen_ds.core.errors import CheckpointError
from unigen_ds.core.json_values import member_names
from unigen_ds.evaluation.jobs.evaluation_job import RESULT, numbers_of, read_result
from unigen_ds.evaluation.metric_lines import Line, number
from unigen_ds.system.journals import METRICS_FILE

RESULTS = "eval_results"
SCORES = "evaluations"
"""Of the metrics of ``EvaluateHook``, whose lines in ``metrics.jsonl`` have the same values without provenance."""
STATISTICS = "training_stats"
"""Event of the lines with the statistics over ranks."""
Problems = list[tuple[str, str]]
"""Names of files and what is wrong with them."""
T = TypeVar("T")
_POSITION = {"update", "iteration", "epoch", "sequences", "samples", "tokens", "updates"}


@dataclass(frozen=True)
class Evaluated:
    """A validation or an evaluation: a line of ``metrics.jsonl``, or a file of results."""

    update: int | None
    values: Mapping[str, float]
    provenance: Mapping[str, Any]
    origin: str


def evaluations(path: Path, lines: Iterable[Line], config: Mapping[str, Any], problems: Problems) -> list[Evaluated]:
    """Those of the valid lines, and of ``eval_results/**/*.json``, ``evaluations/*.json`` and ``results.json``: what
    ``write_results`` wrote, ``{"values", "provenance"}``, or names and numbers. A value that a file has with its
    provenance is left out of the lines. The result of another process is read by the rules of ``AsyncEvaluateHook``,
    and has the names that it logs.
    """
    lines = [line for line in lines if "update" in line and line.get("event") != STATISTICS]
    prefix = _async_prefix(config, lines)
    scores = sorted((path / SCORES).glob("*.json"), key=lambda file: (len(file.name), file.name))
    of_files: list[Evaluated] = []
    for file in (*sorted((path / RESULTS).rglob("*.json")), *scores, *path.glob("results.json")):
        name = str(file.relative_to(path))
        content = json_object(file, problems, name=name)
        if content is None:
            continue
        update = re.search(r"(\d{1,18})\.json$", file.name)
        of_process = prefix is not None and file.is_relative_to(path / RESULTS) and RESULT.fullmatch(file.name)
        listed = content.get("results")
        parts = (
            listed if isinstance(listed, list) else [content if "values" in content else {"values": listed or content}]
        )
        values = []
        try:
            if of_process:
                read_result(file, update=int(of_process[1]))
            for part in parts:
                numbers, _ = numbers_of(part["values"])
                values.append({key: n for key, n in numbers.items() if math.isfinite(n) and key not in _POSITION})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            by_rule = f"is not logged by AsyncEvaluateHook: {error}" if of_process else "has no results"
            problems.append((name, by_rule))
            continue
        if not all(values):
            problems.append((name, f"{values.count({})} of {len(values)} results have no number"))
        origin = RESULTS if of_process else SCORES if file in scores else name
        for part, own in zip(parts, values, strict=True):
            if of_process:
                own = {f"{prefix}/{key}": n for key, n in own.items()}
            elif file in scores:
                own = {key if key.startswith("val/") else f"val/{key}": n for key, n in own.items()}
            if own:
                of_files.append(Evaluated(int(update[1]) if update else None, own, _provenance(part), origin))
    stored = {(one.update, key) for one in of_files for key in one.values}
    of_lines = []
    for line in lines:
        event = line.get("event")
        candidates = {key: number(line[key]) for key in line if event is not None or key.startswith("val/")}
        own = {
            key: n
            for key, n in candidates.items()
            if n is not None and key not in _POSITION and (line["update"], key) not in stored
        }
        if own:
            origin = METRICS_FILE if event is None else f"{METRICS_FILE}, {event}"
            of_lines.append(Evaluated(line["update"], own, _provenance(line), origin))
    return [*of_lines, *of_files]


def _provenance(content: Mapping[str, Any]) -> Mapping[str, Any]:
    provenance = content.get("provenance")
    return provenance if isinstance(provenance, Mapping) else {}


def _async_prefix(config: Mapping[str, Any], lines: Iterable[Line]) -> str | None:
    """Return the prefix of the names that ``AsyncEvaluateHook`` logs; None: the run has no such hook."""
    hooks = config.get("custom_hooks")
    for hook in hooks if isinstance(hooks, list) else ():
        if isinstance(hook, Mapping) and str(hook.get("type")).rpartition(".")[2] == "AsyncEvaluateHook":
            return str(hook.get("prefix", "lmms_eval"))
    names = (key for line in lines if line.get("event") == "async_evaluation" for key in line)
    return next((key.partition("/")[0] for key in names if "/" in key), None)


def flat(config: Mapping[str, Any], prefix: str = "", *, by_name: bool = False) -> dict[str, Any]:
    """Dotted key -> value; members of a list by index, or ``by_name``: as ``member_names`` has them."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        name, members = f"{prefix}{key}", value
        if isinstance(value, list) and any(isinstance(member, Mapping) for member in value):
            names = member_names(value) if by_name else map(str, range(len(value)))
            members = dict(zip(names, value, strict=True))
        if isinstance(members, Mapping) and members:
            values |= flat({str(k): v for k, v in members.items()}, f"{name}.", by_name=by_name)
        else:
            values[name] = value
    return values


def attempt(name: str, read: Callable[[], T], default: T, problems: Problems) -> T:
    """What ``read`` returns. Where it fails: ``default``, and one more of ``problems``."""
    try:
        return read()
    except FileNotFoundError:
        problems.append((name, "is missing"))
    except CheckpointError as error:
        problems.append((name, str(error)))
    except (OSError, ValueError, RecursionError) as error:
        problems.append((name, f"cannot be read: {type(error).__name__}: {error}"[:300]))
    return default


def json_object(file: Path, problems: Problems, *, name: str | None = None) -> dict[str, Any] | None:
    """A file's object. None, and one more of ``problems``, where it has none."""
    name = name or file.name
    content = attempt(name, lambda: json.loads(file.read_text(encoding="utf-8")), None, more := Problems())
    if not more and not isinstance(content, dict):
        more.append((name, f"has a {type(content).__name__}, not an object"))
    problems += more
    return content if isinstance(content, dict) else None
