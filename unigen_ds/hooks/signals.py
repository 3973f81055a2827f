"""SIGTERM and SIGINT end the run after the present update, with a checkpoint; a second one ends it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from unigen_ds.core import dist
from unigen_ds.core.log import logger
from unigen_ds.core.registry import HOOKS
from unigen_ds.hooks.base import Hook, Run, UpdateResult

STOPPED_BY_SIGNAL = "signal"
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@HOOKS.register_module()
class SignalHook(Hook):
    """Runs just before the checkpoint hook, which then saves. The ranks agree, so all stop at the same update."""

    name = "signals"

    def __init__(self) -> None:
        self._received = 0
        self._previous: dict[int, Any] = {}

    def before_train(self, run: Run) -> None:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._received:
            self._restore()
            signal.raise_signal(number)
            return
        self._received = number
        logger().warning("%s received: saving after this update, then stopping.", signal.Signals(number).name)

    def after_update(self, run: Run, result: UpdateResult) -> None:
        if dist.sum_floats([float(self._received > 0)])[0]:
            run.request_stop(STOPPED_BY_SIGNAL)

    def after_train(self, run: Run) -> None:
        self._restore()

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
