"""The parts of the page about one run. Each names what is missing where its files are not there."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from unigen_ds.checkpoint.listing import size_text
from unigen_ds.evaluation.report.charts import bar
from unigen_ds.evaluation.report.goodput import PARTS, Spent, changes, idle_before, spent_by_start
from unigen_ds.evaluation.report.lines import number
from unigen_ds.evaluation.report.markup import (
    Html,
    details,
    grouped,
    join,
    number_text,
    pairs,
    percent,
    plural,
    seconds_text,
    table,
    tag,
    value_text,
)
from unigen_ds.evaluation.report.panels import curves, validation_curves
from unigen_ds.evaluation.report.pictures import strip
from unigen_ds.evaluation.report.reading import WorkDir
from unigen_ds.evaluation.report.results import flat

TITLES = {
    "training": "training",
    "data": "waiting for data",
    "saves": "saves",
    "evaluation": "evaluation and own hooks",
    "start_up": "start-up",
    "repeated": "repeated work",
}
_MOST_ROWS = 100
_STATES = {"ok": "good", "warn": "warn", "block": "bad"}
NOT_RECORDED = "This run was started by a version that did not record it (timeline.jsonl)."


def missing(text: str) -> Html:
    return tag("p", text, class_="note")


def total_spent(run: WorkDir) -> Spent:
    return sum(spent_by_start(run.starts), Spent())


def state_of(run: WorkDir) -> tuple[str, str]:
    """(text, css class) of how the run ended."""
    if not run.starts:
        return "no start recorded", "warn"
    end = run.starts[-1].end
    if end == "complete":
        return "complete", "good"
    if end == "stopped":
        return "stopped", ""
    if end is not None:
        return "ended with an error", "bad"
    return ("killed, or still running", "warn") if run.starts[-1].record else ("end not recorded", "")


def tiles(run: WorkDir) -> Html:
    """The numbers that a reader looks for first."""
    last, spent = run.last, total_spent(run)
    validation = [e for e in run.evaluations if "val/loss" in e.values]
    best = min(validation, key=lambda e: e.values["val/loss"], default=None)
    epoch = number(last.get("epoch"))
    found: list[tuple[str, str, str]] = [
        ("Updates", grouped(last["update"]) if last else "–", f"epoch {epoch:.2f}" if epoch is not None else ""),
        ("Loss", number_text(number(last.get("loss"))), "last update"),
    ]
    if best is not None:
        found.append(("Best validation loss", number_text(best.values["val/loss"]), f"update {best.update}"))
    found.append(("Goodput", percent(spent.goodput), "estimate" if spent.estimated else "of the time of all starts"))
    found.append(("Time", seconds_text(spent.total) if spent.total else "–", plural(len(run.starts), "start")))
    rate = number(last.get("tokens_per_second"))
    found.append(("Tokens per second", number_text(rate), "last window"))
    return tag(
        "div",
        *(
            tag("div", tag("span", k, class_="k"), tag("b", value), tag("span", more), class_="tile")
            for k, value, more in found
        ),
        class_="tiles",
    )


def time_part(run: WorkDir) -> list[Any]:
    """Lost time and goodput, then a row for each start."""
    spent = spent_by_start(run.starts)
    total = sum(spent, Spent())
    if not total.total:
        return [missing(f"No time is recorded. {NOT_RECORDED}")]
    shares = [(part, getattr(total, part)) for part in PARTS]
    spoken = ", ".join(f"{TITLES[part]} {percent(seconds / total.total)}" for part, seconds in shares)
    keys = [
        tag("li", tag("b", percent(seconds / total.total)), f" · {seconds_text(seconds)}",
            tag("span", TITLES[part]), class_=part)
        for part, seconds in shares
    ]  # fmt: skip
    notes = [
        f"Goodput {percent(total.goodput)}: the time of updates that count, without waiting for data, of"
        f" {seconds_text(total.total)} that the run's processes worked. Time between starts is not part of it."
    ]
    if any(start.record is None for start in run.starts):
        notes.append(f"Estimated from averages, start-up and saves unknown, for a part of the starts. {NOT_RECORDED}")
    elif total.estimated:
        notes.append("The time after a killed start's last record is estimated from its average update.")
    idle = idle_before(run.starts, spent)
    rows = []
    for i, (start, s) in enumerate(zip(run.starts, spent, strict=True)):
        record = start.record or {}
        rows.append((
            i + 1,
            _when(record.get("time")),
            f"{grouped(start.update)} – {grouped(start.reached)}",
            start.end or ("–" if not start.record else "killed" if i + 1 < len(spent) else "killed or running"),
            percent(s.goodput),
            *(seconds_text(getattr(s, part)) if start.record or part in ("training", "data", "repeated") else "–"
              for part in PARTS),
            "–" if i == 0 else seconds_text(idle[i]),
        ))  # fmt: skip
    heads = ("Start", "Began (UTC)", "Updates", "End", "Goodput", "Training", "Data", "Saves", "Evaluation", "Start-up",
             "Repeated", "Idle before")  # fmt: skip
    return [
        bar([(part, f"{TITLES[part]}: {seconds_text(s)}", s / total.total) for part, s in shares], spoken=spoken),
        tag("ul", *keys, class_="keys"),
        *(tag("p", note, class_="note") for note in notes),
        table(heads, rows, numbers=range(4, 12)),
    ]


def _when(value: object) -> Html | str:
    try:
        when = datetime.fromisoformat(str(value)).astimezone(timezone.utc)
    except (ValueError, OverflowError):
        return "–"
    return tag("time", when.strftime("%Y-%m-%d %H:%M:%S"), datetime=when.isoformat())


def curves_part(run: WorkDir) -> list[Any]:
    if not run.updates:
        return [missing("metrics.jsonl has no update: there is no curve.")]
    note = "All curves are over updates; long ones are smoothed, with their values in the background."
    if len(run.starts) > 1:
        note += (
            " A dashed line with a number is a start from a checkpoint: grey with the same setup, orange with another"
            " effective batch, violet with another engine, precision, device or number of processes."
        )
    return [tag("p", note, class_="note"), *curves(run), _sampled(run)]


def _sampled(run: WorkDir) -> Html:
    """The numbers of some updates as a table: readable without a picture."""
    every = max(1, len(run.updates) // 20)
    lines = [*run.updates[::every]]
    lines += [run.updates[-1]] if lines[-1] is not run.updates[-1] else []
    keys = ["update", "epoch", "sequences", "loss", "lr", "grad_norm", "tokens_per_second"]
    rows = [[value_text(line.get(key)) for key in keys] for line in lines]
    heads = ("Update", "Epoch", "Sequences", "Loss", "Learning rate", "Gradient norm", "Tokens/s")
    title = f"Numbers ({len(lines)} of {plural(len(run.updates), 'logged update')})"
    return details(title, table(heads, rows, numbers=range(len(keys))))


def validation_part(run: WorkDir) -> list[Any]:
    """Curves, a table with first, best and last value, and where each value came from."""
    if not run.evaluations:
        return [missing("No validation and no evaluation is recorded (metrics.jsonl, eval_results).")]
    parts: list[Any] = [validation_curves(run)]
    by_key: dict[tuple[str, str], list[tuple[int | None, float]]] = {}
    for evaluated in run.evaluations:
        for key, value in evaluated.values.items():
            by_key.setdefault((key, evaluated.origin), []).append((evaluated.update, value))
    rows = []
    for (key, origin), found in by_key.items():
        values = [value for _, value in found]
        at, last = max(found, key=lambda pair: -1 if pair[0] is None else pair[0])
        rows.append((key, len(found), number_text(min(values)), number_text(max(values)), number_text(last),
                     value_text(at), origin))  # fmt: skip
    parts.append(
        table(("Value", "Number", "Smallest", "Largest", "Last", "At update", "From"), rows, numbers=range(1, 6))
    )
    rule = run.best_state.get("metric")
    if rule is not None:
        at, reached = run.best_state.get("updates"), number(run.best_state.get("value"))
        parts.append(tag("p", f"Best by {rule} ({run.best_state.get('rule', 'less')}): {number_text(reached)}"
                              f" at update {value_text(at)}.", class_="note"))  # fmt: skip
    given = {_made_alike(e.provenance): e for e in run.evaluations if e.provenance}
    for one in given.values():
        texts = {key: value_text(value) for key, value in flat(one.provenance).items()}
        parts.append(details(f"Provenance: {', '.join([*one.values][:4])} ({one.origin})", pairs(texts)))
    if not given:
        parts.append(missing("No provenance is stored with these values."))
    return parts


def _made_alike(provenance: Mapping[str, Any]) -> str:
    """The same for the values of all checkpoints that were computed alike; the last one is shown."""
    return json.dumps({key: value for key, value in provenance.items() if key != "checkpoint"}, sort_keys=True)


def previews_part(run: WorkDir, *, budget: int) -> list[Any]:
    found, notes = strip(run, budget=budget)
    if found is None and not notes:
        return [missing("There are no previews (previews/<update>.png).")]
    return [found, *(missing(note) for note in notes)]


def checkpoints_part(run: WorkDir) -> list[Any]:
    """A row for each checkpoint, and how each follows from another."""
    if not run.checkpoints:
        return [missing("The work dir has no checkpoint.")]
    complete = [
        f for f in run.checkpoints
        if f.problem is None and f.manifest is not None and f.manifest.commit not in run.lineage.abandoned
    ]  # fmt: skip
    rows = []
    for found in run.checkpoints:
        manifest = found.manifest
        states = []
        if found.problem is not None:
            states.append(tag("span", "damaged", class_="chip bad", title=found.problem))
        elif manifest is not None and manifest.commit in run.lineage.abandoned:
            states.append(tag("span", "abandoned", class_="chip warn"))
        elif complete and found is complete[-1]:
            states.append(tag("span", "newest", class_="chip"))
        if found.path.name == run.best:
            states.append(tag("span", "★ best", class_="chip good"))
        if manifest is None:
            rows.append((tag("code", found.path.name), "–", "–", "–", "–", "–", "–", "–", join(states)))
            continue
        size = size_text(sum(entry.size for entry in manifest.files))
        geometry = manifest.geometry
        split = (geometry.batch_size, geometry.dp_size, geometry.accumulative_counts)
        batch = f"{geometry.global_batch_size} = {' × '.join(map(str, split))}"
        metrics = ", ".join(f"{name} {number_text(number(value))}" for name, value in manifest.metrics.items())
        parent = tag("code", manifest.parent) if manifest.parent else "fresh start"
        rows.append((tag("code", found.path.name), grouped(manifest.progress.updates), batch,
                     str(manifest.topology.get("engine", "–")), size, _when(manifest.created), parent, metrics or "–",
                     join(states)))  # fmt: skip
    heads = ("Checkpoint", "Update", "Effective batch", "Engine", "Size", "Created (UTC)", "Continued from", "Metrics",
             "State")  # fmt: skip
    parts: list[Any] = [table(heads, rows, numbers=(1, 4))]
    problems = [f.problem for f in run.checkpoints if f.problem is not None]
    parts += [missing(problem) for problem in problems]
    if run.lineage.start:
        parts.append(missing(f"The run continued from {run.lineage.start}, outside of this work dir."))
    if run.best is not None and run.best not in [f.path.name for f in run.checkpoints]:
        parts.append(missing(f"best_checkpoint names {run.best}, which is not in the work dir."))
    if run.load_report is not None:
        numbers = {k: len(v) for k, v in run.load_report.items() if isinstance(v, list) and v}
        text = ", ".join(f"{name} {grouped(count)}" for name, count in numbers.items())
        parts.append(
            missing(f"Weights loaded from {run.load_report.get('checkpoint')}: {text or 'nothing'} (tensors).")
        )
    return parts


def resumes_part(run: WorkDir) -> list[Any]:
    """What each resume found and changed."""
    if len(run.starts) < 2:
        return [missing("The run was started once and never resumed.")]
    parts: list[Any] = []
    changed = changes(run.starts)
    for index, start in enumerate(run.starts[1:], start=1):
        record = start.record
        if record is None:
            parts.append(missing(f"Start {index + 1}, from update {grouped(start.update)}: {NOT_RECORDED}"))
            continue
        given = record.get("findings")
        findings = [f for f in given if isinstance(f, Mapping)] if isinstance(given, list) else []
        noted = [f for f in findings if f.get("status") != "ok"]
        before, now = _config(run, index - 1), _config(run, index)
        edited = {k: (before.get(k), now.get(k)) for k in sorted({*before, *now}) if before.get(k) != now.get(k)}
        edited = {k: v for k, v in edited.items() if k not in ("resume", "load_from")} if before and now else {}
        chips = tag("div", tag("span", plural(len(noted), "warning"), class_="chip warn" if noted else "chip good"),
                    tag("span", f"{len(findings) - len(noted)} points as they were", class_="chip"),
                    tag("span", plural(len(edited), "edited key"), class_="chip"), class_="chips")  # fmt: skip
        source = str(record.get("checkpoint") or "the beginning")
        title = tag("h3", f"Start {index + 1}, from update {grouped(start.update)}")
        parts.append(tag("section", title, tag("p", tag("code", source), class_="note"), chips,
                         _differences({**changed[index], **{f"config.{k}": v for k, v in edited.items()}}),
                         _findings(noted), details(f"All {plural(len(findings), 'finding')}", _findings(findings))
                         if findings else None))  # fmt: skip
    return parts


def _config(run: WorkDir, index: int) -> dict[str, Any]:
    config = (run.starts[index].record or {}).get("config")
    return flat(config) if isinstance(config, Mapping) else {}


def _differences(found: Mapping[str, tuple[Any, Any]]) -> Html | None:
    rows = [(tag("code", k), tag("span", value_text(was), class_="old"), value_text(now)) for k, (was, now) in
            found.items()]  # fmt: skip
    return table(("Changed", "Before", "Now"), rows) if rows else None


def _findings(found: Sequence[Mapping[str, Any]]) -> Html | None:
    rows = [
        (
            tag("span", str(f.get("status")), class_=f"chip {_STATES.get(str(f.get('status')), '')}".strip()),
            tag("b", str(f.get("id", ""))),
            value_text(f.get("was")),
            value_text(f.get("now")),
            " ".join(str(f[k]) for k in ("why", "remedy") if f.get(k)),
        )
        for f in found
    ]
    return table(("Status", "Point", "Before", "Now", "Why it matters, what to do"), rows) if rows else None


def skipped_part(run: WorkDir) -> list[Any]:
    """Samples that could not be decoded: how many by reason, then the last ones."""
    if not run.skipped:
        return [missing("No sample was skipped.")]
    reasons = Counter(str(line.get("why", "–")) for line in run.skipped).most_common()
    parts: list[Any] = [
        tag("p", f"{plural(len(run.skipped), 'sample')} could not be decoded, for {plural(len(reasons), 'reason')}."),
        table(("Reason", "Samples"), [(why, grouped(count)) for why, count in reasons[:20]], numbers=(1,)),
    ]
    if len(reasons) > 20:
        parts.append(missing(f"{len(reasons) - 20} further reasons are not shown."))
    shown = run.skipped[-_MOST_ROWS:]
    rows = [(value_text(line.get("update")), str(line.get("sample", "–")), str(line.get("why", "–"))) for line in shown]
    title = f"The last {len(shown)} of {plural(len(run.skipped), 'sample')}"
    parts.append(details(title, table(("Update", "Sample", "Why"), rows, numbers=(0,))))
    return parts


def log_part(run: WorkDir) -> list[Any]:
    """Warnings and errors of ``train.log``, equal ones counted."""
    if not run.log:
        return [missing("train.log has no warning and no error.")]
    counted: dict[tuple[str, str], list[str]] = {}
    for when, level, text in run.log:
        counted.setdefault((level, text), []).append(when)
    rows = []
    for (level, text), times in [*counted.items()][-_MOST_ROWS:]:
        chip = tag("span", level.lower(), class_=f"chip {'warn' if level == 'WARNING' else 'bad'}")
        rows.append((tag("time", times[-1].partition(",")[0]), chip, grouped(len(times)), text))
    left = len(counted) - len(rows)
    note = missing(f"{left} earlier messages are not shown: see train.log.") if left > 0 else None
    return [table(("Last at", "Level", "Times", "Message"), rows, numbers=(2,)), note]


def environment_part(run: WorkDir) -> list[Any]:
    """Machine, code and versions of the last start that recorded them; versions of a checkpoint otherwise."""
    record = next((start.record for start in reversed(run.starts) if start.record), None)
    if record is None:
        manifests = [found.manifest for found in run.checkpoints if found.manifest is not None]
        versions = {str(k): str(v) for k, v in manifests[-1].versions.items()} if manifests else {}
        note = missing(f"Machine, command line and git commit: {NOT_RECORDED}")
        return [note, pairs(versions) if versions else None]
    found: dict[str, object] = {}
    for name, title in (("machine", ""), ("topology", ""), ("geometry", "")):
        part = record.get(name)
        found |= {f"{title}{key}": value_text(v) for key, v in part.items()} if isinstance(part, Mapping) else {}
    git = record.get("git")
    for name, part in git.items() if isinstance(git, Mapping) else ():
        if isinstance(part, Mapping):
            changed = {"True": "with changes that are not committed", "False": "no changes"}.get(
                str(part.get("changed"))
            )
            found[f"git commit of the {name}"] = join(
                [tag("code", str(part.get("commit", "–"))[:40]), f" {changed}" if changed else None]
            )
    if not git:
        found["git commit"] = "none: the code is in no git repository"
    used = record.get("versions")
    found |= {k: str(v) for k, v in used.items()} if isinstance(used, Mapping) else {}
    return [pairs({key.replace("_", " "): value for key, value in found.items()})]


def config_part(run: WorkDir) -> list[Any]:
    parts: list[Any] = []
    if run.config:
        rows = [(tag("code", key), value_text(value)) for key, value in sorted(flat(run.config).items())]
        parts.append(details(f"Every key ({len(rows)})", table(("Key", "Value"), rows)))
    if run.config_text is not None:
        parts.append(details("config.py", tag("pre", _masked_text(run))))
    return parts or [missing("No config is recorded: neither config.py nor a checkpoint nor timeline.jsonl has one.")]


def _masked_text(run: WorkDir) -> str:
    """config.py, or where a value of the config is masked, the masked values instead."""
    hidden = any(value == "***" for value in flat(run.config).values())
    return json.dumps(run.config, indent=1, default=str) if hidden else run.config_text or ""


def problems_part(run: WorkDir) -> Html | None:
    """Files that are missing or damaged."""
    if not run.problems:
        return None
    items = [tag("li", tag("code", name), f" {text}") for name, text in run.problems]
    return tag("div", tag("b", "Missing or damaged files"), tag("ul", *items), class_="missing")
