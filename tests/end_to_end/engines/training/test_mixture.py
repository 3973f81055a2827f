"""A packed, filtered, weighted mixture of JSONL, Parquet, a tar and a user's own data set, with a mandatory group, over
all engines, 2 -> 4 -> 1 processes and 0 -> 3 workers, killed in the middle of a window and of a save.

Each engine through each change of the number of processes: ``make mixtures``.
"""

from __future__ import annotations

import json

import pytest

from tests.end_to_end.engines.exactness import consumption_of, inexact, into_windows, misdealt, sequences
from tests.end_to_end.engines.jobs import cases, mixture_cases
from tests.end_to_end.engines.jobs.mixture_data import NUM_DOCUMENTS, NUM_USED, removals, units
from tests.end_to_end.engines.launch import Outcome, metric_deviation, want
from tools import inspect_data
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.system.journals import read_lines

runs = want("mixture")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

BOUND = 1e-5
STEPS, UPDATES = mixture_cases.STEPS, mixture_cases.EVERY * len(mixture_cases.STEPS)


@pytest.fixture(scope="module")
def single() -> Outcome:
    return runs().outcome("mixture/single")


@pytest.fixture(scope="module")
def run() -> Outcome:
    return runs().outcome("mixture/engines")


def test_every_engine_is_in_it_and_2_4_1_processes_with_0_and_3_workers():
    offload = {"FULL_SHARD_offload", "zero3_offload", "zero3_preset"}
    assert {step.engine for step in STEPS} == set(cases.ALL) - offload
    assert [(step.world, step.workers, step.kill) for step in STEPS[:3]] == [
        (2, 0, "update"), (4, 3, "save"), (1, 0, ""),
    ]  # fmt: skip


def test_each_start_continues_where_the_last_complete_save_was(run):
    """The lines of lost updates are void; and each save but the last ones of an epoch is in the middle of a window."""
    raw = [json.loads(line) for line in (run.folder / "ledger.jsonl").read_text().splitlines()]
    resumes = [line["updates"] for line in raw if line.get("event") == "resume"]
    assert resumes == [mixture_cases.EVERY * number for number in range(1, len(STEPS))]
    directory, files = json.loads((run.folder / "half_saved.json").read_text())
    assert ".tmp-" in directory and files and "manifest.json" not in files, "killed in the middle of a save"
    assert list(run.folder.glob("*.tmp-*")) == []
    cursors = [Manifest.read(path).loader["cursor"] for path in run.checkpoints]
    assert [cursor["sequences"] for cursor in cursors] == [24 * number for number in range(1, len(STEPS) + 1)]
    assert all(cursor["row"] for cursor in cursors[:3]), cursors
    assert len({cursor["epoch"] for cursor in cursors}) > 2


def test_losses_and_ledger_are_those_of_one_process(run, single):
    assert [line["update"] for line in run.lines] == list(range(1, UPDATES + 1))
    assert metric_deviation(run, single) <= BOUND
    ledgers = [read_lines(one.folder / "ledger.jsonl") for one in (run, single)]
    mine, straight = ([{k: v for k, v in line.items() if k != "time"} for line in ledger] for ledger in ledgers)
    assert [line for line in mine if "digest" in line] == [line for line in straight if "digest" in line]
    for key in ("lr", "sequences", "samples", "tokens", "epoch"):
        assert [line[key] for line in run.lines] == [line[key] for line in single.lines]
    assert len({line["lr"] for line in run.lines}) > UPDATES / 3


def test_the_batches_hold_the_sequences_of_one_process_in_their_order(run, single):
    rows = sequences(single)
    assert misdealt(run, rows, per_update=mixture_cases.SEQUENCES) == []
    worlds = [max(rank for _, rank in parts) + 1 for _, parts in sorted(consumption_of(run).items())]
    assert worlds == [step.world for step in STEPS for _ in range(mixture_cases.EVERY)]
    swap = [rows[1], rows[0], *rows[2:]]
    assert len(misdealt(run, swap, per_update=mixture_cases.SEQUENCES)) == 2, "another order would be noticed"


def test_each_sample_once_in_each_pass_and_no_pass_before_the_last_is_complete(run, single):
    expected = units(run.folder.parents[1] / "data" / "mixture")
    assert len(expected["documents"] - {unit.partition(":")[0] for unit in expected["documents"]}) == 2, "two pieces"
    windows = into_windows(sequences(single), run.folder)
    assert inexact(windows, expected) == []
    passes = {sample.split(":")[2] for rows in windows for row in rows for sample in row}
    assert {"0", "1", "2"} <= passes
    assert inexact([[*windows[0], windows[0][0]], *windows[1:]], expected), "a repeated sequence would be noticed"
    assert inexact([windows[-2], *windows[1:-2], windows[0]], expected), "a pass that begins early, too"
    assert inexact([windows[0][1:], *windows[1:]], expected), "and a sequence that is missing"
    assert all(any(sample.startswith("documents:") for sample in row) for rows in windows for row in rows), "mandatory"


def test_the_tool_recomputes_the_ledger(run, capsys):
    config, ledger = run.folder / "config.py", run.folder / "ledger.jsonl"
    assert inspect_data.main([str(config), "--ledger", str(ledger)]) == 0, capsys.readouterr()
    assert f"{UPDATES} updates, sequences 0:{12 * UPDATES}" in capsys.readouterr().out


def test_what_filters_remove_never_occurs_and_is_counted(run, single, capsys):
    """In the log of each start and in the tool; with the share of the first records that are used."""
    out = removals(run.folder.parents[1] / "data" / "mixture")
    assert all(numbers for rules in out.values() for numbers in rules.values())
    draws = {tuple(sample.split(":")[:2]) for row in sequences(single) for sample in row}
    assert not draws & {(name, str(i)) for name, rules in out.items() for number in rules.values() for i in number}
    assert inspect_data.main([str(run.folder / "config.py"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    log = (run.folder / "train.log").read_text(encoding="utf-8")
    for name, rules in out.items():
        counts = {rule: len(numbers) for rule, numbers in rules.items()}
        assert report["sources"][name]["filters"]["removed"] == counts
        each = ", ".join(f"{rule} {number}" for rule, number in counts.items())
        assert log.count(f"Data, {name}: filters remove {sum(counts.values())} of ") == len(STEPS) and each in log
    assert report["sources"]["documents"]["filters"]["records"] == NUM_USED
    line = f"Data, documents: num_used_data={NUM_USED}: the first {NUM_USED} of {NUM_DOCUMENTS} records are used"
    assert log.count(line) == len(STEPS)
    assert report["sources"]["documents"]["num_used_data"] == {"used": NUM_USED, "records": NUM_DOCUMENTS}
    assert report["sources"]["documents"]["overflow"]["pieces"] == 2
    assert report["groups"]["text"]["draws_per_epoch"] >= report["groups"]["text"]["draws_by_weight"]
