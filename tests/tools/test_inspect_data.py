"""The tool a user runs: statistics, samples of a range, and a real ledger, one with a resume in it, derived anew."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.data.support import make_stream, mixed_dataset
from tests.support.processes import ROOT, run
from tests.tiny import TINY, tiny_config
from tools.inspect_data import check_ledger, lines_of, main
from unigen_ds.data.batches.change import continue_stream
from unigen_ds.data.batches.statistics import derive
from unigen_ds.data.batches.stream import SequenceStream
from unigen_ds.data.order.order import Cursor
from unigen_ds.runner import Runner
from unigen_ds.system.journals import sample_digest

UNPACKED = {"train_dataloader.packing": None, "train_dataloader.batch_size": 20}
Report = Callable[..., tuple[int, dict[str, Any]]]


def options(data: Path, **more: Any) -> list[str]:
    values = {**TINY, "train_dataloader.dataset.root": str(data), "train_dataloader.dataset.split": "val", **more}
    return ["--cfg-options", *(f"{key}={value}" for key, value in values.items())]


@pytest.fixture
def report(digits: Path, capsys: pytest.CaptureFixture[str]) -> Report:
    """Exit status and the JSON object of ``inspect_data unified_digits ...``."""

    def run(*arguments: str, **more: Any) -> tuple[int, dict[str, Any]]:
        status = main(["unified_digits", "--json", *arguments, *options(digits, **more)])
        return status, json.loads(capsys.readouterr().out)

    return run


@pytest.fixture(scope="module", params=[{}, UNPACKED], ids=["packed", "unpacked"])
def resumed_run(request: pytest.FixtureRequest, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """6 updates; then back to the checkpoint of update 3 and on to 8: lines 4 to 6 are in the ledger twice."""
    work_dir = tmp_path_factory.mktemp("run")
    overrides = {"default_hooks.checkpoint.interval": 3, "train_dataloader.dataset.split": "val", **request.param}
    for resume, updates in ((False, 6), (str(work_dir / "iter_3.pth"), 8)):
        options = {key.replace(".", "__"): value for key, value in overrides.items()}
        Runner.from_cfg(tiny_config(work_dir, digits, resume=resume, **options), max_updates=updates).train()
    return work_dir / "ledger.jsonl", request.param


def test_statistics_are_those_of_the_data(report: Report) -> None:
    status, result = report()
    assert status == 0
    assert result["records"] == 594  # 297 held-out digits, drawn and described
    (source,) = result["sources"].values()
    assert source["records_with_images"] == 594 and source["records_text_only"] == 0
    assert source["image_targets"] == 297 * 16 and source["text_targets"] == 297 * 5
    assert 0.8 < result["utilisation"] <= 1.0


def test_statistics_as_text(digits: Path) -> None:
    """As a user starts it: a script of a checkout."""
    command = [sys.executable, str(ROOT / "tools" / "inspect_data.py"), "unified_digits", *options(digits)]
    process = run(command, text=True, timeout=120, cwd=digits.parent)
    assert process.returncode == 0, process.stderr
    assert "digits_val: 594 records" in process.stdout and "image targets" in process.stdout


def test_a_ledger_with_a_resume_agrees(report: Report, resumed_run: Any) -> None:
    ledger, more = resumed_run
    texts = ledger.read_text().splitlines()
    assert len(texts) == 6 + 1 + 5, "the resume voids three lines and they were written again"
    status, result = report("--ledger", str(ledger), **more)
    assert (status, result["agrees"], result["updates"]) == (0, True, 8)
    last = json.loads(texts[-1])
    assert result["sequences"] == [0, last["sequences"][1]] and result["same_data"]
    lines = [json.loads(text) for text in texts]
    rest = lines[:3] + lines[7:]
    assert result["samples"] == sum(line["samples"] for line in rest)


def test_sequences_have_the_digest_of_the_ledger(report: Report, resumed_run: Any) -> None:
    ledger, more = resumed_run
    line = json.loads(ledger.read_text().splitlines()[-1])
    first, stop = line["sequences"]
    status, result = report("--sequences", f"{first}:{stop}", **more)
    assert status == 0 and result["digest"] == line["digest"]
    assert len(result["samples"]) == stop - first and sum(map(len, result["samples"])) == line["samples"]
    assert report("--sequences", f"{first}:{stop - 1}", **more)[1]["digest"] != line["digest"]


def tamper(ledger: Path, folder: Path, change: Callable[[list[dict[str, Any]]], Any]) -> Path:
    """A copy of the ledger whose counted lines were changed."""
    lines = [json.loads(text) for text in ledger.read_text().splitlines()]
    lines = lines[:3] + lines[7:]
    change(lines)
    path = folder / "ledger.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("change", "update", "problem"),
    [
        (lambda lines: lines[4].update(digest="0" * 16), 5, "has digest 0000000000000000"),
        (lambda lines: lines.pop(2), 4, "update 4 follows update 2"),
        (lambda lines: lines.insert(3, lines[2]), 3, "update 3 follows update 3"),
        (lambda lines: lines[2].update(sequences=lines[1]["sequences"]), 3, "some were repeated"),
        (lambda lines: lines[2].update(sequences=lines[3]["sequences"]), 3, "some were skipped"),
    ],
    ids=["digest", "missing", "twice", "repeated", "skipped"],
)
def test_a_wrong_ledger_is_found(
    report: Report, resumed_run: Any, tmp_path: Path, change: Any, update: int, problem: str
) -> None:
    ledger, more = resumed_run
    status, result = report("--ledger", str(tamper(ledger, tmp_path, change)), **more)
    assert status == 1 and not result["agrees"]
    assert result["update"] == update and problem in result["problem"]


def ledger_lines(stream: SequenceStream, first: int, updates: int) -> list[dict[str, Any]]:
    """Updates of four sequences from sequence ``first`` on."""
    entries = []
    for start in range(first, first + 4 * updates, 4):
        names = [name for row in derive(stream, start, start + 4) for name in row]
        line = {"update": start // 4 + 1, "sequences": [start, start + 4], "samples": len(names)}
        entries.append({**line, "digest": sample_digest(names)})
    return entries


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("choice", ["append", "restart"])
def test_a_ledger_over_changed_data(tmp_path: Path, window: int | None, choice: Any) -> None:
    old = make_stream([mixed_dataset(tmp_path / "old", 17, name="a")], window=window)
    present = make_stream([mixed_dataset(tmp_path / "new", 22, name="a")], window=window, sequences_per_epoch=17)
    cursor: Cursor = old.seek(8)
    new, _ = continue_stream({"cursor": cursor.state_dict(), **old.identity}, present, on_change=choice)
    lines = ledger_lines(old, 0, 2) + ledger_lines(new, 8, 12)
    path = tmp_path / "ledger.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = check_ledger(new, path, manifest=None)
    assert report["agrees"] and (report["replaced"], report["updates"]) == ((0, 14) if choice == "append" else (2, 12))
    assert ("2 updates before the data was replaced" in "\n".join(lines_of(report))) == (choice == "restart")
    assert not check_ledger(old, path, manifest=None)["agrees"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines[:1] + lines[2:]))
    assert "follows update 1" in check_ledger(new, path, manifest=None)["problem"]


def test_an_unpacked_epoch_needs_the_first_world_size(report: Report, resumed_run: Any, tmp_path: Path) -> None:
    """297 x 2 records: 29 x 20 in an epoch of one process, 14 x 40 in one of two. Checkpoints beside a ledger know."""
    assert report(**UNPACKED)[1]["sequences_per_epoch"] == 580
    assert report("--world-size", "2", **UNPACKED)[1]["sequences_per_epoch"] == 560
    assert report("--world-size", "2")[1]["sequences_per_epoch"] == report()[1]["sequences_per_epoch"]
    ledger, more = resumed_run
    assert report("--ledger", str(ledger), "--world-size", "2", **more)[0] == 0
