"""Stopped by a signal: all processes stop after the same update, with a checkpoint and exit status 143.

Two real processes (over gloo) train through ``main``, under FSDP2 and then under DeepSpeed. A user's own hook sends
real signals, in most cases to its own process alone: the other must learn of it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.end_to_end.resume.ended_processes.test_launchers import written_config
from tests.support.processes import ROOT, ranks, run
from tests.tiny import tiny_config
from unigen_ds.checkpoint.store import list_checkpoints
from unigen_ds.config.registry import HOOKS
from unigen_ds.hooks.base import Hook
from unigen_ds.runner import Runner
from unigen_ds.system.dist import free_port
from unigen_ds.system.journals import read_lines

UPDATES = 6
ZERO = "deepspeed:zero2"


class Case(NamedTuple):
    signals: dict[int, int]
    """Rank -> update at which it gets SIGTERM; 0: before the first."""
    stopped_after: int
    """The update after which all must stop."""
    backend: str = "fsdp"
    phase: str = "in_update"
    """The method of a hook that sends it."""
    more: Sequence[str] = ()
    """Overrides of the config."""


SAVES = ("default_hooks.checkpoint.interval=2", "default_hooks.checkpoint.unit=update")

RUNS = {
    "before_the_first": Case({1: 0}, 1),
    "on_rank_0": Case({0: 1}, 2),
    "on_rank_1": Case({1: 3}, 4),
    "on_both_at_different_updates": Case({0: 2, 1: 3}, 3),
    "during_the_last": Case({1: UPDATES}, UPDATES),
    "in_a_validation": Case({1: 2}, 3, phase="before_val"),
    "in_a_save": Case({1: 2}, 3, phase="before_save_checkpoint", more=SAVES),
    "in_the_last_save": Case({1: UPDATES}, UPDATES, phase="before_save_checkpoint", more=SAVES),
    "in_an_asynchronous_save": Case(
        {0: 2}, 3, phase="after_update", more=(*SAVES, "default_hooks.checkpoint.async_save=True")
    ),
    "none": Case({}, UPDATES),
    "zero2_on_rank_1": Case({1: 4}, 5, ZERO),  # the last: DeepSpeed keeps the process groups of its first run
}

HOOK = """
import json, os, signal
from unigen_ds.system import dist
from unigen_ds.config.registry import HOOKS
from unigen_ds.hooks.base import Hook

blocking = dist.sum_floats
calls = []

def counted(values):
    calls.append(values)
    return blocking(values)

dist.sum_floats = counted

@HOOKS.register_module()
class SignalledHook(Hook):
    priority = 80

    def before_train_epoch(self, run):
        self.per_update = []
        if run.progress.updates == 0:
            self.at(0, "in_update")

    def before_val(self, run):
        self.at(run.progress.updates, "before_val")

    def before_save_checkpoint(self, run, metrics):
        self.at(run.progress.updates, "before_save_checkpoint")

    def before_update(self, run):
        calls.clear()

    def before_train_iter(self, run, index, batch):
        if index == 0:
            self.at(run.progress.updates + 1, "in_update")

    def after_update(self, run, result):
        self.at(run.progress.updates, "after_update")
        self.per_update.append(len(calls))
        (run.work_dir / f"calls_{dist.rank()}.json").write_text(json.dumps(self.per_update))

    def at(self, update, phase):
        if phase == os.environ["PHASE"] and json.loads(os.environ["SIGNALS"]).get(os.environ["RANK"]) == update:
            os.kill(os.getpid(), signal.SIGTERM)
