"""The whole matrix of engines, compared with one plain process: ``make matrix``; half an hour on 2 CPU cores.

In: ``tests/end_to_end/engines/jobs``. Out: ``results/matrix_<date>.json`` and the same as tables, ``.md``; exit
status 1 if a bound is exceeded. The tests in ``tests/end_to_end/engines`` explain the bounds. ``make test`` runs a part
of the matrix.

    python benchmarks/matrix.py [--groups equivalence resume ...] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from shared.record import write_result

from tests.end_to_end.engines.exactness import inexact, into_windows, misdealt, sequences
from tests.end_to_end.engines.jobs import cases, lora_cases, mixture_cases, model_cases
from tests.end_to_end.engines.jobs.groups import GROUPS, jobs_of
from tests.end_to_end.engines.jobs.mixture_data import removals, units
from tests.end_to_end.engines.launch import (
    METRICS,
    LaunchedRuns,
    metric_deviation,
    tensors,
    unequal,
    weight_deviation,
)

BOUND = 1e-5


@dataclass(frozen=True)
class Row:
    """One line of a table with its ``figures``; ``good``: they are within the bounds."""

    group: str
    name: str
    figures: dict[str, float | int | str]
    good: bool
    seconds: float = 0.0


Check = Callable[[LaunchedRuns, str], Row]


def near(runs: LaunchedRuns, name: str, reference: str, *, bound: float = BOUND, kind: str = "weights") -> Row:
    """Losses, norms and weights compared with another run; or ``kind``, a moment: after one update the gradient."""
    run, single = runs.outcome(name), runs.outcome(reference)
    kinds = {} if kind == "weights" else {"kinds": (kind,)}
    metrics, weights = metric_deviation(run, single), weight_deviation(run.final, single.final, **kinds)
    limit = cases.LR * len(run.lines)
    good = metrics <= bound and weights.relative_l2 <= bound and weights.absolute <= limit
    figures = {"loss and norm": metrics, kind: weights.relative_l2, "zero-gradient tensors": weights.absolute}
    return Row("", name, figures, good)


def check_bf16(runs: LaunchedRuns, name: str) -> Row:
    """As in ``tests/end_to_end/engines/models/test_model_variants.py``."""
    group = name.partition("/")[0]
    reference = f"{group.removesuffix('-bf16')}/single@1"
    run, fp32, single, other = (runs.outcome(n) for n in (name, reference, f"{group}/single@1", f"{group}/single_8x1"))
    splits = (single, other)
    deviation, own = metric_deviation(run, fp32), max(metric_deviation(split, fp32) for split in splits)
    weights = weight_deviation(run.final, single.final).relative_l2
    rounding = weight_deviation(single.final, fp32.final).relative_l2
    figures = {
        "loss and norm": deviation,
        "bound: one process's bf16 to fp32": own,
        "weights": weights,
        "bound: the same of weights": rounding,
    }
    return Row("", name, figures, deviation <= cases.BF16_SPREAD * own and weights <= rounding)


def check_resume(runs: LaunchedRuns, name: str) -> Row:
    base = name.rpartition("/")[0]
    straight, killed_run = runs.outcome(f"{base}/straight"), runs.outcome(f"{base}/killed")
    pairs = list(zip(straight.lines, killed_run.lines, strict=True))
    lines = sum(any(a[key] != b[key] for key in METRICS) for a, b in pairs)
    differing = unequal(straight.final, killed_run.final)
    figures = {"updates": len(pairs), "differing lines": lines, "differing tensors": len(differing)}
    return Row("", base, figures, len(pairs) == cases.RESUME_UPDATES and not lines and not differing)


def check_killed(runs: LaunchedRuns, name: str) -> Row:
    straight, killed_run = runs.outcome("killed/straight", name.partition("/")[2]), runs.outcome(name)
    pairs = list(zip(straight.lines, killed_run.lines, strict=True))
    lines = sum(any(a.get(key) != b.get(key) for key in METRICS) for a, b in pairs)
    differing = unequal(straight.final, killed_run.final)
    figures = {"updates": len(pairs), "differing lines": lines, "differing tensors": len(differing)}
    return Row("", name, figures, len(pairs) == model_cases.KILLED_UPDATES and not lines and not differing)


def check_lora(runs: LaunchedRuns, name: str) -> Row:
    """As ``engines/models/test_lora.py``: a link of a chain, compared with one process never stopped."""
    _, kind, part = name.split("/")
    number = int(part.partition("-")[0])
    run, straight = runs.outcome(name), runs.outcome(f"lora/{kind}/straight")
    after, bound = lora_cases.LINK * number, BOUND if kind == "dora" else 0.05
    deviation = metric_deviation(run, straight, after=after, updates=after + lora_cases.LINK)
    figures: dict[str, float | int | str] = {"loss and norm": deviation}
    if number:
        source = runs.outcome(lora_cases.link(kind, number - 1)).final
        differing = unequal(source, tensors(run.folder / "loaded.pth"))
        figures["differing tensors of adapters"] = sum(".lora_" in key for key in differing)
    return Row("", name, figures, deviation <= bound and not figures.get("differing tensors of adapters"))


def check_mixture(runs: LaunchedRuns, name: str) -> Row:
    """As ``engines/training/test_mixture.py``: losses and the sequences of each batch are those of one process;
    each pass has each record once, begins when the one before it is complete, and has none that a filter removes.
    """
    run, single = runs.outcome(name), runs.outcome("mixture/single")
    steps, folder = mixture_cases.steps_of(name), runs.out / "data" / "mixture"
    updates, rows = mixture_cases.EVERY * len(steps), sequences(single)
    deviation = metric_deviation(run, single, updates=updates)
    wrong = misdealt(run, rows, per_update=mixture_cases.SEQUENCES)
    used_rows = rows[: updates * mixture_cases.SEQUENCES]
    problems = inexact(into_windows(used_rows, run.folder), units(folder))
    out = {f"{source}:{i}" for source, rules in removals(folder).items() for numbers in rules.values() for i in numbers}
    leaks = sum(":".join(sample.split(":")[:2]) in out for row in used_rows for sample in row)
    figures: dict[str, float | int | str] = {
        "killed": sum(bool(step.kill) for step in steps),
        "updates": len(run.lines),
        "loss and norm": deviation,
        "other batches": len(wrong),
        "inexact passes": len(problems),
        "removed records": leaks,
    }
    good = deviation <= BOUND and len(run.lines) == updates and not (wrong or problems or leaks)
    title = " -> ".join(f"{step.engine}@{step.world}" + f" {step.kill or ''}".rstrip() for step in steps)
    return Row("", title, figures, good)


def check_elastic(runs: LaunchedRuns, name: str) -> Row:
    """A checkpoint of one engine loaded by another, bit by bit; in fp32 also the updates, compared with one process."""
    run, straight = runs.outcome(name), runs.outcome("elastic/straight")
    saver, _, loader = name.partition("-to-")
    figures: dict[str, float | int | str] = {}
    near_enough = []
    if loader:
        state = tensors(run.folder / "loaded.pth")
        differing = unequal(runs.outcome(saver).final, state)
        if "/fp32-" not in name:  # DeepSpeed keeps parameters that are not trained in the compute precision
            frozen_names = {key for kind, key in state if kind == "master"} - {
                k for kind, k in state if kind == "exp_avg"
            }
            differing = [key for key in differing if key.partition("|")[2] not in frozen_names]
        figures |= {"tensors": len(state), "differing tensors": len(differing)}
        near_enough.append(not differing)
    if "/fp32-" in name:
        first, last, saved_at = run.lines[0]["update"], run.lines[-1]["update"], cases.ELASTIC_SAVED
        deviation = metric_deviation(run, straight, after=first - 1, updates=last)
        figures |= {"updates": f"{first} to {last}", "loss and norm": deviation}
        span = (saved_at + 1, cases.ELASTIC_UPDATES) if loader else (1, saved_at)
        near_enough.append(deviation <= BOUND and (first, last) == span)
    return Row("", name, figures, all(near_enough))


def check_faulty(runs: LaunchedRuns, name: str) -> Row:
    run = runs.outcome(name)
    skips = [line["update"] for line in run.lines if not line["applied"]]
    before, after = (tensors(run.folder / f"iter_{2 * u}.pth") for u in (cases.BAD_UPDATE - 1, cases.BAD_UPDATE))
    changes = unequal(before, after)
    figures = {"skipped updates": str(skips), "changed tensors": len(changes)}
    return Row("", name, figures, skips == [cases.BAD_UPDATE] and not changes)


def check_parts(runs: LaunchedRuns, name: str) -> Row:
    """Frozen parameters did not change, and the others are those of one process."""
    _, part, _ = name.split("/")
    model, _, which = part.partition("-")
    prefix = model_cases.PARTS[model]["vit" if which == "rate" else which]
    run = runs.outcome(name)
    frozen = [n for n in run.initial if n.startswith(prefix)]
    changes = [n for n in frozen if not run.state[n].equal(run.initial[n])]
    row = near(runs, name, f"parts/{part}/single@1")
    return Row("", name, {**row.figures, "frozen": len(frozen), "moved": len(changes)}, row.good and not changes)


def check_odd(runs: LaunchedRuns, name: str) -> Row:
    row = near(runs, name, "odd/single@1")
    if not name.endswith("-resumed"):
        return row
    differing = unequal(runs.outcome(name).final, runs.outcome(name.removesuffix("-resumed")).final)
    return Row("", name, {**row.figures, "differing tensors": len(differing)}, row.good and not differing)


def check_published(runs: LaunchedRuns, name: str) -> Row:
    """The weights at the start are those of one process, bit by bit; in fp32 the training is compared, too.

    Position tables are frozen, and DeepSpeed rounds frozen parameters in bf16.
    """
    reference = "published/single@1-fp32"
    if name.endswith("-resumed"):
        run, straight = runs.outcome(name), runs.outcome(name.replace("-resumed", "-fp32"))
        differing = unequal(run.final, straight.final)
        return Row("", name, {"differing tensors": len(differing)}, not differing)
    mine, theirs = runs.outcome(name).initial, runs.outcome(reference).initial
    other = [n for n in theirs if not mine[n].equal(theirs[n]) and not ("bf16" in name and n.endswith("pos_embed"))]
    if "bf16" in name:
        return Row("", name, {"other at the start": len(other)}, not other)
    row = near(runs, name, reference)
    return Row("", name, {**row.figures, "other at the start": len(other)}, row.good and not other)


TITLES: dict[str, tuple[str, Check]] = {
    "equivalence": ("20 updates in fp32, compared with one process", lambda r, n: near(r, n, "single@1")),
    "resume": (
        f"Killed with SIGKILL in update {cases.KILL_AT}, resumed from update {cases.SAVED_AT}, compared with a run"
        " never stopped: bit-equal",
        check_resume,
    ),
    "killed": (
        "A language model of transformers, and adapters on it: SIGKILL in update 4, or in its save, resumed from update"
        " 2, compared with a run never stopped: bit-equal",
        check_killed,
    ),
    "lora": (
        "Adapters that go from engine to engine, compared with one process: DoRA in fp32, LoRA in bf16, QLoRA",
        check_lora,
    ),
    "mixture": (
        "A packed, filtered, weighted mixture of three formats: SIGKILL in an update or in a save, changes of engine,"
        " processes (2, 4, 1) and workers (0 to 3), compared with one process",
        check_mixture,
    ),
    "elastic": (
        "Saved by one engine, loaded by another: bit-equal by name; later updates compared with one process",
        check_elastic,
    ),
    "faulty": (f"A gradient that is not finite on one rank in update {cases.BAD_UPDATE}", check_faulty),
    "odd": ("A user's model: odd sizes, tied head, frozen tower, buffer, two groups", check_odd),
    "recompute": (
        "Activation checkpointing on, with dropout, compared with off",
        lambda r, n: near(r, n, n.replace("-True", "-False"), bound=1e-6),
    ),
    "compiled": (
        # one update of AdamW makes lr out of a gradient of any size: where a weight begins at 0, its rounding is large
        "Compiled layers compared with plain ones: losses and, as first moments, gradients",
        lambda r, n: near(r, n, n.replace("-True", "-False"), bound=1e-5, kind="exp_avg"),
    ),
    "published": ("Published weights, read into shards", check_published),
    "decoder": (
        "A language model of transformers' classes from published weights, compared with one process",
        lambda r, n: near(r, n, "decoder/single@1"),
    ),
    "models": (
        "The vision-language model, and the unified model with FLUX's autoencoder, in fp32, compared with one process",
        lambda r, n: near(r, n, n.partition("/")[0] + "/single@1"),
    ),
    "models_bf16": ("The same in bf16", check_bf16),
    "parts": ("Each part of these models frozen separately, by ``freeze`` or by a learning rate of 0", check_parts),
}
REFERENCES = {"models_bf16": "models"}
"""Groups that are compared with runs of another group."""
SKIPPED = ("/straight", "mixture/single", "lora/others", "lora/others-single")
"""Reference runs without a row of their own."""


def check_rows(runs: LaunchedRuns, groups: list[str]) -> Iterator[Row]:
    """A row for every job; a job that failed, or has no result to compare, is a bad row with its reason."""
    for group in groups:
        for job in GROUPS[group](full=True):
            if job.name.endswith(SKIPPED):
                continue
            seconds = runs.results[job.name]["seconds"]
            try:
                row = TITLES[group][1](runs, job.name)
                yield Row(group, row.name, row.figures, row.good, seconds)
            except Exception as error:  # the table must show the error, and have all other rows
                yield Row(group, job.name, {"error": f"{type(error).__name__}: {str(error)[:300]}"}, False, seconds)


def markdown(rows: list[Row], groups: list[str], path: Path) -> str:
    """One table for each group."""
    good = sum(row.good for row in rows)
    lines = [f"# The matrix of engines: {good} of {len(rows)} rows within their bounds", ""]
    lines += [f"Machine, versions and commit: `{path.name}`. Bounds: `tests/end_to_end/engines/`.", ""]
    for group in groups:
        members = [row for row in rows if row.group == group]
        columns = list(dict.fromkeys(key for row in members for key in row.figures))
        lines += [
            f"## {TITLES[group][0]}",
            "",
            f"| run | {' | '.join(columns)} | s | |",
            "|---" * (len(columns) + 3) + "|",
        ]
        for row in members:
            values = [cell_text(row.figures.get(column, "")) for column in columns]
            mark = "ok" if row.good else "**BAD**"
            lines.append(
                f"| {row.name.removeprefix(group + '/')} | {' | '.join(values)} | {row.seconds:.0f} | {mark} |"
            )
        lines.append("")
    return "\n".join(lines)


def cell_text(value: float | int | str) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if value == 0 or 0.01 <= value < 100 else f"{value:.1e}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--groups", nargs="+", choices=list(TITLES), default=list(TITLES))
    parser.add_argument("--keep", type=Path, help="folder in which work dirs and logs are kept")
    arguments = parser.parse_args()
    groups = [group for group in TITLES if group in arguments.groups]
    needed_groups = {*groups, *(reference for group, reference in REFERENCES.items() if group in groups)}
    out, start = arguments.keep or Path(tempfile.mkdtemp(prefix="matrix-")), time.monotonic()
    runs = LaunchedRuns(out, jobs_of(needed_groups, full=True), timeout_s=4 * 3600.0).finish()
    rows = list(check_rows(runs, groups))
    minutes = (time.monotonic() - start) / 60
    good = all(row.good for row in rows)
    record = {"minutes": round(minutes, 1), "accepted": good, "rows": [asdict(row) for row in rows]}
    path = write_result("matrix", record)
    text = markdown(rows, groups, path)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text, f"\n{minutes:.0f} minutes; written to {path} and {path.with_suffix('.md').name}", sep="")
    if arguments.keep is None:
        shutil.rmtree(out, ignore_errors=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
