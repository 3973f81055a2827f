"""The files of a work dir as plain values, for reports and plots. Nothing of them is executed or unpickled.

A file that is missing or damaged leaves its part empty and adds a line to ``problems``; nothing here raises for what a
file contains. Times are in seconds; ``update`` counts optimizer steps of the run.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.home import LINK, home_of
from unigen_ds.checkpoint.manifest import FILE_NAME as MANIFEST
from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.core.json_values import dotted_name, leaves
from unigen_ds.evaluation.jobs.evaluation_job import RESULT, numbers_of, read_result
from unigen_ds.system.journals import LEDGER_FILE, METRICS_FILE, SKIPPED_FILE, TIMELINE_FILE, in_effect, parse_lines

BEST_HINT, LOG_FILE, PREVIEWS, RESULTS = "best_checkpoint", "train.log", "previews", "eval_results"
SCORES = "evaluations"
"""Folder of ``EvaluateHook``'s metrics; its lines in ``metrics.jsonl`` have the same values without provenance."""
_OF_A_RUN = (METRICS_FILE, TIMELINE_FILE, LEDGER_FILE, LOG_FILE, store.CONFIG_FILE, SCORES, RESULTS)
_PARTS = ("geometry", "topology", "machine", "git", "versions", "config")
POSITION = {"update", "iteration", "epoch", "sequences", "samples", "tokens", "updates"}
_SECRET = re.compile(r"(?i)(api_?key|password|passwd|secret|access_token)$")
Line = dict[str, Any]
"""A line of a file of JSON lines."""
Problems = list[tuple[str, str]]
"""Names of files and what is wrong with them."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class RunStart:
    """One start of the run: from a fresh beginning or a checkpoint to its end or kill."""

    update: int
    """Updates of the run when it began."""
    record: Line
    """Its line in ``timeline.jsonl``, with a mapping for each of ``_PARTS`` and a list of mappings as ``findings``."""
    times: Sequence[Line]
    """The lines of ``timeline.jsonl`` between this start and the next, in order."""
    lines: Sequence[Line]
    """The lines of ``metrics.jsonl`` and ``ledger.jsonl`` that this start wrote, void ones too."""

    @cached_property
    def end_update(self) -> int:
        """The last update that any file has. A late result belongs to an earlier update than its line."""
        own = [line for line in (*self.times, *self.lines) if line.get("event") in (None, "time", "end")]
        return max([self.update, *(line.get("update", 0) for line in own)])

    @property
    def end(self) -> str | None:
        """How it ended; None where it was killed or runs still."""
        last = self.times[-1] if self.times else {}
        return str(last.get("reason")) if last.get("event") == "end" else None


@dataclass(frozen=True)
class EvaluationResult:
    """A validation or an evaluation: a line of ``metrics.jsonl``, or a file of results."""

    update: int | None
    values: Mapping[str, float]
    provenance: Mapping[str, Any]
    origin: str


@dataclass(frozen=True)
class WorkDir:
    path: Path
    name: str
    starts: Sequence[RunStart]
    updates: Sequence[Line]
    """Lines of updates that count, one for each update that was logged, in order."""
    void_lines: Sequence[Sequence[Line]]
    """Lines that a resume made void, by the start that wrote them."""
    evaluations: Sequence[EvaluationResult]
    checkpoints: Sequence[store.Candidate]
    lineage: store.Lineage
    best: str | None
    """Name of the best checkpoint."""
    skips: Sequence[Line]
    previews: Sequence[tuple[int | None, Path]]
    """Update and file, in order; None: a picture of another name."""
    config: Mapping[str, Any]
    config_text: str | None
    problems: Problems

    @property
    def validation_loss(self) -> str:
        """The name of the first whole loss, ``val/loss`` as a rule."""
        names = validation_losses(key for evaluation in self.evaluations for key in evaluation.values)
        return next(iter(names), "val/loss")

    @property
    def best_loss(self) -> tuple[float, int | None] | None:
        """The smallest ``validation_loss`` and its update; None: there is none."""
        key = self.validation_loss
        losses = [(one.values[key], one.update) for one in self.evaluations if key in one.values]
        return min(losses, key=lambda pair: pair[0], default=None)

    @property
    def last(self) -> Line:
        """The last line of an update; empty where there is none."""
        return self.updates[-1] if self.updates else {}


def read_work_dir(path: Path) -> WorkDir:
    """Everything that a report needs. Raises ``CheckpointError`` only where ``path`` is not a directory or no run."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory", remedy="name the work dir of a run")
    if not any((path / name).exists() for name in _OF_A_RUN) and not any(path.glob(f"*/{MANIFEST}")):
        choices = "a folder with " + ", ".join(_OF_A_RUN) + " or a checkpoint"
        raise CheckpointError(f"{path} is no run", allowed=choices)
    problems: Problems = []
    metrics = _journal(path / METRICS_FILE, problems)
    ledger = _journal(path / LEDGER_FILE, problems)
    starts = _starts(_journal(path / TIMELINE_FILE, problems), metrics, ledger)
    home = attempt(LINK, lambda: home_of(path), path, problems)
    checkpoints = attempt(path.name, lambda: store.list_checkpoints(home), list[store.Candidate](), problems)
    manifests = [entry.manifest for entry in checkpoints if entry.manifest is not None]
    config = starts[-1].record["config"] if starts else {}
    if not config and manifests:
        config = manifests[-1].config
    valid = in_effect(metrics)
    valid_ids = {id(line) for line in valid}
    void = ([line for line in lines if id(line) not in valid_ids] for _, lines in _by_start(metrics))
    best = _text(home / BEST_HINT, problems) if (home / BEST_HINT).exists() else None
    digits = {file: re.search(r"(\d{1,18})(?=\D*$)", file.stem) for file in (path / PREVIEWS).glob("*.png")}
    previews = [(int(match[1]) if match else None, file) for file, match in digits.items()]
    return WorkDir(
        path=path,
        name=path.resolve().name,
        starts=starts,
        updates=lines_of_updates(valid),
        void_lines=[updates for lines in void if (updates := lines_of_updates(lines))],
        evaluations=evaluations(path, valid, problems),
        checkpoints=checkpoints,
        lineage=attempt("lineage.json", lambda: store.Lineage.read(home), store.Lineage(), problems),
        best=best and Path(best.strip()).name,
        skips=in_effect(_journal(path / SKIPPED_FILE, problems)) if (path / SKIPPED_FILE).exists() else [],
        previews=sorted(previews, key=lambda pair: (pair[0] is None, pair[0] or 0, pair[1].name)),
        config=mask_secrets(config),
        config_text=_text(path / store.CONFIG_FILE, problems),
        problems=problems,
    )


