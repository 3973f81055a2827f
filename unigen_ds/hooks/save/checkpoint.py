"""Save at an interval, keep the newest checkpoints, and save once more when the run ends or is stopped."""

from __future__ import annotations

from typing import Annotated, Literal

from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.checkpoint.saver import Form
from unigen_ds.config.registry import HOOKS, checked
from unigen_ds.config.values import Allowed, Rule
from unigen_ds.core.errors import ConfigError, SaveError, UnigenError
from unigen_ds.core.progress import Duration
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.system import dist
from unigen_ds.system.log import logger

Interval = Annotated[float, Rule(lambda value: value > 0 or value == -1), Allowed("a number above 0, or -1")]
MaxKeep = Annotated[int, Rule(lambda value: value != 0), Allowed("a whole number of at least 1, or -1")]


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
        form: `sharded`: the files of the engine, written by all processes; `full`: `model.safetensors` and
            `optimizer.safetensors` alone, from which any engine resumes in full; `both`: the second in the folder
            `full` of the first, a checkpoint of its own. Rank 0 makes them from the first, so the last two take
            longer, and during a save twice the space. Under `single`, whose files are these already, all three are
            the same.
        filename_tmpl: name of the directory: ``iter_{}.pth``, or any with one ``{}`` for the iteration and the ending
            ``.pth``; ``step_{}`` and ``update_{}``, with or without an ending, count updates.
        save_base: with ``lora``: copy the files of the base into ``base`` beside the checkpoints, once, when training
            begins. They are hashed, found by a resume and by the tools, and never deleted.

    A periodic save that fails (a full disk) is an error in the log and training continues: the state in memory is worth
    more than the save. The last save of a run, and the one on a signal, raises ``SaveError`` (exit status 4).
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
        max_keep_days: Annotated[float, Rule(lambda value: value > 0), Allowed("a number above 0")] | None = None,
        form: Form = "sharded",
        filename_tmpl: str = "iter_{}.pth",
        save_base: bool = False,
    ) -> None:
        if filename_tmpl.count("{}") != 1 or not store.is_checkpoint_name(filename_tmpl.format(0)):
            raise ConfigError(
                f"filename_tmpl is {filename_tmpl!r}",
                allowed="a name with one {} and the ending .pth, or step_{}, update_{}, iter_{}",
            )
        self.interval, self.unit = interval, unit or ("epoch" if by_epoch else "iteration")
        self.max_keep_ckpts, self.max_keep_days, self.form = max_keep_ckpts, max_keep_days, form
        self.filename_tmpl, self.save_base = filename_tmpl, save_base
        self._every: Duration | None = None
        self._settled: int | None = None

    def before_run(self, run: Run) -> None:
        self._every = run.ruler.duration(self.interval, self.unit) if self.interval > 0 else None

    def before_train(self, run: Run) -> None:
        if self.save_base:
            run.save_base()
        self._settled = run.progress.updates

    def after_update(self, run: Run, result: UpdateResult) -> None:
        due = self._every is not None and self._every.every(run.progress, run.previous)
        if run.done:
            self._save(run)
        elif due or any(hook.wants_save() for hook in run.hooks):
            try:
                self._save(run)
            except SaveError as error:  # raised on every rank alike
                if dist.is_main():
                    logger().error("%s Training continues without this checkpoint.", error)

    def after_train(self, run: Run) -> None:
        if self._settled != run.progress.updates:  # a hook that runs later asked for the stop
            self._save(run)

    def _save(self, run: Run) -> None:
        by_update = self.filename_tmpl.startswith(store.BY_UPDATE)
        number = run.progress.updates if by_update else run.progress.iteration(run.geometry)
        path = run.save_checkpoint(self.filename_tmpl.format(number), form=self.form)
        self._settled = run.progress.updates
        logger().info("Saved checkpoint %s.", path)
        if not dist.is_main():
            return

        def kept(manifest: Manifest) -> bool:
            return any(hook.keeps(manifest) for hook in run.hooks)

        try:
            days = self.max_keep_days
            for old in store.retain(run.checkpoint_dir, max_keep=self.max_keep_ckpts, max_days=days, keeps=kept):
                logger().info("Deleted old checkpoint %s.", old)
        except (OSError, UnigenError) as error:  # happens on this rank alone: it must not end the run
            logger().warning("Old checkpoints were not deleted: %s", error)
