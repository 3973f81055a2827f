"""Two hooks of a user's own, written for mmengine's Runner."""

from __future__ import annotations

from typing import Any

from mmengine.hooks import Hook
from mmengine.registry import HOOKS


class MyHook(Hook):
    """Logs the learning rate."""

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if self.every_n_train_iters(runner, 4):
            runner.logger.info("MyHook: iteration %d of %d", runner.iter + 1, runner.max_iters)


@HOOKS.register_module(force=True)
class MyOtherHook(Hook):
    """Logs that it was there."""

    def after_run(self, runner: Any) -> None:
        runner.logger.info("MyOtherHook: %d iterations", runner.iter)