"""

TRAIN = """
import json, os, sys
from tools.train import main
config, out, cases = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
for name, port, signals, _, backend, phase, more in cases:
    os.environ.update(SIGNALS=json.dumps(signals), MASTER_PORT=str(port), PHASE=phase)
    more = more and ["--cfg-options", *more]
    status = main([config, "--backend", backend, "--launcher", "pytorch", "--work-dir", f"{out}/{name}", *more])
    print(name, status, flush=True)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory, digits) -> tuple[Path, list[list[str]]]:
    """The folder of all work dirs, and what each process printed: ``<case> <exit status>``."""
    folder = tmp_path_factory.mktemp("signals")
    (folder / "signalled.py").write_text(HOOK, encoding="utf-8")
    config = written_config(
        folder,
        digits,
        train_cfg={"max_updates": UPDATES},
        default_hooks__logger__interval=1000,
        custom_imports={"imports": ["unigen_ds.examples.digits", "signalled"]},
        custom_hooks=[
            {"type": "SignalledHook"},
            {"type": "EvaluateHook", "interval": 2, "unit": "update", "max_batches": 1},
        ],
        val_dataloader={"dataset": {"type": "DigitsDataset", "root": str(digits), "split": "val"}, "batch_size": 2},
        default_hooks__checkpoint__max_keep_ckpts=1,
    )
    cases = json.dumps([(name, free_port(), *case) for name, case in RUNS.items()])
    both = ranks([sys.executable, "-c", TRAIN, config, str(folder), cases], PYTHONPATH=f"{folder}{os.pathsep}{ROOT}")
    outputs = [[line for line in one.out.splitlines() if line.split()[:1] and line.split()[0] in RUNS] for one in both]
    assert all(len(lines) == len(RUNS) for lines in outputs), both[0].ending
    return folder, outputs


@pytest.mark.parametrize("name", RUNS)
def test_all_processes_stop_after_the_same_update_and_a_checkpoint_is_saved(runs, name):
    folder, outputs = runs
    signals, stopped_after, *_ = RUNS[name]
    status = 143 if signals else 0
    assert [line for lines in outputs for line in lines if line.split()[0] == name] == [f"{name} {status}"] * 2
    counts = [len(json.loads((folder / name / f"calls_{rank}.json").read_text())) for rank in range(2)]
    assert counts == [stopped_after] * 2
    assert stopped_after <= min(signals.values(), default=UPDATES) + 2
    assert [line["update"] for line in read_lines(folder / name / "ledger.jsonl")] == [*range(1, stopped_after + 1)]
    (one,) = list_checkpoints(folder / name)
    assert one.problem is None and one.manifest is not None and one.manifest.progress.updates == stopped_after


@HOOKS.register_module()
class SignalInUpdateHook(Hook):
    def __init__(self, *, update: int) -> None:
        self.update = update

    def before_train_iter(self, run, index, batch):
        if index == 0 and run.progress.updates + 1 == self.update:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("update", [1, 3, UPDATES])
def test_one_process_stops_after_the_present_update(tmp_path, digits, update):
    hook = {"type": "SignalInUpdateHook", "update": update}
    before = signal.getsignal(signal.SIGINT)
    runner = Runner.from_cfg(tiny_config(tmp_path, digits, train_cfg={"max_updates": UPDATES}, custom_hooks=[hook]))
    try:
        assert runner.train().updates == update
    finally:
        signal.signal(signal.SIGINT, before)  # a stopped process keeps its handlers: it is about to end
    assert runner.stop_reason == "signal"
    assert [checkpoint.problem for checkpoint in list_checkpoints(tmp_path)] == [None]


def test_a_later_second_signal_ends_the_process_at_once_and_raises_nothing(tmp_path, digits):
    """Whatever the process is in: here it has a lock of a log line. Ctrl-C would raise KeyboardInterrupt there."""
    code = (
        "import logging, os, signal, sys\n"
        "from unigen_ds.hooks.guard import signals\n"
        "signals.REPEAT_S = -1.0\n"
        "hook = signals.SignalHook()\n"
        "hook.before_train(None)\n"
        "logging.Handler.acquire = lambda self: [os.kill(os.getpid(), int(sys.argv[1])) for _ in range(2)]\n"
        "try:\n    logging.warning('line')\n"
        "finally:\n    print('raised')\n"
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        process = run([sys.executable, "-c", code, str(int(number))], cwd=ROOT, text=True, timeout=60)
        assert (process.returncode, process.stdout) == (-number, ""), process.stderr
        assert process.stderr == f"{number.name} received: stopping after this update.\n"
