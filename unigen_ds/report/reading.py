"""The files of a work dir as plain values, for reports and plots. Nothing of them is executed or unpickled.

A file that is missing or damaged leaves its part empty and adds a line to ``problems``; nothing here raises for what a
file contains. Times are in seconds; ``update`` counts optimizer steps of the run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.home import HINT as HOME_HINT
from unigen_ds.checkpoint.home import home_of
from unigen_ds.checkpoint.manifest import FILE_NAME as MANIFEST
from unigen_ds.checkpoint.partial import REPORT_FILE
from unigen_ds.checkpoint.saver import CONFIG_FILE
from unigen_ds.checkpoint.store import HOOKS_FILE, Lineage
from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.evaluation.metric_lines import Line, is_count, lines_of_updates, number, validation_losses, well_formed
from unigen_ds.report.results import RESULTS, SCORES, STATISTICS, Evaluated, Problems, attempt, evaluations, json_object
from unigen_ds.system.journals import LEDGER_FILE, METRICS_FILE, SKIPPED_FILE, TIMELINE_FILE, in_effect, parse_lines

BEST_HINT, LOG_FILE, PREVIEWS = "best_checkpoint", "train.log", "previews"
_OF_A_RUN = (METRICS_FILE, TIMELINE_FILE, LEDGER_FILE, LOG_FILE, CONFIG_FILE, SCORES, RESULTS)
_PARTS = ("geometry", "topology", "machine", "git", "versions", "config")
_MOST_NAMES = 10
_SECRET = re.compile(r"(?i)(api_?key|password|passwd|secret|access_token)$")
_LOGGED = re.compile(r"(?m)^(\S+ \S+) (WARNING|ERROR|CRITICAL) (.*)$")


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

    @property
    def reached(self) -> int:
        """The last update that any file has. A late result belongs to an earlier update than its line."""
        own = [line for line in (*self.times, *self.lines) if line.get("event") in (None, "time", "end")]
        return max([self.update, *(line.get("update", 0) for line in own)])

    @property
    def end(self) -> str | None:
        """How it ended; None where it was killed or runs still."""
        last = self.times[-1] if self.times else {}
        return str(last.get("reason")) if last.get("event") == "end" else None


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
    """The state of ``BestHook``: metric, rule, value, updates."""
    skipped: Sequence[Line]
    previews: Sequence[tuple[int | None, Path]]
    """Update and file, in order; None: a picture of another name."""
    log: Sequence[tuple[str, str, str]]
    """Warnings and errors of ``train.log``: time, level, text."""
    load_report: Mapping[str, Any] | None
    config: Mapping[str, Any]
    config_text: str | None
    problems: Sequence[tuple[str, str]]
    """File and what is wrong with it."""

    @property
    def validation_loss(self) -> str:
        """``val/loss``, or of several sets that of the first."""
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


def _is_run(path: Path) -> bool:
    """Whether a folder has anything that a report shows."""
    return any((path / name).exists() for name in _OF_A_RUN) or any(path.glob(f"*/{MANIFEST}"))


def read_work_dir(path: Path) -> WorkDir:
    """Everything that a report needs. Raises ``CheckpointError`` only where ``path`` is not a directory or no run."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory", remedy="name the work dir of a run")
    if not _is_run(path):
        within = sorted(child.name for child in path.iterdir() if child.is_dir() and _is_run(child))
        more = f" and {len(within) - _MOST_NAMES} more" if len(within) > _MOST_NAMES else ""
        raise CheckpointError(
            f"{path} is no run" + (f"; its folders {', '.join(within[:_MOST_NAMES])}{more} are" if within else ""),
            allowed="a folder with " + ", ".join(_OF_A_RUN) + " or a checkpoint",
            remedy="name the work dirs of runs, one after the other",
        )
    problems: Problems = []
    metrics = _journal(path / METRICS_FILE, problems)
    ledger = _journal(path / LEDGER_FILE, problems)
    starts = _starts(_journal(path / TIMELINE_FILE, problems), metrics, ledger)
    home = attempt(HOME_HINT, lambda: home_of(path), path, problems)
    checkpoints = attempt(path.name, lambda: store.list_checkpoints(home), list[store.Found](), problems)
    manifests = [entry.manifest for entry in checkpoints if entry.manifest is not None]
    config = starts[-1].record["config"] if starts else {}
    if not config and manifests:
        config = manifests[-1].config
    valid = in_effect(metrics)
    counted = {id(line) for line in valid}
    void = ([line for line in lines if id(line) not in counted] for _, lines in _by_start(metrics))
    best = _text(home / BEST_HINT, problems) if (home / BEST_HINT).exists() else None
    log = _LOGGED.findall(_text(path / LOG_FILE, problems) or "")
    return WorkDir(
        path=path,
        name=path.resolve().name,
        starts=starts,
        updates=lines_of_updates(valid),
        abandoned=[updates for lines in void if (updates := lines_of_updates(lines))],
        statistics=[line for line in valid if line.get("event") == STATISTICS and is_count(line.get("update"))],
        evaluations=evaluations(path, valid, config, problems),
        checkpoints=checkpoints,
        lineage=attempt("lineage.json", lambda: Lineage.read(home), Lineage(), problems),
        best=best and Path(best.strip()).name,
        best_state=_best_state(checkpoints, problems),
        skipped=in_effect(_journal(path / SKIPPED_FILE, problems)) if (path / SKIPPED_FILE).exists() else [],
        previews=_previews(path),
        log=log,
        load_report=json_object(path / REPORT_FILE, problems) if (path / REPORT_FILE).exists() else None,
        config=mask_secrets(config),
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
    nothing: tuple[list[Line], int] = ([], 0)
    parsed, damaged = attempt(path.name, lambda: parse_lines(path), nothing, problems)
    lines, wrong = well_formed(parsed)
    if damaged + wrong:
        problems.append((path.name, f"{damaged + wrong} of {len(parsed) + damaged} lines are damaged and left out"))
    if not path.exists():
        problems.append((path.name, "is missing"))
    return lines


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
    """One for each start line of the timeline. A start that ended before its first update is in the timeline alone, so
    it is matched with the parts of the journals from their ends.
    """
    pairs: list[tuple[Line, list[Line]]] = []
    for line in timeline:
        if line.get("event") == "start":
            pairs.append((line, []))
        elif pairs and line.get("event") in ("time", "end") and number(line.get("seconds")) is not None:
            pairs[-1][1].append(line)
    parts = [_by_start(lines) for lines in journals]
    starts = []
    for line, times in reversed(pairs):
        listed = line.get("findings")
        findings = [one for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []
        parts_of = {name: part if isinstance(part := line.get(name), Mapping) else {} for name in _PARTS}
        record = {**line, **parts_of, "findings": findings}
        update = record.get("update", 0)
        own = [part.pop()[1] for part in parts if part and part[-1][0] == update]
        starts.append(RunStart(update, record, times, [line for lines in own for line in lines]))
    return starts[::-1]


def _text(file: Path, problems: Problems) -> str | None:
    return attempt(file.name, lambda: file.read_text(encoding="utf-8", errors="replace"), None, problems)


def _best_state(checkpoints: Sequence[store.Found], problems: Problems) -> Mapping[str, Any]:
    """The state of ``BestHook`` in the newest checkpoint."""
    files = [one.path / HOOKS_FILE for one in checkpoints if one.manifest is not None]
    file = next((file for file in reversed(files) if file.is_file()), None)
    if file is None:
        return {}
    state: Any = (json_object(file, problems, name=f"{file.parent.name}/{HOOKS_FILE}") or {}).get("best")
    return state if isinstance(state, Mapping) else {}


def _previews(path: Path) -> list[tuple[int | None, Path]]:
    pictures: list[tuple[int | None, Path]] = []
    for file in (path / PREVIEWS).glob("*.png"):
        digits = re.search(r"(\d{1,18})(?=\D*$)", file.stem)
        pictures.append((int(digits[1]) if digits else None, file))
    return sorted(pictures, key=lambda pair: (pair[0] is None, pair[0] or 0, pair[1].name))
