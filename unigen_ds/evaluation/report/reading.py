"""The files of a work dir as plain values, for reports and plots. Nothing of them is executed or unpickled.

A file that is missing or damaged leaves its part empty and adds a line to ``problems``; nothing here raises for what a
file contains. Times are in seconds; ``update`` counts optimizer steps of the run.
"""

from __future__ import annotations

import bisect
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.home import HINT as HOME_HINT
from unigen_ds.checkpoint.home import home_of
from unigen_ds.checkpoint.lineage import Lineage
from unigen_ds.checkpoint.manifest import FILE_NAME as MANIFEST
from unigen_ds.checkpoint.partial import REPORT_FILE
from unigen_ds.checkpoint.saver import CONFIG_FILE, HOOKS_FILE
from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.core.metrics import LEDGER_FILE, METRICS_FILE, SKIPPED_FILE, TIMELINE_FILE, in_effect, parse_lines
from unigen_ds.evaluation.jobs import RESULT, numbers_of, read_result

BEST_HINT, LOG_FILE, PREVIEWS, RESULTS = "best_checkpoint", "train.log", "previews", "eval_results"
SCORES = "evaluations"
"""Of the metrics of ``EvaluateHook``, whose lines in ``metrics.jsonl`` have the same values without provenance."""
STATISTICS = "training_stats"
"""Event of the lines with the statistics over ranks."""
Line = dict[str, Any]
_OF_A_RUN = (METRICS_FILE, TIMELINE_FILE, LEDGER_FILE, LOG_FILE, CONFIG_FILE, SCORES, RESULTS)
_MOST_NAMES = 10
_SECRET = re.compile(r"(?i)(api_?key|password|passwd|secret|access_token)$")
_LOGGED = re.compile(r"(\S+ \S+) (WARNING|ERROR|CRITICAL) (.*)")


@dataclass(frozen=True)
class RunStart:
    """One start of the run: from a fresh beginning or a checkpoint to its end or kill."""

    update: int
    """Updates of the run when it began."""
    record: Line | None
    """Its line in ``timeline.jsonl``; None where the run is older than that file."""
    times: Sequence[Line]
    """The lines of ``timeline.jsonl`` between this start and the next, in order."""
    lines: Sequence[Line]
    """The lines of ``metrics.jsonl`` that this start wrote, void ones too."""
    reached: int
    """The last update that any file shows."""

    @property
    def end(self) -> str | None:
        """How it ended; None where it was killed, runs still, or where that is not recorded."""
        last = self.times[-1] if self.times else {}
        return str(last.get("reason")) if last.get("event") == "end" else None


@dataclass(frozen=True)
class Evaluated:
    """A validation or an evaluation: a line of ``metrics.jsonl``, or a file of results."""

    update: int | None
    values: Mapping[str, float]
    provenance: Mapping[str, Any]
    origin: str


@dataclass(frozen=True)
class WorkDir:
    """See the module docstring."""

    path: Path
    name: str
    starts: Sequence[RunStart]
    updates: Sequence[Line]
    """Lines of updates that count, one for each update that was logged, in order."""
    abandoned: Sequence[Sequence[Line]]
    """Lines that a resume made void, by the start that wrote them."""
    statistics: Sequence[Line]
    """Lines with the statistics over ranks that count, in order."""
    evaluations: Sequence[Evaluated]
    checkpoints: Sequence[store.Found]
    lineage: Lineage
    best: str | None
    """Name of the best checkpoint."""
    best_state: Mapping[str, Any]
    """Of ``EvaluateHook``: metric, rule, value, updates."""
    skipped: Sequence[Line]
    previews: Sequence[tuple[int | None, Path]]
    """Update and file, in order; None: a picture of another name."""
    log: Sequence[tuple[str, str, str]]
    """Warnings and errors of ``train.log``: time, level, text."""
    load_report: Mapping[str, Any] | None
    config: Mapping[str, Any]
    config_text: str | None
    problems: Sequence[tuple[str, str]] = field(default_factory=list)
    """File and what is wrong with it."""

    @property
    def last(self) -> Line:
        """The last line of an update; empty where there is none."""
        return self.updates[-1] if self.updates else {}

    def sequences_at(self, update: float) -> float | None:
        """Sequences consumed after an update, interpolated between logged ones; None where that is not known."""
        return interpolated(self._known, update)

    @cached_property
    def _known(self) -> list[tuple[float, float]]:
        return known_sequences(self.updates)


