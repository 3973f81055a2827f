"""Save at an interval, keep the newest checkpoints, and save once more when the run ends or is stopped."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.checkpoint.saver import Form
from unigen_ds.config.registry import HOOKS, checked
from unigen_ds.config.values import Choices, Rule
from unigen_ds.core.errors import ConfigError, SaveError, UnigenError
from unigen_ds.hooks.base import Hook, Run, UpdateResult, is_due
from unigen_ds.system import dist
from unigen_ds.system.log import logger

Interval = Annotated[float, Rule(lambda value: value > 0 or value == -1), Choices("a number above 0, or -1")]
Positive = Annotated[float, Rule(lambda value: value > 0), Choices("a number above 0")]
MaxKeep = Annotated[int, Rule(lambda value: value != 0), Choices("a whole number of at least 1, or -1")]

SLOW_S = 2.0
"""A save that needs less is never slow."""


@HOOKS.register_module()
class CheckpointHook(Hook):
    """mmengine's arguments, with two differences: it deletes only after the new checkpoint is durable, and the number
    in the name is the true iteration at the save (with accumulation it may be just above a multiple of the interval).

    Args:
        interval: epochs, iterations or updates between saves; -1: only when the run ends or is stopped.
        by_epoch: whether ``interval`` means epochs; otherwise iterations.
        unit: what ``interval`` counts; overrides ``by_epoch``.
        max_keep_ckpts: complete checkpoints to keep, oldest deleted after the new one is durable; -1: all. One that
            a hook still needs (the best one, one that is being evaluated) is kept beyond that number.
        max_keep_days: days after which a complete checkpoint is deleted, also where `max_keep_ckpts` would keep it,
            once a newer one is durable; None: never by its age. The newest and those that a hook needs are kept,
            however old.
        interval_minutes: a save also where the last one began so long ago, by the clock of rank 0.
        keep_every: with ``max_keep_ckpts`` or ``max_keep_days``: the first checkpoint at or after each multiple of so
            many epochs, iterations or updates, as ``interval`` counts them, is never deleted.
        weights_interval: as ``interval``: a save at which the weights alone are exported, too, once it is committed:
            ``weights/<checkpoint>/model.safetensors`` in fp32, as of ``tools/zero_to_fp32.py --safe-serialization``,
            and where the run has an average of the weights (EMA), that in ``weights/<checkpoint>_ema``. They are
            never deleted, and no resume loads them. Rank 0 writes them; with ``async_save`` its other process does.
        form: `sharded`: the files of the engine, written by all processes; `full`: `model.safetensors` and
            `optimizer.safetensors` alone, from which any engine resumes in full; `both`: the second in the folder
            `full` of the first, a checkpoint of its own. Rank 0 makes them from the first, so the last two take
            longer, and during a save twice the space. Under `single`, whose files are these already, all three are
            the same.
        filename_tmpl: name of the directory: ``iter_{}.pth``, or any with one ``{}`` for the iteration and the ending
            ``.pth``; ``step_{}`` and ``update_{}``, with or without an ending, count updates.
        async_save: training waits only until the state is copied to the host's memory, which needs as many bytes there
            as the files of the process; another process of each rank writes and commits it. Linux.
        async_busy: where the next save is due before the last one is complete: ``wait`` for it, or ``skip`` this one.
        on_save_error: after a periodic save that fails (a full disk) ``continue``, with an error in the log: the state
            in memory is worth more than the save; or ``stop``: the run ends (``SaveError``, exit status 4).
        save_base: with ``lora``: copy the files of the base into ``base`` beside the checkpoints, once, when training
            begins. They are hashed, found by a resume and by the tools, and never deleted.

    The last save of a run, and the one on a signal, is never asynchronous, and raises ``SaveError`` (exit status 4).
    Where a save needs longer than the training between two of them, a warning has both times and the interval to set.
    """

    name = "checkpoint"

    @checked()
    def __init__(
        self,
        interval: Interval = -1,
        *,
        by_epoch: bool = True,
        unit: Literal["epoch", "iteration", "update"] | None = None,
        max_keep_ckpts: MaxKeep = -1,
        max_keep_days: Positive | None = None,
        form: Form = "sharded",
        filename_tmpl: str = "iter_{}.pth",
        interval_minutes: Positive | None = None,
        keep_every: Positive | None = None,
        weights_interval: Positive | None = None,
        async_save: bool = False,
        async_busy: Literal["wait", "skip"] = "wait",
        on_save_error: Literal["continue", "stop"] = "continue",
        save_base: bool = False,
    ) -> None:
        if filename_tmpl.count("{}") != 1 or not store.is_checkpoint_name(filename_tmpl.format(0)):
            raise ConfigError(
                f"filename_tmpl is {filename_tmpl!r}",
                allowed="a name with one {} and the ending .pth, or step_{}, update_{}, iter_{}",
            )
        if keep_every is not None and max_keep_ckpts < 0 and max_keep_days is None:
            raise ConfigError(f"keep_every is {keep_every}, and all are kept", remedy="max_keep_ckpts=2, say")
        if async_save and not hasattr(os, "memfd_create"):
            raise ConfigError("async_save=True on a system without memfd_create", remedy="async_save=False, or Linux")
        self.interval, self.unit = interval, unit or ("epoch" if by_epoch else "iteration")
        self.max_keep_ckpts, self.max_keep_days, self.form = max_keep_ckpts, max_keep_days, form
        self.filename_tmpl, self.save_base = filename_tmpl, save_base
        self.async_save, self.async_busy, self.on_save_error = async_save, async_busy, on_save_error
        self.interval_minutes, self.keep_every, self.weights_interval = interval_minutes, keep_every, weights_interval
        self._saved_at = 0.0
        """When the last save was due, of ``time.monotonic``."""
        self._last_complete: int | None = None
        """The update of the last complete checkpoint."""
        self.pending: int | None = None
        """The update of the one that is being written."""
        self.began = self.took_s = self._slow_s = 0.0
        """Clock at the begin of the last save; its seconds with what other hooks did then, 0 until all is done; and
        those of the last one that a warning was about."""
        self.longest_s: float | None = None
        """The largest ``took_s``; None before the first."""
        self._went_on: float | None = None
        """Clock where training continued after the last save that the interval asked for."""

    def before_run(self, run: Run) -> None:
        if self.weights_interval is not None and run.config.get("lora"):
            raise ConfigError(
                "CheckpointHook has weights_interval, and the run trains adapters, whose base is elsewhere",
                remedy="custom_hooks=[dict(type='SavePretrainedHook')] exports the adapters beside each checkpoint",
            )

    def before_train(self, run: Run) -> None:
        if self.save_base:
            run.save_base()
        self._last_complete, self._saved_at = run.progress.updates, time.monotonic()

    def has_request(self) -> bool:
        """Rank 0's clock decides for all."""
        minutes = (time.monotonic() - self._saved_at) / 60
        return dist.is_main() and self.interval_minutes is not None and minutes >= self.interval_minutes

    def after_update(self, run: Run, result: UpdateResult) -> None:
        regular = self.interval > 0 and is_due(run, self.interval, self.unit)
        due = regular or is_due(run, self.weights_interval, self.unit) or self.name in result.requests
        due = due or any(hook.wants_save() for hook in run.hooks)
        if due:
            self._saved_at = time.monotonic()
        trained_s = time.monotonic() - self._went_on if regular and self._went_on is not None else math.inf
        if self.pending is not None:
            self._finish(run, wait=run.done or (due and self.async_busy == "wait"))
        self._compare(trained_s)
        if run.done:
            self._save(run)
        elif due and self.pending is not None:
            logger().warning("No checkpoint is saved at update %d: that of update %d is still being written"
                             " (async_busy='skip').", run.progress.updates, self.pending)  # fmt: skip
        elif due:
            with self._report_failure(run):
                self._save(run, background=self.async_save)
            starts_writer = self.async_save and self.longest_s is None  # in its time, once
            self._went_on = time.monotonic() if regular and not starts_writer else None

    def _compare(self, trained_s: float) -> None:
        """Warn where a save needs longer than the training between two, and again where it needs twice as long."""
        took_s = self.took_s if self.pending is None else time.monotonic() - self.began
        if took_s > max(trained_s, SLOW_S, 2 * self._slow_s) and dist.is_main():
            self._slow_s = took_s
            logger().warning(
                "A save needs %.1f s, and the training between two saves %.1f s: set default_hooks.checkpoint.interval,"
                " which is %g (%s), to %d or more%s.", took_s, trained_s, self.interval, self.unit,
                math.ceil(self.interval * took_s / trained_s),
                "" if self.async_save else ", or async_save=True, with which training does not wait for the disk",
            )  # fmt: skip

    def after_train(self, run: Run) -> None:
        if self.pending is not None:
            self._finish(run, wait=True)
        if self._last_complete != run.progress.updates:  # a hook that runs later asked for the stop
            self._save(run)

    @contextmanager
    def _report_failure(self, run: Run) -> Iterator[None]:
        """A failure, which every rank raises alike, is an error in the log, or ends the run."""
        try:
            yield
        except SaveError as error:
            self.pending = None
            if self.on_save_error == "stop" and not run.done:  # else the last save is still to come
                raise
            if dist.is_main():
                logger().error("%s Training continues without this checkpoint.", error)

    def _save(self, run: Run, *, background: bool = False) -> None:
        by_update = self.filename_tmpl.startswith(store.BY_UPDATE)
        number = run.progress.updates if by_update else run.progress.iteration(run.geometry)
        name, self.pending = self.filename_tmpl.format(number), run.progress.updates
        self.began, self.took_s = time.monotonic(), 0.0
        weights = is_due(run, self.weights_interval, self.unit)
        self._settle(run, run.save_checkpoint(name, form=self.form, background=background, weights=weights))

    def _finish(self, run: Run, *, wait: bool) -> None:
        with self._report_failure(run):
            self._settle(run, run.finish_save(wait=wait))

    def _settle(self, run: Run, path: Path | None) -> None:
        """Where the checkpoint is complete: delete old ones."""
        if path is None:
            return
        self._last_complete, self.pending, self.took_s = self.pending, None, time.monotonic() - self.began
        self.longest_s = max(self.took_s, self.longest_s or 0.0)
        logger().info("Saved checkpoint %s.", path)
        if not dist.is_main():
            return

        def keeps(manifest: Manifest) -> bool:
            return any(hook.keeps(manifest) for hook in run.hooks)

        every = run.ruler.duration(self.keep_every, self.unit) if self.keep_every else None
        limits: dict[str, Any] = {"max_keep": self.max_keep_ckpts, "max_days": self.max_keep_days, "every": every}
        try:
            for old in store.retain(run.checkpoint_dir, **limits, keeps=keeps):
                logger().info("Deleted old checkpoint %s.", old)
        except (OSError, UnigenError) as error:  # happens on this rank alone: it must not end the run
            logger().warning("Old checkpoints were not deleted: %s", error)
