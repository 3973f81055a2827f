"""``benchmarks/gpu.py``, as far as a CPU can show it, and the summary of all results."""

from __future__ import annotations

import ast
import importlib
import json
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, summary
from tests.support.needs import slow
from tests.support.processes import ENVIRONMENT, ROOT, run

QUICK, GPU_CHECKS = ["optimizer", "resume", "unified_4096"], "shared.gpu_checks"


@pytest.mark.parametrize("only", [QUICK, *slow([])], ids=["some", "all"])
def test_a_rehearsal_runs_the_checks_and_measures_nothing(tmp_path: Path, only: list[str]) -> None:
    command = [sys.executable, "benchmarks/gpu.py", "--rehearse", "--out", tmp_path]
    process = run([*command, *(["--only", *only] if only else [])], cwd=ROOT, env=ENVIRONMENT, text=True, timeout=280)
    assert process.returncode == 0, process.stdout + process.stderr
    (path,) = tmp_path.glob("gpu_rehearsal_*.json")
    checks = json.loads(path.read_text())["checks"]
    names = only or importlib.import_module(GPU_CHECKS).CHECKS
    assert {check["status"] for check in checks} == {"rehearsed"} and len(checks) == len(names)
    figures = [one for check in checks for one in check["figures"]]
    assert {one["value"] for one in figures} == {"not measured"} and {one["holds"] for one in figures} == {None}
    values = {one["name"]: one["rehearsed"] for one in figures}
    assert values["single: values of 2 updates that differ after a resume"] == 0 < values["tokens a second"]
    assert path.with_suffix(".html").read_text().count(">not measured<") == len(figures)


def test_a_check_that_fails_or_has_no_time_is_reported_and_the_next_one_runs(monkeypatch, capsys) -> None:
    module = importlib.import_module(GPU_CHECKS)

    def fails(check):
        check.figure("first", 1.0)
        raise ValueError("of the second")

    entries = {"a": module.Entry("one", fails, 9), "b": module.Entry("two", lambda check: check.figure("x", 2), 9),
               "c": module.Entry("three", fails, 9, packages=("peft",))}  # fmt: skip
    monkeypatch.setattr(module, "CHECKS", entries)
    record = gpu.run_all(Namespace(only=None, minutes=8, rehearse=True), ["peft (checks of adapters)"])
    failure, success, absent = record["checks"]
    assert failure["status"] == "error" and "ValueError: of the second" in failure["problem"]
    assert [one["rehearsed"] for one in failure["figures"]] == [1.0] and success["status"] == "rehearsed"
    assert absent["text"] == "not run: peft is missing"
    late = gpu.result_of("a", Path("x"), time.monotonic(), rehearse=False, missing=[])
    assert (late["status"], late["text"]) == ("time", "not run: no time was left")
    assert gpu.main(["--rehearse", "--only", "zz"]) == 2 and "allowed: a, b, c" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        gpu.main(["--minutes", "0"])
    assert "--minutes 0; allowed: more than 0" in capsys.readouterr().err
    monkeypatch.setattr(gpu, "NEEDED", ("torch", "no-such-package"))
    monkeypatch.setattr(gpu, "LEAST_TORCH", (99, 0))
    assert gpu.main([]) == 2 and "missing: torch >= 99.0 (it is" in capsys.readouterr().out


def test_functions_of_cuda_that_only_a_device_calls_exist() -> None:
    nodes = [node for path in (ROOT / "benchmarks").rglob("gpu*.py") for node in ast.walk(ast.parse(path.read_text()))]
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.cuda"}
    assert len(names) > 5 and [name for name in names if not hasattr(torch.cuda, name)] == []


def test_the_summary_has_a_row_for_each_promise(tmp_path: Path) -> None:
    old = {"cpu": "C", "cores": 2, "runs": [{"engine": "deepspeed", "bytes": 5}, {"engine": "single", "bytes": 4}]}
    (tmp_path / "saving_2026-01-02.json").write_text(json.dumps(old))
    (tmp_path / "saving_2026-01-02_2.json").write_text(json.dumps({"runs": []}))  # newer, without these values
    (tmp_path / "run_files_2026-01-02.json").write_text(json.dumps({"cpu_seconds": {"list": [0.1, 0.2, 0.3]}}))
    figures = [{"name": "x", "unit": "s", "value": 2.0, "most": 1, "least": None, "holds": False}]
    checks = [{"title": "T", "status": "misses", "text": "misses", "figures": figures}]
    (tmp_path / "gpu_2026-01-02.json").write_text(json.dumps({"device": "H", "checks": checks}))
    page = summary.summary(tmp_path).splitlines()
    rows = {row.split(" | ")[0][2:]: row for row in page if row.startswith("| ")}
    assert len(rows) == len(summary.ROWS) + 3
    bytes_row = rows["bytes of a ZeRO-2 save"]
    assert "| 1.25 | at most 1.02 | **misses** | C, 2 cores | `saving_2026-01-02.json`" in bytes_row
    assert [line.partition(":")[0] for line in page if line.startswith("* ")] == ["* bytes of a ZeRO-2 save"]
    assert "| 0.2 s of CPU time |" in rows["`checkpoints.py list`"] and "| holds |" in rows["`checkpoints.py list`"]
    assert "not measured" in rows["load at 1,024 ranks"] and "**misses** | H" in rows["T: x"]


def test_the_summary_is_that_of_the_results_and_each_miss_has_a_reason() -> None:
    page = (summary.RESULTS / "summary.md").read_text(encoding="utf-8")
    assert page == summary.summary(summary.RESULTS), "run python benchmarks/summary.py"
    rows = {row.title: row.why for row in summary.ROWS if summary.MISSES in summary.cells(row, summary.RESULTS)}
    assert [title for title, why in rows.items() if not why] == []