def known_sequences(updates: Iterable[Line]) -> list[tuple[float, float]]:
    """Updates and sequences of the logged lines, from the beginning on."""
    return [(0.0, 0.0), *((line["update"], n) for line in updates if (n := number(line.get("sequences"))))]


def interpolated(known: Sequence[tuple[float, float]], x: float) -> float | None:
    """y at ``x`` between (x, y) in order; None beyond the last."""
    at = bisect.bisect_left(known, (x, -math.inf))
    if at == len(known):
        return None
    (x0, y0), (x1, y1) = known[max(0, at - 1)], known[at]
    return y1 if x == x1 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def number(value: object) -> float | None:
    """A finite number as float; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def is_update(line: Line) -> bool:
    """Whether a line of ``metrics.jsonl`` is that of an update."""
    return "event" not in line and "loss" in line and _whole(line.get("update"))


def lines_of_updates(lines: Iterable[Line]) -> list[Line]:
    """The last line of each update, in the order of updates."""
    latest = {line["update"]: line for line in lines if is_update(line)}
    return [latest[update] for update in sorted(latest)]


def read_updates(metrics_file: Path) -> list[Line]:
    """The lines of updates that count: those that no resume made void."""
    return lines_of_updates(in_effect(_well_formed(parse_lines(metrics_file)[0])[0]))


def read_values(metrics_file: Path, key: str) -> list[tuple[int, float]]:
    """Update and value of each evaluation that counts, in order; of an update that was evaluated twice the last."""
    lines = in_effect(_well_formed(parse_lines(metrics_file)[0])[0])
    latest = {line["update"]: n for line in lines if "update" in line and (n := number(line.get(key))) is not None}
    return sorted(latest.items())


def _is_run(path: Path) -> bool:
    """Whether a folder has anything that a report shows."""
    return any((path / name).exists() for name in _OF_A_RUN) or any(path.glob(f"*/{MANIFEST}"))


def read_work_dir(path: Path) -> WorkDir:
    """Everything that a report needs. Raises ``CheckpointError`` only where ``path`` is not a directory or no run."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory", remedy="name the work dir of a run")
    if not _is_run(path):
        within = sorted(child.name for child in path.iterdir() if child.is_dir() and _is_run(child))
        names = ", ".join(within[:_MOST_NAMES]) + (
            f" and {more} more" if (more := len(within) - _MOST_NAMES) > 0 else ""
        )
        raise CheckpointError(
            f"{path} is no run" + (f"; its folders {names} are" if within else ""),
            allowed="a folder with " + ", ".join(_OF_A_RUN) + " or a checkpoint",
            remedy="name the work dirs of runs, one after the other",
        )
    problems: list[tuple[str, str]] = []
    metrics = _journal(path / METRICS_FILE, problems)
    starts = _starts(
        _by_start(metrics),
        _by_start(_journal(path / LEDGER_FILE, problems)),
        _journal(path / TIMELINE_FILE, problems),
    )
    home = _home(path, problems)
    checkpoints = _checkpoints(home, problems)
    manifests = [found.manifest for found in checkpoints if found.manifest is not None]
    config = starts[-1].record.get("config") if starts and starts[-1].record else None
    if not isinstance(config, Mapping):
        config = manifests[-1].config if manifests else {}
    kept = in_effect(metrics)
    best, best_state = _best(home, checkpoints, problems)
    skipped_file = path / SKIPPED_FILE
    return WorkDir(
        path=path,
        name=path.resolve().name,
        starts=starts,
        updates=lines_of_updates(kept),
        abandoned=_abandoned(metrics, kept),
        statistics=[line for line in kept if line.get("event") == STATISTICS and _whole(line.get("update"))],
        evaluations=_once(_evaluations(kept), _results(path, problems, prefix=_async_prefix(config, kept))),
        checkpoints=checkpoints,
        lineage=_lineage(home, problems),
        best=best,
        best_state=best_state,
        skipped=in_effect(_journal(skipped_file, problems)) if skipped_file.exists() else [],
        previews=_previews(path),
        log=_log(path / LOG_FILE, problems),
        load_report=_json(path / REPORT_FILE, problems) if (path / REPORT_FILE).exists() else None,
        config=masked(config),
        config_text=_text(path / CONFIG_FILE, problems),
        problems=problems,
    )


