"""SIGTERM and SIGINT end the run after the present update, with a checkpoint; a later second one ends it at once.

Later, because one signal often comes twice: a scheduler signals every process of a job, and a launcher passes its own
on. A repeat within ``REPEAT_S`` seconds must not cost the checkpoint.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from unigen_ds.core import dist
from unigen_ds.core.log import logger
from unigen_ds.core.registry import HOOKS
from unigen_ds.hooks.base import Hook, Run, UpdateResult

STOPPED_BY_SIGNAL = "signal"
REPEAT_S = 5.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@HOOKS.register_module()
class SignalHook(Hook):
    """Runs just before the checkpoint hook, which then saves. The ranks agree, so all stop at the same update."""

    name = "signals"

    def __init__(self) -> None:
        self._received = 0
        self._received_at = 0.0
        self._previous: dict[int, Any] = {}

    def before_train(self, run: Run) -> None:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._received:
            self._received, self._received_at = number, now
            # not through the logger: the signal may have interrupted it while it writes
            os.write(2, f"{signal.Signals(number).name} received: stopping after this update.\n".encode())
        elif now - self._received_at > REPEAT_S:
            self._restore()
            signal.raise_signal(number)

    def after_update(self, run: Run, result: UpdateResult) -> None:
        if dist.sum_floats([float(self._received > 0)])[0]:
            name = signal.Signals(self._received).name if self._received else "A signal to another process"
            logger().warning("%s received: saving a checkpoint, then stopping.", name)
            run.request_stop(STOPPED_BY_SIGNAL)

    def after_train(self, run: Run) -> None:
        if not self._received:  # else the process is about to end, and a repeat must not change how
            self._restore()

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
