"""A data file that goes or changes during a run, a loader worker that is killed: one sentence, and a status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.processes import ROOT, popen, run
from tests.text_run import count_up, write_jsonl, write_text_config


def start(folder: Path, num_workers: int) -> subprocess.Popen[str]:
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", count_up(200))
    options = (f"train_dataloader.num_workers={num_workers}", "train_cfg.max_updates=1000000",
               "default_hooks.checkpoint.interval=1000000")  # fmt: skip
    command = [sys.executable, str(ROOT / "tools" / "train.py"), str(write_text_config(folder))]
    return popen([*command, "--cfg-options", *options], stderr=subprocess.PIPE, text=True, cwd=folder)


def delete(folder: Path, _: int) -> None:
    (folder / "train.jsonl").unlink()


def replace(folder: Path, _: int) -> None:
    """By as many records of the same lengths: every byte range still holds a record."""
    other = folder / "other.jsonl"
    write_jsonl(other, [{"text": " ".join(record["text"].split()[::-1])} for record in count_up(200)])
    os.replace(other, folder / "train.jsonl")


def kill(_: Path, pid: int) -> None:
    """The worker, as the kernel does when memory is full."""
    children = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat") if parent(path) == pid]
    workers = [child for child in children if b"resource_tracker" not in Path(f"/proc/{child}/cmdline").read_bytes()]
    assert workers
    os.kill(workers[0], signal.SIGKILL)


def parent(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


CASES: dict[str, tuple[int, Callable[[Path, int], None], str]] = {
    "deleted": (1, delete, "train.jsonl can no longer be read: No such file or directory. Remedy: "),
    "replaced": (0, replace, "train.jsonl was changed during the run: it is not the one of the index. Remedy: "),
    "killed": (2, kill, "a worker process of the data loader ended: worker "),
}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the workers in /proc")
def test_one_sentence_and_a_status(tmp_path: Path) -> None:
    runs = {name: start(tmp_path / name, workers) for name, (workers, _, _) in CASES.items()}
    try:
        for name, run in runs.items():
            metrics = tmp_path / name / "run" / "metrics.jsonl"
            while not (metrics.exists() and metrics.read_text().count("\n") > 5):
                assert run.poll() is None, run.stderr.read() if run.stderr else ""
                time.sleep(0.1)
            CASES[name][1](tmp_path / name, run.pid)
        for name, run in runs.items():
            _, output = run.communicate(timeout=120)
            assert run.returncode == 1, output
            assert "Traceback" not in output and "Caught" not in output, output
            (line,) = [line for line in output.splitlines() if "ERROR" in line]
            assert CASES[name][2] in line and "--resume" in line
            log = (tmp_path / name / "run" / "train.log").read_text()
            assert CASES[name][2] in log
    finally:
        for run in runs.values():
            run.kill()
            run.wait()
    assert (
        ", by SIGKILL. Remedy: the system kills processes when memory"
        in (tmp_path / "killed" / "run" / "train.log").read_text()
    )
    assert json.loads((tmp_path / "killed" / "run" / "metrics.jsonl").read_text().splitlines()[0])


KILLED_RUNS = """
import os, random, signal, sys, threading, time
from pathlib import Path
from tests.text_run import count_up, word_config, write_jsonl
from unigen_ds.checkpoint import store
from unigen_ds.core.errors import TrainingError
from unigen_ds.system.workers import Workers
from unigen_ds.runner import Runner

folder, drawn, slowest, updates = Path(sys.argv[1]), random.Random(1), 0.0, 0
write_jsonl(folder / "train.jsonl", count_up(200))
save = dict(interval=1, by_epoch=False, max_keep_ckpts=2)
config = word_config(folder, resume=True, train_dataloader__num_workers=2, train_cfg__max_updates=10**6,
                     default_hooks__checkpoint=save)
started = Workers.__init__

def killed(self, *given, **more):
    def kill():
        time.sleep(delay)
        at.append(time.monotonic())
        os.kill(drawn.choice(self._processes).pid, signal.SIGKILL)

    started(self, *given, **more)
    threading.Thread(target=kill).start()

Workers.__init__ = killed
for k in range(int(sys.argv[2])):
    runner, at, delay = Runner.from_cfg(config), [], drawn.random() * 0.4
    assert runner.progress.updates == updates, "what was saved is what it continues from"
    try:
        runner.train()
    except TrainingError as error:
        slowest = max(slowest, time.monotonic() - at[0])
        assert ", by SIGKILL" in str(error), error
        updates = max(runner.progress.updates, updates)
    newest, rejected = store.newest(folder / "run")
    assert not rejected and (newest is None) == (updates == 0)
    updates = newest.manifest.progress.updates if newest else 0
print("updates", updates, "slowest", slowest)
"""


def test_a_worker_is_killed_at_random_moments_of_a_run_that_saves_after_each_update(tmp_path: Path) -> None:
    """Each time one error, at most 5 s later, and what was saved can be continued. 200 times: ``make worker-kills``."""
    process = run([sys.executable, "-c", KILLED_RUNS, str(tmp_path), os.environ.get("KILLS", "8")], cwd=ROOT,
               text=True, timeout=600)  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    updates, slowest = process.stdout.split()[1::2]
    assert int(updates) > 3 and float(slowest) < 5.0
