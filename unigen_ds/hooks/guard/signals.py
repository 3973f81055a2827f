"""SIGTERM, SIGINT and SIGUSR1 end the run with a checkpoint, and exit status 143; a later second one ends it at once.

SIGUSR1 is what ``sbatch --signal=USR1@300`` sends before the time limit (``scripts/train_slurm.sh``); where a user's
own code handles it, it is left to that.

One process stops after the present update. Several must agree: whether any of them has a signal is summed with the
counts of the next update, while the present one is computed, so no update waits for it. All stop after the same
update: the one after the update during which the first signal came.

"Later", because one signal often arrives twice: a scheduler signals every process of a job, and a launcher forwards its
own. A repeat within ``REPEAT_S`` seconds must not prevent the checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from unigen_ds.config.registry import HOOKS
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.system import dist
from unigen_ds.system.log import logger
from unigen_ds.system.pipes import end_start

SIGNAL_REASON = "signal"
REPEAT_S = 5.0


@HOOKS.register_module()
class SignalHook(Hook):
    """Runs just before the checkpoint hook, which then saves. The ranks agree, so all stop after the same update."""

    name = "signals"

    def __init__(self) -> None:
        self._signal, self._signal_at = 0, 0.0
        self.stopped = False
        self._alone = True
        self._previous: dict[int, Any] = {}

    def before_train(self, run: Run) -> None:
        self._alone = dist.world_size() == 1
        if threading.current_thread() is threading.main_thread():
            is_free = signal.getsignal(signal.SIGUSR1) in (signal.SIG_DFL, end_start)
            numbers = [signal.SIGTERM, signal.SIGINT, *[signal.SIGUSR1] * is_free]
            self._previous = {number: signal.signal(number, self._handle) for number in numbers}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._signal:
            self._signal, self._signal_at = number, now
            # not through the logger: the signal may have interrupted it while it writes
            when = "this update" if self._alone else "this update or the next"
            os.write(2, f"{signal.Signals(number).name} received: stopping after {when}.\n".encode())
        elif now - self._signal_at > REPEAT_S:
            if number == signal.SIGINT and hasattr(sys, "ps1"):  # a notebook: its kernel outlives what it runs
                raise KeyboardInterrupt
            signal.signal(number, signal.SIG_DFL)  # no exception, which could come out of a lock or a commit
            signal.raise_signal(number)

    def wants_stop(self) -> bool:
        return self._signal > 0

    def after_update(self, run: Run, result: UpdateResult) -> None:
        if result.stop_wanted or (self._alone and self._signal):
            self._stop(run, "saving a checkpoint, then stopping")

    def after_train(self, run: Run) -> None:
        """A signal during the last update: all processes report it by the same exit status."""
        if not self.stopped and dist.sum_floats([float(self._signal > 0)])[0]:
            self._stop(run, "it came during the last update, whose checkpoint is saved")
        if not self.stopped:  # else the process is about to end, and a repeat must not change how
            self.on_exception(run, None)

    def _stop(self, run: Run, consequence: str) -> None:
        name = f"{signal.Signals(self._signal).name} received" if self._signal else "Another rank has received a signal"
        logger().warning("%s: %s.", name, consequence)
        self.stopped = True
        run.request_stop(SIGNAL_REASON)

    def on_exception(self, run: Run, error: BaseException | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