def run_names(work_dirs: Sequence[Path]) -> dict[str, Path]:
    """A different name for each path. Raises ``ConfigError`` where one is given twice."""
    paths = [path.resolve() for path in work_dirs]
    twice = [str(path) for path, count in Counter(paths).items() if count > 1]
    if twice:
        raise ConfigError(f"given twice: {', '.join(twice)}", remedy="name each work dir once")
    common = os.path.commonpath([path.parent for path in paths])
    return {str(path.relative_to(common)): work_dir for path, work_dir in zip(paths, work_dirs, strict=True)}


def mask_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without the values of keys that name a secret: a report may be passed to others."""

    def of(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return mask_secrets(value)
        if isinstance(value, list):
            return [of("", inner) for inner in value]
        return "***" if value and _SECRET.search(key) else value

    return {str(key): of(str(key), value) for key, value in config.items()}


def _journal(path: Path, problems: Problems) -> list[Line]:
    records, num_damaged = attempt(path.name, lambda: parse_lines(path), (list[Line](), 0), problems)
    lines = [
        one for one in records if is_count(one.get("updates") if one.get("event") == "resume" else one.get("update", 0))
    ]
    if wrong := num_damaged + len(records) - len(lines):
        problems.append((path.name, f"{wrong} of {len(records) + num_damaged} lines are damaged and left out"))
    if not path.exists():
        problems.append((path.name, "is missing"))
    return lines


def finite(value: Any) -> float | None:
    """Return a finite number as float, and None for everything else."""
    return float(value) if type(value) in (int, float) and -1e300 < value < 1e300 else None


def lines_of_updates(lines: Iterable[Line]) -> list[Line]:
    """The last line of each update, in the order of updates."""
    of_updates = (one for one in lines if "event" not in one and "loss" in one and is_count(one.get("update")))
    latest = {line["update"]: line for line in of_updates}
    return [latest[update] for update in sorted(latest)]


def validation_losses(keys: Iterable[str]) -> list[str]:
    """Those of the keys that are a whole loss, such as ``val/loss``, and not a part of another."""
    names = [key for key in dict.fromkeys(keys) if key.startswith("val/") and key.endswith("/loss")]
    return [key for key in names if not any(key.startswith(f"{other}/") for other in names)]


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _by_start(lines: Iterable[Line]) -> list[tuple[int, list[Line]]]:
    """Lines by the start that wrote them, with the update at which it began."""
    parts: list[tuple[int, list[Line]]] = [(0, [])]
    for line in lines:
        if line.get("event") == "resume":
            parts.append((line["updates"], []))
        else:
            parts[-1][1].append(line)
    return parts if parts[0][1] else parts[1:]


def _starts(timeline: Iterable[Line], *journals: Iterable[Line]) -> list[RunStart]:
    """One for each start line of the timeline. A start that ended before its first update is there alone, so parts of
    the journals are matched from their ends."""
    pairs: list[tuple[Line, list[Line]]] = []
    for line in timeline:
        if line.get("event") == "start":
            pairs.append((line, []))
        elif pairs and line.get("event") in ("time", "end") and finite(line.get("seconds")) is not None:
            pairs[-1][1].append(line)
    parts = [_by_start(lines) for lines in journals]
    starts = []
    for line, times in reversed(pairs):
        records = line.get("findings")
        findings = [one for one in records if isinstance(one, Mapping)] if isinstance(records, list) else []
        record = {**line, **{name: _mapping(line, name) for name in _PARTS}, "findings": findings}
        update = record.get("update", 0)
        own = [part.pop()[1] for part in parts if part and part[-1][0] == update]
        starts.append(RunStart(update, record, times, [line for lines in own for line in lines]))
    return starts[::-1]


def _text(file: Path, problems: Problems, *, name: str | None = None) -> str | None:
    return attempt(name or file.name, lambda: file.read_text(encoding="utf-8", errors="replace"), None, problems)


def evaluations(path: Path, lines: Iterable[Line], problems: Problems) -> list[EvaluationResult]:
    """Those of the valid lines, and of ``eval_results/**/*.json``, ``evaluations/*.json`` and ``results.json``: what
    ``write_results`` wrote, ``{"values", "provenance"}``, or names and numbers. A value that a file has with its
    provenance is left out of the lines. The result of another process is read by the rules of ``AsyncEvaluateHook``,
    and has the names that it logs.
    """
    lines = [line for line in lines if "update" in line and line.get("event") != "training_stats"]
    names = [key for line in lines if line.get("event") == "async_evaluation" for key in line if "/" in key]
    prefix = names[0].partition("/")[0] if names else None  # None: the run has no such hook, or no result of it yet
    scores = sorted((path / SCORES).glob("*.json"), key=lambda file: (len(file.name), file.name))
    of_files: list[EvaluationResult] = []
    for file in (*sorted((path / RESULTS).rglob("*.json")), *scores, *path.glob("results.json")):
        name = str(file.relative_to(path))
        if (text := _text(file, problems, name=name)) is None:
            continue
        update = int(match[1]) if (match := re.search(r"(\d{1,18})\.json$", file.name)) else None
        of_process = prefix is not None and file.is_relative_to(path / RESULTS) and RESULT.fullmatch(file.name)
        try:
            content = json.loads(text)
            parts = content.get("results")
            if not isinstance(parts, list):
                parts = [content if "values" in content else {"values": parts or content}]
            if of_process:
                read_result(file, update=int(of_process[1]))
            several = [numbers_of(part["values"])[0] for part in parts]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            problems.append((name, f"is not logged by AsyncEvaluateHook: {error}" if of_process else "has no results"))
            continue
        origin = RESULTS if of_process else SCORES if file in scores else name
        begin = f"{prefix}/" if of_process else "val/" if file in scores else ""
        for part, numbers in zip(parts, several, strict=True):
            own = {
                key if begin == "val/" and key.startswith(begin) else begin + key: n
                for key, n in numbers.items()
                if math.isfinite(n) and key not in POSITION
            }
            if own:
                of_files.append(EvaluationResult(update, own, _mapping(part, "provenance"), origin))
    file_keys = {(one.update, key) for one in of_files for key in one.values}
    of_lines = []
    for line in lines:
        event = line.get("event")
        own = {
            key: n
            for key in line
            if (event is not None or key.startswith("val/")) and key not in POSITION
            if (n := finite(line[key])) is not None and (line["update"], key) not in file_keys
        }
        if own:
            origin = METRICS_FILE if event is None else f"{METRICS_FILE}, {event}"
            of_lines.append(EvaluationResult(line["update"], own, _mapping(line, "provenance"), origin))
    return [*of_lines, *of_files]


def _mapping(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A value that is a mapping; an empty one in place of anything else."""
    value = content.get(key)
    return value if isinstance(value, Mapping) else {}


def flat(config: Mapping[str, Any], *, names: bool = False) -> dict[str, Any]:
    """Dotted key -> value, as of ``leaves``."""
    return {dotted_name(leaf): value for leaf, value in leaves(config, names=names) if leaf}


def attempt(name: str, read: Callable[[], _T], default: _T, problems: Problems) -> _T:
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


def changes(starts: Sequence[RunStart]) -> list[dict[str, tuple[Any, Any]]]:
    """Return what each start but the first changed: ``geometry.batch_size -> (before, now)``, ..."""
    identities = []
    for record in (start.record for start in starts):
        parts = {name: record[name] for name in ("geometry", "topology", "versions", "git")}
        values = {f"{name}.{key}": value for name, part in parts.items() for key, value in part.items()}
        commits = {k: v.get("commit") for k, v in values.items() if k.startswith("git.") and isinstance(v, Mapping)}
        identities.append({**values, **commits, "machine.device": record["machine"].get("device")})
    return [
        {key: (a.get(key), b.get(key)) for key in sorted({*a, *b}) if a.get(key) != b.get(key)}
        for a, b in pairwise(identities)
    ]
