"""Disks that refuse, are gone, or are slow: real mounts, before a blocking save and during an asynchronous one.

The run says so, and goes on or ends as ``on_save_error`` says; what was saved before stays, and no line is lost.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import small_disk as disks
from tests.end_to_end.resume.test_async_save import iterations, names
from tests.end_to_end.resume.test_saving import config
from unigen_ds.config.registry import HOOKS
from unigen_ds.core.errors import SaveError
from unigen_ds.examples.digits.dataset import write_digits
from unigen_ds.hooks.base import Hook
from unigen_ds.hooks.save import checkpoint
from unigen_ds.runner import Runner
from unigen_ds.system.journals import read_lines

FAULTS = {
    "inodes": r"\[Errno 28\] No space left on device.* bytes are free there; it has \d+ files and only \d can be made",
    "read_only": r"\[Errno 30\] Read-only file system",
    "gone": "was moved or deleted during the run, or its disk is no longer mounted. Remedy: move it back, or mount it",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_digits(tmp_path_factory.mktemp("data") / "digits")


@pytest.fixture
def work_dir(small_disk, tmp_path) -> Iterator[Path]:
    """A folder of the small disk, mounted a second time."""
    folder = tmp_path / "work"
    for path in (folder, small_disk / "run"):
        path.mkdir()
    disks.bind(small_disk / "run", folder)
    yield folder
    with contextlib.suppress(OSError):
        while True:
            disks.unmount(folder)


@HOOKS.register_module()
class DiskFaultHook(Hook):
    """The disk fails after update 2 until after update 7. ``disk`` is where the file system has its root."""

    priority = 75  # after the checkpoint hook

    def __init__(self, *, fault: str, disk: str) -> None:
        self.fault, self.disk = fault, Path(disk)

    def after_update(self, run: Any, result: Any) -> None:
        if run.progress.updates == 2:
            if run._writer is not None:  # it is about to begin
                os.kill(run._writer._process.pid, signal.SIGSTOP)
            self.begin(run.work_dir)
            if run._writer is not None:
                os.kill(run._writer._process.pid, signal.SIGCONT)
        if run.progress.updates == 7:
            self.end(run.work_dir)

    def begin(self, work_dir: Path) -> None:
        if self.fault == "gone":
            disks.unmount(work_dir)
        elif self.fault == "read_only":
            disks.bind(work_dir, work_dir, read_only=True)
        else:
            with contextlib.suppress(OSError):
                for number in range(10000):
                    (self.disk / f"{number}.empty").touch()

    def end(self, work_dir: Path) -> None:
        if self.fault == "gone":
            disks.bind(self.disk / "run", work_dir)
        elif self.fault == "read_only":
            disks.unmount(work_dir)
        for path in self.disk.glob("*.empty"):
            path.unlink()


def train(work_dir: Path, data: Path, **given: Any) -> None:
    overrides = {f"default_hooks__checkpoint__{key}": value for key, value in given.items() if key != "custom_hooks"}
    hooks = given.get("custom_hooks", [])
    Runner.from_cfg(config(work_dir, data, train_cfg={"max_updates": 10}, custom_hooks=hooks, **overrides)).train()


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_run_says_so_and_goes_on(small_disk, work_dir, data, fault, async_save, capsys):
    hook = dict(type="DiskFaultHook", fault=fault, disk=str(small_disk))
    train(work_dir, data, async_save=async_save, custom_hooks=[hook])
    failed = re.findall(r"ERROR could not write checkpoint \S+/(iter_\d.pth): (.*)", capsys.readouterr().err)
    assert [name for name, _ in failed] == iterations(*([2] if async_save else []), 4, 6)
    assert all(text.endswith("Training continues without this checkpoint.") for _, text in failed)
    assert all(re.search(FAULTS[fault], text) for name, text in failed if name != "iter_2.pth"), failed
    assert names(work_dir) == iterations(*([] if async_save else [2]), 8, 10) and not list(work_dir.glob("*.tmp-*"))
    for name in ("metrics.jsonl", "ledger.jsonl"):
        assert [line["update"] for line in read_lines(work_dir / name)] == [*range(1, 11)]


@pytest.mark.parametrize("async_save", [False, True])
def test_the_run_ends_where_that_is_asked_for(small_disk, work_dir, data, async_save):
    hook = dict(type="DiskFaultHook", fault="read_only", disk=str(small_disk))
    with pytest.raises(SaveError, match=rf"iter_{2 if async_save else 4}.pth: .*Read-only file system") as raised:
        train(work_dir, data, async_save=async_save, on_save_error="stop", custom_hooks=[hook])
    assert raised.value.exit_status == 4 and names(work_dir) == ([] if async_save else iterations(2))


@pytest.mark.parametrize("async_save", [False, True])
def test_a_disk_that_is_slower_than_the_interval_is_one_line(tmp_path, data, async_save, monkeypatch, capsys):
    monkeypatch.setattr(checkpoint, "SLOW_S", 0.3)
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: time.sleep(0.15) or fsync(number))
    train(tmp_path, data, async_save=async_save)
    text = (
        r"A save takes (\S+) s, and the training between two saves (\S+) s: set default_hooks.checkpoint.interval,"
        r" which is 2 \(iteration\), to (\d+) or more(.*)\."
    )
    [(took, trained, interval, more)] = re.findall(text, capsys.readouterr().err)
    assert (
        float(took) > max(float(trained), 0.3) and int(interval) > 2 and ("async_save=True" in more) == (not async_save)
    )
