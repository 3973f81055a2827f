"""Several processes of tests give the reports of one."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support import lanes
from tests.support.processes import ENVIRONMENT, ROOT, run

CONFTEST = """
import os
import pytest
from tests.support import lanes

def pytest_runtestloop(session):
    lanes.Lanes(session, own=lambda item: "own" in item.path.name, begin=lambda: os.path.exists("ran.txt")).run()
    return True
"""
TESTS = """
import os, time
import pytest

@pytest.fixture(scope="module")
def opened():
    with open("closed.txt", "a") as stream:
        yield
        stream.write("closed ")

@pytest.mark.parametrize("number", range(3))
def test_passes(number, opened):
    time.sleep(0.05)
    with open("ran.txt", "a") as stream:
        stream.write(f"{__file__} {number} {os.getpid()}\\n")
    print("printed by", __file__)
"""
FAILS = "\n\ndef test_fails():\n    print('printed')\n    assert [1] == [2]\n"


def session(folder: Path, files: dict[str, str], *arguments: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text(CONFTEST)
    for name, text in files.items():
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={folder}", *arguments]
    process = run(command, cwd=folder, env=ENVIRONMENT, text=True, timeout=120)
    return process.returncode, process.stdout + process.stderr


def test_every_test_runs_once_and_the_processes_share_them(tmp_path: Path) -> None:
    files = {f"test_{letter}.py": TESTS for letter in "abcdef"} | {"test_own.py": TESTS}
    files["test_a.py"] += FAILS
    files["test_f.py"] += FAILS
    status, output = session(tmp_path, files, "-v")
    assert status == 1 and "2 failed, 21 passed" in output, output
    assert "FAILED test_a.py::test_fails" in output and "FAILED test_f.py::test_fails" in output
    assert output.count("assert [1] == [2]") >= 2
    ran = [line.rsplit(" ", 1) for line in (tmp_path / "ran.txt").read_text().splitlines()]
    assert len(ran) == len({name for name, _ in ran}) == 21
    processes = [{pid for name, pid in ran if file in name} for file in files]
    assert all(len(numbers) == 1 for numbers in processes) and 2 <= len(set.union(*processes)) <= 1 + lanes.OTHERS
    assert processes[0] == processes[-1] != processes[-2], "the first and its own are here, the last is in another"
    here = [name.split()[0] for name, pid in ran if {pid} == processes[0]]
    assert list(dict.fromkeys(here))[1].endswith("test_own.py"), "its own as soon as the others may begin"
    assert (tmp_path / "closed.txt").read_text() == "closed " * 7
    assert output.count(" PASSED") == 21


def test_the_long_files_are_there() -> None:
    files = [path.as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    assert all(any(path.endswith(f"{name}.py") for path in files) for name in lanes.LONG)


def test_a_crash_of_another_process_is_an_error(tmp_path: Path) -> None:
    files = {"test_a.py": TESTS, "test_b.py": TESTS, "test_c.py": "import os\ndef test_ends():\n    os.abort()\n"}
    status, output = session(tmp_path, files)
    assert status == 3 and "another process of tests ended early: status -6" in output, output
    assert "test_c.py::test_ends" in output
