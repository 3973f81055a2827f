"""One library call for a training run: build, train, return why it ended."""

from __future__ import annotations

from typing import Any

from unigen_ds.hooks.log.journal import SkippedSamplesHook
from unigen_ds.runner.loop.runner import Runner
from unigen_ds.system.log import logger


def train_config(config: Any, *, max_updates: int | None = None) -> str | None:
    """Train a loaded config. Returns None when training is complete or hit ``max_updates``, ``'signal'`` when stopped
    by one, else the reason of the hook that stopped it.

    Raises what ``runner.start.build.build_parts`` raises, and ``TrainingError``.
    """
    runner = Runner.from_cfg(config, max_updates=max_updates)
    progress = runner.train()
    state = "complete" if runner.finished else f"stopped ({runner.stop_reason})" if runner.stop_reason else "stopped"
    logger().info(
        "Training %s after %d updates (%d updates skipped), %d samples (%d samples skipped), %d sequences, epoch %.2f.",
        state,
        progress.updates,
        progress.skipped_updates,
        progress.samples,
        sum(hook.num_skipped for hook in runner.hooks if isinstance(hook, SkippedSamplesHook)),
        progress.sequences,
        progress.sequences / runner.ruler.sequences_per_epoch,
    )
    if runner.finished and 0 < runner.left < runner.geometry.global_batch_size:
        logger().info(
            "The %d sequences that are left until the end of train_cfg fill no update of %d.",
            runner.left,
            runner.geometry.global_batch_size,
        )
    return runner.stop_reason
