"""Real training processes that are killed at exact points: ``tools/train.py`` as a user starts it.

The kill is a user's own hook, loaded by ``custom_imports``. Environment variables arm it, so that the killed and the
resumed process read the same config. Points inside a save are caught by Python's audit events: the process dies just
before the system call, with nothing flushed and no handler run.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.processes import ROOT, popen
from unigen_ds.config.overrides import config_path
from unigen_ds.examples.digits.dataset import write_digits
from unigen_ds.system.journals import read_lines

SHIPPED = config_path("unified_digits")
RECORDS = 240
UPDATES = 20
SAVE_EVERY_UPDATES = 4

HOOK = '''
"""A user's hook: die at one exact point."""

import os
import signal
import sys
import time

from unigen_ds.config.registry import HOOKS
from unigen_ds.hooks.base import Hook

POINT, _, WHERE = os.environ.get("KILL_AT", "").partition(":")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@HOOKS.register_module()
class KillHook(Hook):
    def before_update(self, run):
        time.sleep(float(os.environ.get("SLOW", "0")))
        if POINT == "update" and run.progress.updates == int(WHERE):
            die()

    def before_train_iter(self, run, index, batch):
        if POINT == "iteration" and run.progress.updates == int(WHERE) and index == 1:
            die()


def watch(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, os.PathLike)):
        path = os.fspath(arguments[0])
        if POINT == "staged" and f"{WHERE}.tmp-" in path and path.endswith("manifest.json"):
            die()  # every file is written and flushed, the manifest is not
        if POINT == "exported" and f"{WHERE}.writing-" in path and path.endswith("digests.json"):
            die()  # the weights alone are written, and not complete
        if POINT == "renamed" and ".last_checkpoint.tmp-" in path and os.path.exists(f"{sys_work_dir()}/{WHERE}"):
            die()  # committed, but last_checkpoint still names the one before
    if event == "shutil.rmtree" and WHERE in str(arguments[0]):
        DELETING.append(WHERE)
    if POINT == "deleting" and event == "os.rmdir" and DELETING:
        die()  # half of an old checkpoint is gone


DELETING = []


def sys_work_dir():
    return sys.argv[sys.argv.index("--work-dir") + 1]


if POINT in ("staged", "exported", "renamed", "deleting"):
    sys.addaudithook(watch)
'''

CONFIG = """
_base_ = {base!r}
custom_imports = dict(imports=["kill_hook"])
batch_size, accumulative_counts = 4, 3
model = dict(
    llm=dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             dropout=0.1),
    vit=dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2),
)
processor = dict(text_dropout=0.2)
train_dataloader = dict(
    batch_size=batch_size, num_workers=0, seq_length=80, packing=dict(type="BestFitPacking", window=100),
    dataset=dict(_delete_=True, type="UnifiedGenerationDataset", data_path={data!r}),
)
optim_wrapper = dict(accumulative_counts=accumulative_counts)
train_cfg = dict(_delete_=True, max_updates={updates} + 2)
default_hooks = dict(
    logger=dict(type="LoggerHook", interval=1),
    checkpoint=dict(type="CheckpointHook", by_epoch=False, interval={interval}, max_keep_ckpts=2),
)
custom_hooks = [dict(type="EMAHook", momentum=0.05, begin_iter=16), dict(type="KillHook")]
"""


@dataclass(frozen=True)
class Ending:
    status: int
    output: str


class Bench:
    """A folder with data, a config and the user's hook, and runs in work dirs below it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        digits = write_digits(folder / "digits")
        data = digits / "few.jsonl"  # an epoch of about 60 sequences: 20 updates cross several
        data.write_text("".join((digits / "train.jsonl").read_text().splitlines(keepends=True)[:RECORDS]))
        (folder / "kill_hook.py").write_text(HOOK)
        self.config = folder / "tiny_digits.py"
        interval = SAVE_EVERY_UPDATES * 3
        text = CONFIG.format(base=str(SHIPPED), data=str(data), updates=UPDATES, interval=interval)
        self.config.write_text(text)

    def work_dir(self, name: str) -> Path:
        return self.folder / name

    def start(self, name: str, *arguments: str, fresh: bool = False, **environment: str) -> subprocess.Popen[bytes]:
        """Start a process (``fresh``: by exec); output goes to a file: orphaned workers would keep a pipe open."""
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(self.folder), **environment}
        command = [sys.executable, "tools/train.py", str(self.config), "--work-dir", str(self.work_dir(name))]
        if "--max-updates" not in arguments:
            command += ["--max-updates", str(UPDATES)]
        self.work_dir(name).mkdir(exist_ok=True)
        with (self.work_dir(name) / "output.txt").open("ab") as output:
            start = subprocess.Popen if fresh else popen
            return start([*command, *arguments], cwd=ROOT, env=environ, stdout=output, stderr=output)

    def finish(self, name: str, process: subprocess.Popen[bytes], *, timeout_s: float = 200.0) -> Ending:
        status = process.wait(timeout=timeout_s)
        path = self.work_dir(name) / "output.txt"
        output = path.read_text()
        path.unlink()
        return Ending(status, output)

    def train(self, name: str, *arguments: str, fresh: bool = False, **environment: str) -> Ending:
        return self.finish(name, self.start(name, *arguments, fresh=fresh, **environment))

    def kill(self, name: str, where: str, *arguments: str, fresh: bool = False) -> str:
        """Train until the hook kills the process at ``where``. Returns its output."""
        ending = self.train(name, *arguments, fresh=fresh, KILL_AT=where)
        assert ending.status == -signal.SIGKILL, f"was to die at {where}: {ending}"
        return ending.output

    def copy(self, name: str, new: str) -> Path:
        return Path(shutil.copytree(self.work_dir(name), self.work_dir(new)))


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], *, timeout_s: float = 200.0) -> None:
    """Poll until ``condition``; fails when the process ends first."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, f"ended with {process.returncode} before its time"
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def metric_lines(work_dir: Path) -> list[dict[str, Any]]:
    return read_lines(work_dir / "metrics.jsonl")
