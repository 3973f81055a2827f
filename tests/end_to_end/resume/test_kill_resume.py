"""Kill a run anywhere, resume it, and get the run that was never killed: bit for bit. Real processes, real SIGKILL."""

from __future__ import annotations

import json
import time
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.resume.kill_tools import UPDATES, Bench, metric_lines
from unigen_ds.checkpoint import store
from unigen_ds.checks.certificate import differences
from unigen_ds.system.journals import read_lines

STRAIGHT = "straight"
LAST = "iter_60.pth"


@pytest.fixture(scope="session")
def bench(tmp_path_factory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("kill"))
    ending = bench.train(STRAIGHT, fresh=True)
    assert ending.status == 0, ending.output
    return bench


def assert_same_run(bench: Bench, name: str) -> None:
    """Every counted line, every sample, every tensor at the end."""
    straight, other = bench.work_dir(STRAIGHT), bench.work_dir(name)
    assert differences(straight, other) == []
    assert (other / store.HINT).read_text().strip() == str(other / LAST)


def resume(bench: Bench, name: str, *arguments: str, start: str | None) -> str:
    """Resume to the end. ``start``: the checkpoint it must go on from; None: none is there."""
    ending = bench.train(name, "--resume", *arguments)
    assert ending.status == 0, ending.output
    if start is None:
        assert f"No checkpoint found in {bench.work_dir(name)}: training starts from scratch." in ending.output
    else:
        assert f"Auto resumed from the latest checkpoint {bench.work_dir(name) / start}." in ending.output
    return ending.output


def workers(number: int) -> tuple[str, str]:
    return "--cfg-options", f"train_dataloader.num_workers={number}"


def processes_of(work_dir: Path) -> list[int]:
    """Of this work dir: a loader's processes have the command line of the run."""
    running = psutil.process_iter(["cmdline", "status"])
    return [p.pid for p in running if str(work_dir) in (p.info["cmdline"] or ()) and p.info["status"] != "zombie"]


def test_the_straight_run_is_a_fair_judge(bench):
    """It crosses epochs, both losses and dropout are at work, the average has begun, and old checkpoints went."""
    lines = metric_lines(bench.work_dir(STRAIGHT))
    assert [line["update"] for line in lines] == list(range(1, UPDATES + 1))
    assert lines[-1]["epoch"] > 2 and len({line["loss"] for line in lines}) == UPDATES
    assert all(line["loss/text"] and line["loss/image"] for line in lines)
    checkpoints = store.list_checkpoints(bench.work_dir(STRAIGHT))
    assert [f.path.name for f in checkpoints] == ["iter_48.pth", LAST]
    assert json.loads((checkpoints[-1].path / "hooks.json").read_text())["ema"]["num_updates"] == UPDATES - 5
    ledger = [line["sequences"] for line in read_lines(bench.work_dir(STRAIGHT) / "ledger.jsonl")]
    assert ledger == [[12 * number, 12 * number + 12] for number in range(UPDATES)]


def test_killed_between_updates(bench):
    bench.kill("between", "update:10")
    assert metric_lines(bench.work_dir("between"))[-1]["update"] == 10
    resume(bench, "between", start="iter_24.pth")
    assert_same_run(bench, "between")


@pytest.mark.slow
def test_killed_during_accumulation_with_worker_processes(bench):
    bench.kill("accumulating", "iteration:10", *workers(2), fresh=True)
    until = time.monotonic() + 30
    while processes := processes_of(bench.work_dir("accumulating")):
        assert time.monotonic() < until, f"loader processes outlive the killed run: {processes}"
        time.sleep(0.2)
    resume(bench, "accumulating", *workers(2), start="iter_24.pth")
    assert_same_run(bench, "accumulating")


@pytest.mark.slow
def test_killed_while_weights_alone_are_exported(bench):
    """What is half there has no name that anyone takes, and the next start removes it. The checkpoint is complete."""
    arguments = ("--cfg-options", "default_hooks.checkpoint.weights_interval=24")
    bench.kill("exporting", "exported:iter_24", *arguments)
    weights = bench.work_dir("exporting") / store.WEIGHTS
    (folder,) = weights.iterdir()
    assert folder.name.startswith(".iter_24.writing-") and (folder / "model.safetensors").stat().st_size
    output = resume(bench, "exporting", *arguments, start="iter_24.pth")
    assert f"Removed {folder}, left by an interrupted save" in output
    assert sorted(path.name for path in weights.iterdir()) == ["iter_48", "iter_48_ema"]
    assert_same_run(bench, "exporting")


def test_killed_again_and_again(bench):
    """Before the first save, while a save is staged, right after a commit, while an old one is deleted."""
    name = "again"
    work_dir = bench.work_dir(name)
    bench.kill(name, "update:2", *workers(2))
    assert not store.list_checkpoints(work_dir)
    resume_until = ("--resume", *workers(0))
    output = bench.kill(name, "staged:iter_24.pth", *resume_until)
    assert "training starts from scratch" in output
    staging = [path.name for path in work_dir.glob("iter_24.pth.tmp-*")]
    assert staging, "the kill was to leave a staged checkpoint behind"
    assert not (work_dir / "iter_24.pth").exists()

    output = bench.kill(name, "renamed:iter_24.pth", "--resume", *workers(2))
    assert f"Auto resumed from the latest checkpoint {work_dir / 'iter_12.pth'}." in output
    assert [path.name for path in work_dir.glob("*.tmp-*")] == [], "what a killed save left is swept at the next start"
    assert (work_dir / store.HINT).read_text().strip().endswith("iter_12.pth")  # older than what is committed

    output = bench.kill(name, "deleting:iter_12.pth", *resume_until)
    assert f"Auto resumed from the latest checkpoint {work_dir / 'iter_24.pth'}." in output
    assert (work_dir / "iter_36.pth").is_dir() and not (work_dir / "iter_12.pth").exists()

    assert bench.train(name, "--resume").status == 0
    assert_same_run(bench, name)
    assert sorted(path.name for path in work_dir.glob("iter_*")) == ["iter_48.pth", LAST]


def test_the_number_of_workers_changes_nothing(bench):
    assert bench.train("workers", *workers(2)).status == 0
    assert_same_run(bench, "workers")
