"""A user's hook with a clock of its own, so that tests of hours take seconds."""

from __future__ import annotations

import time

from unigen_ds.config.registry import HOOKS
from unigen_ds.hooks.base import Hook
from unigen_ds.hooks.guard import time_limit
from unigen_ds.hooks.save import checkpoint
from unigen_ds.system import dist

UPDATE_S, EVALUATION_S, EVALUATE_EVERY, SAVE_S, AGE_S = 100.0, 300.0, 5, 200.0, 60.0
START_S = 5000.0


@HOOKS.register_module(force=True)
class VirtualTimeHook(Hook):
    """Is the module ``time`` for the hooks that look at the clock. That of rank 1 runs a hundred times as fast."""

    priority = 1

    def __init__(self) -> None:
        self.now, self.saved = START_S, []
        self.time = self.monotonic = lambda: self.now

    def before_run(self, run):
        self.process_age, time_limit.process_age = time_limit.process_age, lambda: AGE_S
        time_limit.time = checkpoint.time = self

    def before_update(self, run):
        self.now += UPDATE_S * (1 + 99 * dist.rank())

    def after_update(self, run, result):
        self.now += EVALUATION_S * (run.progress.updates % EVALUATE_EVERY == 0)

    def sync(self):
        self.now += SAVE_S

    def after_save_checkpoint(self, run, path):
        self.saved.append(self.now)

    def after_run(self, run):
        time_limit.time = checkpoint.time = time
        time_limit.process_age = self.process_age
