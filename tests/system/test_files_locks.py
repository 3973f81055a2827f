"""One process at a time holds a lock; a killed one holds nothing; without locks the caller continues."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import popen
from unigen_ds.system.files import hold_lock

HOLD = """
import os, sys, time
from pathlib import Path
from unigen_ds.system.files import hold_lock
with hold_lock(Path(sys.argv[1])):
    child = __import__("subprocess").Popen([sys.executable, "-c", "import time; time.sleep(20)"])
    print("held", flush=True)
    time.sleep(60)
"""


def is_free(path: Path) -> bool:
    with path.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_a_killed_process_holds_nothing_although_a_child_of_it_lives_on(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    process = popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    assert not is_free(path)
    process.kill()
    process.wait()
    assert is_free(path)
    with hold_lock(path):
        assert not is_free(path)
    assert is_free(path) and path.exists(), "the file stays: two processes could lock two files of one name"


def test_where_the_file_cannot_be_made_the_caller_continues_without_a_lock(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with hold_lock(tmp_path / "file" / "lock"):
        assert not (tmp_path / "file" / "lock").exists()


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_leaves_no_file_that_later_starts_would_wait_for(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", none)
    for _ in range(2):
        with hold_lock(tmp_path / "lock"):
            assert not (tmp_path / "lock").exists() or (tmp_path / "lock").stat().st_size == 0, "no mark of an owner"
