"""Killed with SIGKILL in the middle of an update and resumed at the same topology: bit-equal, under every engine.

Dropout, two loader workers, an average of the weights, a learning rate that changes with every update.
"""

from __future__ import annotations

import json

import pytest

from tests.end_to_end.engines.jobs import cases, model_cases
from tests.end_to_end.engines.jobs.groups import GROUPS
from tests.end_to_end.engines.launch import METRICS, different_values, unequal, want
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.system.journals import parse_lines

runs = want("resume", "odd", "killed")
pytestmark = pytest.mark.timeout(3600)

NAMES = sorted({job.name.rpartition("/")[0] for job in GROUPS["resume"](full=False)})
PLAIN = {"hooks.json", "config.py"}
"""Files of every checkpoint that hold no tensor."""
KILLED = [job.name for job in GROUPS["killed"](full=False) if len(job.phases) == 2 and not job.same_process]
RESUMED = [job.name for job in cases.odd(full=False) if job.name.endswith("-resumed")]


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_and_resumed_run_is_bit_equal(name):
    straight, killed_run = runs().outcome(f"{name}/straight"), runs().outcome(f"{name}/killed")
    assert len(straight.lines) == len(killed_run.lines) == cases.RESUME_UPDATES
    assert different_values(straight, killed_run) == []
    assert unequal(straight.final, killed_run.final) == []
    kinds = {kind for kind, _ in straight.final}
    assert {"master", "exp_avg", "exp_avg_sq", "step", "ema"} <= kinds


@pytest.mark.parametrize("name", NAMES)
def test_it_really_was_killed_after_the_checkpoint(name):
    """The killed run had logged update 4, was resumed from update 3, and logged update 4 again."""
    folder = runs().outcome(f"{name}/killed").folder
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    assert text.count('"event": "resume"') == 1
    assert [text.count(f'"update": {n},') for n in (cases.KILL_AT - 1, cases.KILL_AT)] == [2, 1]
    timeline = parse_lines(folder / "timeline.jsonl")[0]
    assert [line["update"] for line in timeline if line["event"] == "start"] == [0, cases.SAVED_AT], "of rank 0 alone"
    assert [line["event"] for line in timeline].count("end") == 1
    manifest = Manifest.read(folder / f"iter_{2 * cases.SAVED_AT}.pth")
    assert manifest.progress.updates == cases.SAVED_AT


@pytest.mark.parametrize("name", KILLED)
def test_a_model_of_transformers_and_adapters_on_it_go_on_bit_equal(name):
    """Killed in an update after its first micro-batch, or in a save after its first file."""
    straight, killed_run = runs().outcome("killed/straight", name.partition("/")[2]), runs().outcome(name)
    assert [line["update"] for line in killed_run.lines] == [*range(1, model_cases.KILLED_UPDATES + 1)]
    for a, b in zip(straight.lines, killed_run.lines, strict=True):
        assert all(a.get(key) == b.get(key) for key in (*METRICS, "lr", "sequences", "tokens", "samples")), a["update"]
    assert unequal(straight.final, killed_run.final) == []
    starts = [line["begun"] for line in killed_run.records(0)]
    assert set(starts) == {0, model_cases.KEPT} and starts.count(0) >= 2 * model_cases.KILLED_AT - 1
    assert {line["event"] for line in parse_lines(killed_run.folder / "timeline.jsonl")[0]} >= {"start", "end"}
    keys = {key for kind, key in killed_run.final if kind == "exp_avg"}
    assert all(".lora_" in key for key in keys) == ("adapters" in name) and len(keys) > 10
    saving = killed_run.folder / "half_saved.json"
    assert saving.is_file() == ("adapters" in name)
    if saving.is_file():
        directory, files = json.loads(saving.read_text())
        assert directory.startswith("iter_8.pth.tmp-") and files and "manifest.json" not in files


def test_step_counts_of_a_fused_optimizer_under_deepspeed_are_those_of_a_run_without_a_stop():
    """Value, dtype and device; the losses are compared above."""
    straight, killed_run = (runs().outcome(f"resume/zero2@2-fused/{kind}") for kind in ("straight", "killed"))
    for rank in range(2):
        lines = [
            [json.loads(line) for line in (run.folder / f"steps_{rank}.jsonl").read_text().splitlines()]
            for run in (straight, killed_run)
        ]
        assert [update for update, _ in lines[0]] == [*range(1, cases.RESUME_UPDATES + 1)]
        before, after = lines[1][: cases.KILL_AT - 1], lines[1][cases.KILL_AT - 1 :]
        assert before == lines[0][: cases.KILL_AT - 1] and after == lines[0][cases.SAVED_AT :]
        for update, steps in lines[0]:
            assert steps and all(step == [update, "torch.float32", "cpu", "cpu", True] for step in steps)


@pytest.mark.parametrize("name", RESUMED)
def test_tied_frozen_and_odd_parameters_go_on_bit_equal(name):
    resumed_run, straight = runs().outcome(name), runs().outcome(name.removesuffix("-resumed"))
    assert [line["loss"] for line in resumed_run.lines] == [line["loss"] for line in straight.lines]
    assert unequal(resumed_run.final, straight.final) == []
    assert int(resumed_run.final["buffer", "calls"]) == 2 * cases.ODD_UPDATES


@pytest.mark.parametrize("name", RESUMED)
def test_what_they_resumed_from_is_two_files(name):
    """``form='full'``: no file of an engine or of a rank is left, except the generators' states."""
    folder = runs().outcome(name).folder / f"iter_{cases.ODD_UPDATES}.pth"
    manifest = Manifest.read(folder)
    paths = {entry.path for entry in manifest.files if not entry.path.startswith("rng/")}
    assert paths >= {"model.safetensors", "optimizer.safetensors", "ema/rank00000.safetensors"}
    assert paths - {"model.safetensors", "optimizer.safetensors", "ema/rank00000.safetensors"} == PLAIN
    on_disk = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert on_disk == {entry.path for entry in manifest.files} | {"manifest.json"}
    assert manifest.layout == "safetensors" and manifest.topology["dp_size"] == 2
    assert len([path for path in on_disk if path.startswith("rng/")]) == 2
