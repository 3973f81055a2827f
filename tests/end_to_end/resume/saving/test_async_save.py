"""``CheckpointHook(async_save=True)``: writers that die, runs that end; disks that fail, also of blocking saves."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest
import torch

from tests.checkpoint.support import tree
from tests.end_to_end.resume.saving.test_saving import config, fill, free
from tests.support import small_disk as disks
from tests.support.needs import slow
from unigen_ds.checkpoint import store
from unigen_ds.config.registry import HOOKS
from unigen_ds.core.errors import SaveError, TrainingError
from unigen_ds.hooks.base import Hook
from unigen_ds.hooks.save import checkpoint
from unigen_ds.runner import Runner
from unigen_ds.system.journals import read_lines

UPDATES = 10
"""A checkpoint after every second one."""


@pytest.fixture(scope="module")
def blocking(tmp_path_factory, digits):
    """The work dir of the same run with blocking saves."""
    work_dir = tmp_path_factory.mktemp("blocking")
    Runner.from_cfg(config(work_dir, digits, train_cfg={"max_updates": UPDATES})).train()
    return work_dir


def train(work_dir, digits, *, resume=False, checkpoint=MappingProxyType({}), **actions):
    """``_3='stop fill'``: what ``ActHook`` does after update 3."""
    options = {"async_save": True, "max_keep_ckpts": -1, **checkpoint}
    overrides = {f"default_hooks__checkpoint__{key}": value for key, value in options.items()}
    overrides |= {"train_cfg": {"max_updates": UPDATES}}
    hooks = [dict(type="ActHook", actions={number[1:]: names.split() for number, names in actions.items()})]
    Runner.from_cfg(config(work_dir, digits, custom_hooks=hooks, resume=resume, **overrides)).train()


def names(folder):
    return [one.path.name for one in store.list_checkpoints(folder)]


def iterations(*numbers):
    return [f"iter_{n}.pth" for n in numbers]


@HOOKS.register_module(force=True)
class ActHook(Hook):
    """Does something to the run or its writer after some updates; a writer that is stopped has not written yet."""

    priority = 75  # after the checkpoint hook

    def __init__(self, *, actions):
        self.actions, self.complete, self.at = actions, [], {}

    def after_update(self, run, result):
        assert run._writer is None or not run._writer._memory._copies, "training continues after the copy"
        self.at[run.progress.updates] = (names(run.work_dir), [*self.complete])
        for name in self.actions.get(str(run.progress.updates), ()):
            getattr(self, name)(run)

    def after_save_checkpoint(self, run, path):
        self.complete.append(path.name)

    def after_run(self, run):
        AT.clear()
        AT.update(self.at)

    def stop(self, run):
        os.kill(run._writer._process.pid, signal.SIGSTOP)

    def go(self, run):
        os.kill(run._writer._process.pid, signal.SIGCONT)

    def wait(self, run):
        if run._writer._attempt is not None:
            run._writer._look(60.0)

    def go_later(self, run):
        threading.Timer(1.0, self.go, [run]).start()

    def kill(self, run):
        os.kill(run._writer._process.pid, signal.SIGKILL)

    def die(self, run):
        (run.work_dir / "writer").write_text(str(run._writer._process.pid))
        os.kill(os.getpid(), signal.SIGKILL)

    def terminate(self, run):
        os.kill(os.getpid(), signal.SIGTERM)

    def fail(self, run):
        raise RuntimeError("a hook of mine")

    def spoil(self, run):
        with torch.no_grad():
            run.backend.master_shards()[0].data[0] = float("nan")

    def fill(self, run):
        fill(run)

    def free(self, run):
        free(run)

    def inodes(self, run):
        with suppress(OSError):
            for number in range(1000):
                (run.work_dir / f"{number}.empty").touch()

    def free_inodes(self, run):
        for path in run.work_dir.glob("*.empty"):
            path.unlink()

    def read_only(self, run):
        disks.bind(run.work_dir, run.work_dir, read_only=True)

    def unmount(self, run):
        disks.unmount(run.work_dir)

    def mount(self, run):
        disks.bind(run.work_dir.parent / "disk" / "run", run.work_dir)


AT = {}
"""After each update: the checkpoints, and those that hooks were told of."""


def test_everything_follows_the_commit_and_a_due_save_waits(tmp_path, digits, blocking, capsys):
    train(tmp_path, digits, _2="stop", _3="go", checkpoint={"max_keep_ckpts": 2})
    assert AT[2] == AT[3] == ([], [])
    assert AT[4][0][:1] == AT[4][1] == iterations(2), "the save of update 4 has waited for it"
    assert AT[10][0] == names(tmp_path) == iterations(8, 10) and AT[10][1] == iterations(2, 4, 6, 8, 10)
    output = capsys.readouterr().err
    assert re.findall(r"Saved checkpoint \S+/(iter_\d+.pth)", output) == iterations(2, 4, 6, 8, 10)
    assert output.index("Saved checkpoint") > output.index("update 3 ")
    for name in iterations(8, 10):
        one, other = tree(tmp_path / name), tree(blocking / name)
        assert one.keys() == other.keys() and one["optimizer.safetensors"] == other["optimizer.safetensors"]


@pytest.mark.slow
def test_a_due_save_is_skipped_by_choice(tmp_path, digits, capsys):
    train(tmp_path, digits, _2="stop", _7="go", checkpoint={"async_busy": "skip"})
    output = capsys.readouterr().err
    for number in (4, 6):
        assert f"No checkpoint is saved at update {number}: that of update 2 is still being written" in output
    assert names(tmp_path)[0] == "iter_2.pth" and names(tmp_path)[-1] == "iter_10.pth" and AT[7] == ([], [])


def test_a_writer_that_is_killed_is_reported_and_replaced(tmp_path, digits, capsys):
    train(tmp_path, digits, _2="kill")
    output = capsys.readouterr().err
    assert "Rank 0: the writer of checkpoints has failed: its process has ended (SIGKILL" in output
    assert output.count("iter_2.pth: the writer of 1 rank(s) has failed") == 1
    assert names(tmp_path) == iterations(4, 6, 8, 10) and not list(tmp_path.glob("*.tmp-*"))


@pytest.mark.slow
def test_a_disk_that_is_full_after_the_save_has_begun_is_reported(small_disk, digits, capsys):
    """The first save alone has space enough when it begins."""
    work_dir = small_disk / "run"
    train(work_dir, digits, _2="stop fill go", _5="free")
    output = capsys.readouterr().err
    assert re.search(r"ERROR could not write checkpoint \S+iter_2.pth: rank 0: OSError: .*No space left", output)
    assert "Training continues without this checkpoint." in output
    assert names(work_dir)[-1] == "iter_10.pth" and "iter_2.pth" not in names(work_dir)
    assert [line["update"] for line in read_lines(work_dir / "metrics.jsonl")] == [*range(1, UPDATES + 1)]


GONE = "deleted during the run, or its disk is no longer mounted; .* Remedy: move it back, or mount it"
FAULTS = {
    "inodes": ("free_inodes", r"\[Errno 28\] .* bytes are free there; it has \d+ files and only \d can be made there"),
    "read_only": ("unmount", r"\[Errno 30\] Read-only file system"),
    "unmount": ("mount", GONE),
}


@pytest.fixture
def twice(small_disk, tmp_path) -> Iterator[Path]:
    """A folder of the small disk, mounted a second time."""
    (small_disk / "run").mkdir()
    (tmp_path / "work").mkdir()
    disks.bind(small_disk / "run", tmp_path / "work")
    yield tmp_path / "work"
    with suppress(OSError):
        while True:
            disks.unmount(tmp_path / "work")


FAILING = [*((fault, False) for fault in FAULTS), *slow(*((fault, True) for fault in FAULTS))]


@pytest.mark.parametrize(("fault", "async_save"), FAILING)
def test_a_disk_that_fails_for_a_while(twice, digits, fault, async_save, capsys):
    """Between two blocking saves, and while an asynchronous one is written."""
    end, message = FAULTS[fault]
    begin, end = (f"stop {fault} go", f"wait {end}") if async_save else (fault, end)  # the save of 6 has failed by then
    train(twice, digits, _2=begin, _7=end, checkpoint={"async_save": async_save})
    failures = re.findall(r"ERROR could not write checkpoint \S+/(iter_\d.pth): (.*)", capsys.readouterr().err)
    assert [name for name, _ in failures] == iterations(*([2] if async_save else []), 4, 6)
    assert all(text.endswith("Training continues without this checkpoint.") for _, text in failures)
    if async_save and fault == "inodes":  # the files of iter_2.pth, when they are removed, may leave enough for a start
        message += r"|\[Errno 28\] No space left"
    assert all(re.search(message, text) for name, text in failures if name != "iter_2.pth"), failures
    assert names(twice) == iterations(*([] if async_save else [2]), 8, 10)
    assert fault in ("unmount", "read_only") or not list(twice.glob("*.tmp-*")), (
        "what is on a disk that is gone or read-only is left to the next start"
    )
    for name in ("metrics.jsonl", "ledger.jsonl"):
        assert [line["update"] for line in read_lines(twice / name)] == [*range(1, 11)]


@pytest.mark.parametrize("async_save", [False, True])
def test_a_disk_that_fails_ends_the_run_by_choice(twice, digits, async_save):
    action, number = ("stop read_only go", 2) if async_save else ("read_only", 4)
    with pytest.raises(SaveError, match=rf"iter_{number}.pth: .*Read-only file system") as error:
        train(twice, digits, _2=action, checkpoint={"async_save": async_save, "on_save_error": "stop"})
    assert error.value.exit_status == 4 and names(twice) == iterations(*range(2, number, 2))


@pytest.mark.slow
@pytest.mark.parametrize("async_save", [False, True])
def test_a_disk_that_is_slower_than_the_interval_is_one_line(tmp_path, digits, async_save, monkeypatch, capsys):
    monkeypatch.setattr(checkpoint, "SLOW_S", 0.3)  # which the first save of a writer takes, too
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: time.sleep(0.15) or fsync(number))
    actions = {"_2": "stop go_later", "_4": "stop go_later"} if async_save else {}
    train(tmp_path, digits, checkpoint={"async_save": async_save}, **actions)
    text = r"save needs (\S+) s, .* between two saves (\S+) s: .* is 2 \(iteration\), to (\d+) or more(.*)"
    output = capsys.readouterr().err
    [(took, training_s, interval, more)] = re.findall(text, output)
    assert ("iter_4.pth" in output.partition("save needs")[0]) == async_save, "the first one starts the writer"
    assert float(took) >= max(float(training_s), 0.3) and int(interval) > 2
    assert ("async_save=True" in more) == (not async_save)


SCRIPT = """
import sys
from pathlib import Path
from tests.end_to_end.resume.saving.test_async_save import train
train(Path(sys.argv[1]), Path(sys.argv[2]), **eval(sys.argv[3]))
"""


def test_a_killed_run_ends_its_writer_and_resumes_bit_equal(tmp_path, digits, blocking):
    """The writer has not committed; a new run does not find a process that does so later."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(digits), repr(dict(_4="stop", _5="die"))]
    log = (tmp_path / "printed").open("wb")
    assert subprocess.run(command, stdout=log, stderr=log, check=False).returncode == -signal.SIGKILL
    assert names(tmp_path) == iterations(2) and len(list(tmp_path.glob("iter_4.pth.tmp-*"))) == 1
    writer = int((tmp_path / "writer").read_text())
    for _ in range(100):  # the system ends it at once, in its own time
        if not psutil.pid_exists(writer) or psutil.Process(writer).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.05)
    else:
        os.kill(writer, signal.SIGKILL)
        pytest.fail("the writer has not ended with its run")
    train(tmp_path, digits, resume=True)
    assert names(tmp_path) == iterations(2, 4, 6, 8, 10) and not list(tmp_path.glob("*.tmp-*"))
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert tree(tmp_path / "iter_10.pth")[name] == tree(blocking / "iter_10.pth")[name]


@pytest.mark.parametrize("end", ["terminate", *slow("fail")])
def test_the_save_that_has_begun_is_awaited_on_a_signal_and_after_an_error(tmp_path, digits, end, capsys):
    before = signal.getsignal(signal.SIGTERM)
    try:
        train(tmp_path, digits, checkpoint={"interval": 4}, _4="stop", _5=f"go_later {end}")
        assert end == "terminate"
    except RuntimeError as error:
        assert end == "fail" and str(error) == "a hook of mine"
    finally:
        signal.signal(signal.SIGTERM, before)
    assert names(tmp_path)[:1] == iterations(4) and len(names(tmp_path)) == 1 + (end == "terminate")
    assert re.findall(r"Saved checkpoint \S+/(iter_\d+.pth)", capsys.readouterr().err) == names(tmp_path)


@pytest.mark.slow
def test_a_state_that_is_not_finite_ends_the_run_and_is_kept_apart(tmp_path, digits):
    with pytest.raises(TrainingError, match="is not finite"):
        train(tmp_path, digits, _1="spoil")
    assert names(tmp_path) == [] and (tmp_path / "not_finite_iter_2.pth").is_dir()
