"""One run at a time in a work dir; a killed run keeps no lock."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.processes import ROOT, popen
from tests.small_disk import fill
from unigen_ds.checkpoint.home import WorkDirLock
from unigen_ds.core.errors import ConfigError

HOLD = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, ".")
from unigen_ds.checkpoint.home import WorkDirLock
lock = WorkDirLock(Path(sys.argv[1]))
if os.fork() == 0:  # a worker process that continues after the run is killed
    time.sleep(20)
    os._exit(0)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    process = popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_process_is_refused_and_the_first_is_named(tmp_path, holder):
    with pytest.raises(ConfigError, match=rf"another process trains in .*\(process {holder.pid} on ") as caught:
        WorkDirLock(tmp_path)
    assert caught.value.exit_status == 2


def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path, holder):
    holder.kill()
    holder.wait()
    lock = WorkDirLock(tmp_path)  # although a child process of it is still running
    assert lock.exclusive
    lock.release()
    lock.release()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        WorkDirLock(tmp_path / "file" / "work_dir")


def test_a_full_disk_is_named(small_disk):
    fill(small_disk)
    with pytest.raises(ConfigError, match=r"cannot be written: \[Errno 28\]"):
        WorkDirLock(small_disk)