def run_names(work_dirs: Sequence[Path]) -> dict[str, Path]:
    """A different name for each path. Raises ``ConfigError`` where one is given twice."""
    paths = [path.resolve() for path in work_dirs]
    twice = [str(path) for path, count in Counter(paths).items() if count > 1]
    if twice:
        raise ConfigError(f"given twice: {', '.join(twice)}", remedy="name each work dir once")
    for depth in range(1, 1 + max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return dict(zip(names, work_dirs, strict=True))


def masked(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without the values of keys that name a secret: a report may be passed to others."""

    def of(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return masked(value)
        if isinstance(value, list):
            return [of("", inner) for inner in value]
        return "***" if value and _SECRET.search(key) else value

    return {str(key): of(str(key), value) for key, value in config.items()}


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value, lists by index."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        items = dict(enumerate(value)) if isinstance(value, list) else value
        nested = isinstance(items, Mapping) and items and (isinstance(value, Mapping) or _has_mappings(value))
        found |= flat({str(k): v for k, v in items.items()}, f"{name}.") if nested else {name: value}
    return found


def _has_mappings(value: Any) -> bool:
    return any(isinstance(inner, Mapping) for inner in value)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _well_formed(lines: Iterable[Line]) -> tuple[list[Line], int]:
    """Without lines whose counts are no counts; and their number."""
    lines = list(lines)
    good = [
        line
        for line in lines
        if (_whole(line.get("updates")) if line.get("event") == "resume" else _whole(line.get("update", 0)))
    ]
    return good, len(lines) - len(good)


def _journal(path: Path, problems: list[tuple[str, str]]) -> list[Line]:
    try:
        parsed, damaged = parse_lines(path)
    except OSError as error:
        problems.append((path.name, f"cannot be read: {error.strerror or error}"))
        return []
    lines, wrong = _well_formed(parsed)
    if damaged + wrong:
        problems.append((path.name, f"{damaged + wrong} of {len(parsed) + damaged} lines are damaged and left out"))
    if not path.exists():
        problems.append((path.name, "is missing"))
    return lines


def _by_start(lines: Iterable[Line]) -> list[tuple[int, list[Line]]]:
    """Lines by the start that wrote them, with the update at which it began."""
    found: list[tuple[int, list[Line]]] = [(0, [])]
    for line in lines:
        if line.get("event") == "resume":
            found.append((line["updates"], []))
        else:
            found[-1][1].append(line)
    return found if found[0][1] else found[1:]


def _starts(
    metrics: Sequence[tuple[int, list[Line]]], ledger: Sequence[tuple[int, list[Line]]], timeline: Iterable[Line]
) -> list[RunStart]:
    """One for each start line of the timeline; before them, those of an earlier version that wrote none.

    A start that ended before its first update is in the timeline alone, so both are matched from their ends.
    """
    recorded: list[tuple[Line, list[Line]]] = []
    for line in timeline:
        if line.get("event") == "start":
            recorded.append((line, []))
        elif recorded and line.get("event") in ("time", "end") and number(line.get("seconds")) is not None:
            recorded[-1][1].append(line)
    same = [begin for begin, _ in ledger] == [begin for begin, _ in metrics]
    left = [(begin, lines, ledger[i][1] if same else []) for i, (begin, lines) in enumerate(metrics)]
    starts: list[RunStart] = []
    for record, times in reversed(recorded):
        update = record.get("update", 0)
        _, lines, more = left.pop() if left and left[-1][0] == update else (0, [], [])
        starts.append(RunStart(update, record, times, lines, _reached(update, times, lines, more)))
    starts += [RunStart(b, None, [], lines, _reached(b, lines, more)) for b, lines, more in reversed(left)]
    return starts[::-1]


def _reached(begin: int, *parts: Iterable[Line]) -> int:
    return max([begin, *(line.get("update", 0) for part in parts for line in part if line.get("event") in _OWN)])


_OWN = (None, "time", "end")
"""Events whose update is the one at which they were written; a late result belongs to an earlier one."""


def _abandoned(metrics: Iterable[Line], kept: Iterable[Line]) -> list[list[Line]]:
    count = {id(line) for line in kept}
    void = [[line for line in lines if id(line) not in count] for _, lines in _by_start(metrics)]
    return [found for lines in void if (found := lines_of_updates(lines))]


def _evaluations(lines: Iterable[Line]) -> list[Evaluated]:
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


_POSITION = {"update", "iteration", "epoch", "sequences", "samples", "tokens", "updates"}


def _once(lines: Iterable[Evaluated], files: Sequence[Evaluated]) -> list[Evaluated]:
    """Without the values of lines that a file has with their provenance."""
    stored = {(one.update, key) for one in files for key in one.values}
    kept = [
        replace(line, values={key: n for key, n in line.values.items() if (line.update, key) not in stored})
        for line in lines
    ]
    return [*(line for line in kept if line.values), *files]


def _async_prefix(config: Mapping[str, Any], lines: Iterable[Line]) -> str | None:
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


def _results(path: Path, problems: list[tuple[str, str]], *, prefix: str | None) -> list[Evaluated]:
    """``eval_results/**/*.json``, ``evaluations/*.json`` and ``results.json``: what ``provenance.write_results`` wrote,
    ``{"values", "provenance"}``, or names and numbers.
    """
    files = sorted((path / RESULTS).rglob("*.json")) if (path / RESULTS).is_dir() else []
    scores = sorted((path / SCORES).glob("*.json"), key=lambda file: (len(file.name), file.name))
    files += [*scores, *(file for file in (path / "results.json",) if file.is_file())]
    found = []
    for file in files:
        name = str(file.relative_to(path))
        content = _json(file, problems, name=name)
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
        read = [one for part in parts if (one := _result_of(part, update if _whole(update) else None, name)).values]
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


def _json(file: Path, problems: list[tuple[str, str]], *, name: str | None = None) -> dict[str, Any] | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
        problems.append((name or file.name, f"has a {type(content).__name__}, not an object"))
    except (OSError, ValueError, RecursionError) as error:
        problems.append((name or file.name, f"cannot be read: {type(error).__name__}: {error}"[:300]))
    return None


def _text(file: Path, problems: list[tuple[str, str]]) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        problems.append((file.name, "is missing"))
    except OSError as error:
        problems.append((file.name, f"cannot be read: {error.strerror or error}"))
    return None


def _home(path: Path, problems: list[tuple[str, str]]) -> Path:
    try:
        return home_of(path)
    except CheckpointError as error:
        problems.append((HOME_HINT, str(error)))
        return path


def _checkpoints(path: Path, problems: list[tuple[str, str]]) -> list[store.Found]:
    try:
        return store.list_checkpoints(path)
    except OSError as error:
        problems.append((path.name, f"cannot be listed: {error.strerror or error}"))
        return []


def _lineage(path: Path, problems: list[tuple[str, str]]) -> Lineage:
    try:
        return Lineage.read(path)
    except CheckpointError as error:
        problems.append(("lineage.json", str(error)))
        return Lineage()


def _best(
    path: Path, checkpoints: Sequence[store.Found], problems: list[tuple[str, str]]
) -> tuple[str | None, Mapping[str, Any]]:
    """The name in ``best_checkpoint``, and the state of ``EvaluateHook`` in the newest checkpoint."""
    hint = path / BEST_HINT
    name = _text(hint, problems) if hint.exists() else None
    for found in reversed(checkpoints):
        if found.manifest is not None and (found.path / HOOKS_FILE).is_file():
            states = _json(found.path / HOOKS_FILE, problems, name=f"{found.path.name}/{HOOKS_FILE}") or {}
            state = states.get("evaluate")
            state = state.get("best", state) if isinstance(state, Mapping) else {}
            return name and Path(name.strip()).name, state if isinstance(state, Mapping) else {}
    return name and Path(name.strip()).name, {}


def _previews(path: Path) -> list[tuple[int | None, Path]]:
    found: list[tuple[int | None, Path]] = []
    for file in (path / PREVIEWS).glob("*.png") if (path / PREVIEWS).is_dir() else ():
        digits = re.search(r"(\d{1,18})(?=\D*$)", file.stem)
        found.append((int(digits[1]) if digits else None, file))
    return sorted(found, key=lambda pair: (pair[0] is None, pair[0] or 0, pair[1].name))


def _log(path: Path, problems: list[tuple[str, str]]) -> list[tuple[str, str, str]]:
    text = _text(path, problems)
    found = (_LOGGED.match(line) for line in (text or "").splitlines())
    return [(match[1], match[2], match[3]) for match in found if match]
