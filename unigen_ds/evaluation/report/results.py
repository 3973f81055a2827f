"""Validations and evaluations of a run: lines of ``metrics.jsonl`` and files of results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unigen_ds.core.json_values import member_names
from unigen_ds.core.metrics import METRICS_FILE
from unigen_ds.evaluation.jobs import RESULT, numbers_of, read_result
from unigen_ds.evaluation.report.lines import Line, is_count, number

RESULTS = "eval_results"
SCORES = "evaluations"
"""Of the metrics of ``EvaluateHook``, whose lines in ``metrics.jsonl`` have the same values without provenance."""
STATISTICS = "training_stats"
"""Event of the lines with the statistics over ranks."""
_POSITION = {"update", "iteration", "epoch", "sequences", "samples", "tokens", "updates"}


@dataclass(frozen=True)
class Evaluated:
    """A validation or an evaluation: a line of ``metrics.jsonl``, or a file of results."""

    update: int | None
    values: Mapping[str, float]
    provenance: Mapping[str, Any]
    origin: str


def of_lines(lines: Iterable[Line]) -> list[Evaluated]:
    """Of lines with an event, and of those of updates that have ``val/...``."""
    found = []
    for line in lines:
        event = line.get("event")
        if event == STATISTICS:
            continue
        names = [key for key in line if key.startswith("val/")] if event is None else [*line]
        values = {key: n for key in names if key not in _POSITION and (n := number(line[key])) is not None}
        given = line.get("provenance")
        if values and "update" in line:
            origin = METRICS_FILE if event is None else f"{METRICS_FILE}, {event}"
            found.append(Evaluated(line["update"], values, given if isinstance(given, Mapping) else {}, origin))
    return found


def once(lines: Iterable[Evaluated], files: Sequence[Evaluated]) -> list[Evaluated]:
    """Without the values of lines that a file has with their provenance."""
    stored = {(one.update, key) for one in files for key in one.values}
    kept = [
        replace(line, values={key: n for key, n in line.values.items() if (line.update, key) not in stored})
        for line in lines
    ]
    return [*(line for line in kept if line.values), *files]


def async_prefix(config: Mapping[str, Any], lines: Iterable[Line]) -> str | None:
    """Of the names that ``AsyncEvaluateHook`` logs; None: the run has no such hook."""
    hooks = config.get("custom_hooks")
    for hook in hooks if isinstance(hooks, list) else ():
        if isinstance(hook, Mapping) and str(hook.get("type")).rpartition(".")[2] == "AsyncEvaluateHook":
            return str(hook.get("prefix", "lmms_eval"))
    names = (key for line in lines if line.get("event") == "async_evaluation" for key in line)
    return next((key.partition("/")[0] for key in names if "/" in key), None)


def _of_process(file: Path, content: Line, update: int, prefix: str) -> list[Evaluated]:
    """A result by the rules and with the names of ``AsyncEvaluateHook``. Raises ``ValueError`` where it refuses it."""
    read_result(file, update=update)
    listed = content["results"]
    parts = listed if isinstance(listed, list) else [{"values": listed}]
    found = []
    for part in parts:
        values = {f"{prefix}/{key}": n for key, value in numbers_of(part["values"]).items() if (n := number(value))
                  is not None}  # fmt: skip
        given = part.get("provenance")
        found.append(Evaluated(update, values, given if isinstance(given, Mapping) else {}, RESULTS))
    return [one for one in found if one.values]


def of_files(path: Path, problems: list[tuple[str, str]], *, prefix: str | None) -> list[Evaluated]:
    """``eval_results/**/*.json``, ``evaluations/*.json`` and ``results.json``: what ``provenance.write_results`` wrote,
    ``{"values", "provenance"}``, or names and numbers.
    """
    files = sorted((path / RESULTS).rglob("*.json")) if (path / RESULTS).is_dir() else []
    scores = sorted((path / SCORES).glob("*.json"), key=lambda file: (len(file.name), file.name))
    files += [*scores, *(file for file in (path / "results.json",) if file.is_file())]
    found = []
    for file in files:
        name = str(file.relative_to(path))
        content = json_object(file, problems, name=name)
        if content is None:
            continue
        if prefix is not None and file.is_relative_to(path / RESULTS) and (match := RESULT.fullmatch(file.name)):
            try:
                found += _of_process(file, content, int(match[1]), prefix)
            except ValueError as error:
                problems.append((name, f"is not logged by AsyncEvaluateHook: {error}"))
            continue
        step = re.search(r"(\d+)\.json$", file.name)
        update = content.get("update", content.get("updates", int(step[1]) if step else None))
        listed = content.get("results")
        parts = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else [content]
        read = [one for part in parts if (one := _result_of(part, update if is_count(update) else None, name)).values]
        if len(read) < len(parts) or not parts:
            problems.append((name, f"{len(parts) - len(read)} of {len(parts)} results have no number"))
        if file in scores:
            named = [
                {key if key.startswith("val/") else f"val/{key}": value for key, value in one.values.items()}
                for one in read
            ]
            read = [replace(one, values=v, origin=SCORES) for one, v in zip(read, named, strict=True)]
        found += read
    return found


def _result_of(content: Line, update: int | None, origin: str) -> Evaluated:
    given = next((content[k] for k in ("values", "results", "metrics") if isinstance(content.get(k), Mapping)), content)
    values = {k: n for k, v in flat(given).items() if (n := number(v)) is not None}
    values = {k: v for k, v in values.items() if k not in _POSITION and not k.startswith("provenance.")}
    provenance = content.get("provenance")
    return Evaluated(update, values, provenance if isinstance(provenance, Mapping) else {}, origin)


def flat(config: Mapping[str, Any], prefix: str = "", *, by_name: bool = False) -> dict[str, Any]:
    """Dotted key -> value; members of a list by index, or ``by_name``: as ``member_names`` has them."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        names = member_names(value) if by_name and isinstance(value, list) else ()
        items = dict(zip(names or range(len(value)), value, strict=True)) if isinstance(value, list) else value
        nested = isinstance(items, Mapping) and items and (isinstance(value, Mapping) or _has_mappings(value))
        found |= flat({str(k): v for k, v in items.items()}, f"{name}.", by_name=by_name) if nested else {name: value}
    return found


def _has_mappings(value: Any) -> bool:
    return any(isinstance(inner, Mapping) for inner in value)


def json_object(file: Path, problems: list[tuple[str, str]], *, name: str | None = None) -> dict[str, Any] | None:
    """A file's object. None, and one more of ``problems``, where it has none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
        problems.append((name or file.name, f"has a {type(content).__name__}, not an object"))
    except (OSError, ValueError, RecursionError) as error:
        problems.append((name or file.name, f"cannot be read: {type(error).__name__}: {error}"[:300]))
    return None
