"""A build of DeepSpeed's operator that was killed does not stop later starts."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from unigen_ds.backends.deepspeed_op import NAME, _clear_abandoned

LOAD = """
import logging, os, sys
os.environ["DS_ACCELERATOR"] = "cpu"
logging.basicConfig()
from unigen_ds.backends.deepspeed_op import load_shared_memory_op
load_shared_memory_op(quiet_s=1.0)
from deepspeed.comm.torch import build_shm_op
assert build_shm_op() is not None
from torch.utils.cpp_extension import _get_build_directory
print("FOLDER", _get_build_directory(sys.argv[1], False))
"""
BUILD = """
import sys, time
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("building", flush=True)
time.sleep(600)
"""


def _load(**env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LOAD, NAME],
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.timeout(600)
def test_the_lock_of_a_killed_build_is_cleared_by_the_next_starts(tmp_path):
    out, err = (first := _load()).communicate(timeout=400)  # built where it belongs: copied from there in a moment
    assert first.returncode == 0, err
    built = Path(out.split("FOLDER ")[1].strip())
    folder = Path(shutil.copytree(built, tmp_path / NAME))
    builder = subprocess.Popen([sys.executable, "-c", BUILD, str(folder / "lock")], stdout=subprocess.PIPE, text=True)
    assert builder.stdout is not None and builder.stdout.readline() == "building\n"
    builder.send_signal(signal.SIGKILL)
    builder.wait()
    assert (folder / "lock").exists()

    both = [_load(TORCH_EXTENSIONS_DIR=str(tmp_path)) for _ in range(2)]
    messages = [process.communicate(timeout=200)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], messages
    assert "".join(messages).count("was left by a build that was killed: removed") == 1
    assert not (folder / "lock").exists()


def test_a_build_that_goes_on_is_waited_for(tmp_path, caplog):
    lock = tmp_path / "lock"
    lock.touch()
    ended = []

    def build() -> None:
        for number in range(6):
            time.sleep(0.3)
            (tmp_path / f"{number}.o").touch()
        ended.append(time.monotonic())
        lock.unlink()

    other = threading.Thread(target=build)
    with caplog.at_level(logging.INFO):
        other.start()
        _clear_abandoned(lock, 1.0)
        found = time.monotonic()
    other.join()
    assert found >= ended[0]
    assert "may be building" in caplog.text and "removed" not in caplog.text
