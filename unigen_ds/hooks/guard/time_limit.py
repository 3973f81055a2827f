"""A run stops before its time is over: ``train_cfg.max_time``, or the end of the SLURM job, whichever is sooner.

Rank 0's clock alone decides. Its request is summed with the counts of the next update, as that of a signal is
(``signals.py``), so all ranks stop after the same update. Until then two updates may pass, and a periodic save after
the first of them; so the request comes when the longest update so far, the last one and two of the longest saves would
take longer than there is time. An update is measured with its data, evaluations and exports.
"""

from __future__ import annotations

import math
import os
import time
from datetime import datetime
from pathlib import Path

from unigen_ds.config.values import time_seconds
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.hooks.save.checkpoint import CheckpointHook
from unigen_ds.system import dist
from unigen_ds.system.log import logger
from unigen_ds.system.machine import env_number

JOB_END = "SLURM_JOB_END_TIME"
"""Variable of a job of SLURM (22.05 and later): when it ends, in seconds since 1970."""
ASSUMED_SAVE_S = 300.0
"""Seconds of a save before the first was measured; at most a tenth of the time that is left at the start."""


class TimeLimitHook(Hook):
    """The builder adds it to every run. ``max_time``: of ``train_cfg``, counted from the start of the process."""

    name = "time_limit"

    def __init__(self, max_time: float | str | None = None) -> None:
        self.max_time = max_time
        self._limit = math.inf
        """When the time is over, of ``time.monotonic``."""
        self._saves: CheckpointHook | None = None
        self._assumed_s = self._longest_s = self._last_s = 0.0
        self._update_since, self._updates = math.nan, 0

    def before_train(self, run: Run) -> None:
        self._saves = next((hook for hook in run.hooks if isinstance(hook, CheckpointHook)), None)
        now, limits = time.monotonic(), []
        if self.max_time is not None:
            what = f"train_cfg.max_time={self.max_time!r}, counted from the start of this process"
            limits.append((now - process_age() + time_seconds(self.max_time), what))
        if end := env_number(JOB_END, 0):
            limits.append((now - time.time() + end, f"the end of the SLURM job ({JOB_END})"))
        if not limits:
            return
        self._limit, what = min(limits)
        self._assumed_s = max(0.0, min(ASSUMED_SAVE_S, (self._limit - now) / 10))
        when = datetime.fromtimestamp(time.time() + self._limit - now)
        logger().info("The run ends before %s with a checkpoint and exit status 143, unless it is complete: %s. Until a"
                      " save is measured, %.0f s are assumed for one.", f"{when:%Y-%m-%d %H:%M:%S}", what,
                      self._assumed_s)  # fmt: skip

    def before_update(self, run: Run) -> None:
        """An update lasts until the next one begins: with its data, evaluations and exports, without its save."""
        now = time.monotonic()
        if self._updates:
            self._last_s = now - self._update_since
            if self._saves is not None and self._saves.began > self._update_since:
                self._last_s -= self._saves.took_s
            self._longest_s = self._last_s if self._updates < 3 else max(self._longest_s, self._last_s)  # 1: compiles
        self._updates, self._update_since = self._updates + 1, now

    def _save(self) -> tuple[float, str]:
        """Seconds of the longest save; and in words whether they are assumed."""
        longest_s = None if self._saves is None else self._saves.longest_s
        return (self._assumed_s, " (assumed)") if longest_s is None else (longest_s, "")

    def has_request(self) -> bool:
        seconds = self._longest_s + self._last_s + 2 * self._save()[0]
        return dist.is_main() and time.monotonic() + seconds > self._limit

    def after_update(self, run: Run, result: UpdateResult) -> None:
        if self.name not in result.requests or run.done:
            return
        if dist.is_main():
            logger().warning("The time limit is near: %.0f s are left; an update lasted up to %.1f s, a save %.1f s%s."
                             " Saving a checkpoint, then stopping; --resume continues.",
                             self._limit - time.monotonic(), self._longest_s, *self._save())  # fmt: skip
        run.request_stop("time limit")


def process_age() -> float:
    """Seconds since the system started this process; 0 on a system without ``/proc``."""
    try:
        start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start
