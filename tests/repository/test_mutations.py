"""``tests/mutations.toml`` fits the tree; ``tests/mutate.py`` works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import mutate

ROOT = Path(__file__).resolve().parents[2]
MUTATIONS = mutate.load()
LEAST, MOST = 140, 180
"""Edits of the guarantees: order, cursor, packing, schedule, checkpoint, engines, loss, averages, resume."""


def test_there_are_enough() -> None:
    assert LEAST <= len(MUTATIONS) <= MOST


def test_every_edit_can_be_applied_and_its_test_exists() -> None:
    assert [f"{m.id}: {problem}" for m in MUTATIONS if (problem := m.problem()) is not None] == []
    for edit in MUTATIONS:
        path, _, name = edit.test.partition("[")[0].partition("::")
        assert f"def {name.rpartition('::')[2]}" in (ROOT / path).read_text(encoding="utf-8"), edit.test


def test_parts_are_a_partition_that_keeps_tests_together() -> None:
    parts = [mutate.part_of(MUTATIONS, f"{k}/10") for k in range(1, 11)]
    assert sorted(m.id for part in parts for m in part) == sorted(m.id for m in MUTATIONS)
    tests = [{m.test for m in part} for part in parts]
    assert sum(map(len, tests)) == len(set().union(*tests))
    with pytest.raises(SystemExit, match="K/N"):
        mutate.part_of(MUTATIONS, "0/10")


EDITS = """
[caught]
rows = []
file = "unigen_ds/core/progress.py"
find = "sequences=self.sequences + sequences"
replace = "sequences=self.sequences"
test = "tests/core/test_progress.py"

[harmless]
rows = []
file = "unigen_ds/core/progress.py"
find = "epoch=epoch,"
replace = "epoch=epoch + 0,"
test = "tests/core/test_progress.py"

[of-no-test]
rows = []
file = "unigen_ds/core/progress.py"
find = "epoch=epoch,"
replace = "epoch=0,"
test = "tests/core/test_progress.py::test_that_does_not_exist"
"""


@pytest.mark.slow
def test_a_detected_edit_a_survivor_and_one_without_a_result(tmp_path: Path) -> None:
    file = tmp_path / "edits.toml"
    file.write_text(EDITS)
    command = [sys.executable, "-m", "tests.mutate", "--list", str(file), "--tests-passed"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    outcomes = dict(re.findall(r"^(detected|survived|no result).*? ([\w-]+)  \(", process.stdout, re.MULTILINE))
    assert process.returncode == 1, process.stdout + process.stderr
    assert outcomes == {"detected": "caught", "survived": "harmless", "no result": "of-no-test"}
    assert "1 detected, 1 survived, 1 without a result, 0 not run" in process.stdout


def test_random_edits_are_one_change_each_of_valid_python() -> None:
    edits = [*mutate.random_edits(ROOT, "unigen_ds/core/progress.py", "tests/core/test_progress.py")]
    assert mutate.own_tests("unigen_ds/core/progress.py") == ["tests/core/test_progress.py"]
    assert {edit.operator for edit in edits} >= {"comparison", "constant", "sign", "off by one"}
    for edit in edits:
        compile(edit.replace, edit.file, "exec")
        before, after = edit.find.splitlines(), edit.replace.splitlines()
        assert before[: edit.line - 1] == after[: edit.line - 1] and before[edit.line - 1] != after[edit.line - 1]
