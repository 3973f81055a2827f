"""The training loop. It uses interfaces only; a feature is a hook or a backend, never an ``if`` in this module."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from unigen_ds.backends.base import Backend
from unigen_ds.checkpoint import saver, store
from unigen_ds.checkpoint.background import BackgroundWriter
from unigen_ds.checkpoint.base_files import save_base
from unigen_ds.checkpoint.convert import DTYPES, export_weights
from unigen_ds.checkpoint.home import WorkDirLock, claim, run_id, same
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.checkpoint.saver import Form
from unigen_ds.config.python_text import config_text
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.progress import Progress, Skip
from unigen_ds.core.shards import first_names
from unigen_ds.data.batches.statistics import list_left_out
from unigen_ds.data.batches.stream import PackedRow
from unigen_ds.data.order.order import Cursor
from unigen_ds.hooks.base import PRIORITY, GoBack, Hook, Iteration, Run, UpdateResult
from unigen_ds.hooks.guard.signals import SIGNAL_REASON
from unigen_ds.hooks.log.journal import SkippedSamplesHook
from unigen_ds.runner.loop.updates import LastUpdate, Update, count_ahead, losses
from unigen_ds.runner.open.trained import export_checkpoint
from unigen_ds.runner.start.build import check_states
from unigen_ds.runner.start.log_lines import outcome_line
from unigen_ds.runner.start.parts import Parts, build_parts, parts_after, restore
from unigen_ds.system import dist, rank_errors
from unigen_ds.system.clock import Clock
from unigen_ds.system.files import write_text_atomic
from unigen_ds.system.hangs import Watch
from unigen_ds.system.journals import sample_digest
from unigen_ds.system.log import logger


class Runner(Run):
    """Trains ``Parts`` to its limits: ``Runner.from_cfg(cfg).train()``."""

    def __init__(self, parts: Parts) -> None:
        self._locks: list[WorkDirLock] = []
        self._use(parts)

    def _use(self, parts: Parts) -> None:
        """Begin with these parts, as a new process does."""
        self._parts, settings, start = parts, parts.settings, parts.start
        self.config, self.work_dir, self.checkpoint_dir = settings.config, settings.folder, settings.checkpoints
        self.backend, self.geometry, self.peak_tflops = parts.backend, parts.geometry, settings.env.peak_tflops
        self.ruler, self.total_sequences = start.ruler, start.total_sequences
        self.hooks = sorted(parts.hooks, key=lambda hook: hook.priority)
        manifest = start.manifest
        self.progress = self.previous = manifest.progress if manifest else Progress()
        self.processor, self.datasets = start.data.processor, start.data.stream.sources
        self.validation = parts.start.data.validation
        self.clock = Clock(device=parts.backend.device, began=parts.began)
        self.stop_reason: str | None = None
        self._stop_error: Exception | None = None
        self.run_id = ""  # known once the work dir is locked
        self.hparams: Sequence[Mapping[str, Any]] = ()
        self.iteration: Iteration | None = None
        self._cursor: Cursor = start.cursor
        self._last: LastUpdate = LastUpdate.from_manifest(manifest, start.cursor)
        self._parent: str | None = None  # the name of a checkpoint of the same folder, the whole path of any other
        if manifest and (parent := parts.plan.checkpoint):
            self._parent = store.outer(parent).name if store.is_inside(self.checkpoint_dir, parent) else str(parent)
        self._loss_weights = settings.term_weights
        self._config_text, self._identity = config_text(settings.config), start.data.stream.identity
        self._rows: Sequence[PackedRow] = ()
        """Rows of the present update on all ranks; none while they are loaded."""
        self._writer: BackgroundWriter | None = None
        self._parameters = Parameters(parts.backend)

    @classmethod
    def from_cfg(cls, config: Any, *, max_updates: int | None = None) -> Runner:
        """Build all that a config names: of ``load_config``, a mapping, or ``Settings``. See ``start/parts.py``."""
        try:
            return cls(build_parts(config, max_updates=max_updates))
        except BaseException as error:
            if (cause := rank_errors.explain(error)) is not error:
                raise cause from error
            raise

    @property
    def finished(self) -> bool:
        """Whether the next update would exceed ``train_cfg``; its tokens are not known, so these end at the limit."""
        stream = self._parts.start.data.stream
        ahead = stream.position_after(self.progress.sequences, self.geometry.global_batch_size)
        return any(
            ahead > limit.value if limit.unit == "sequence" else limit.reached(self.progress)
            for limit in self._parts.start.limits
        )

    @property
    def done(self) -> bool:
        most = self._parts.max_updates
        return self.finished or self.stop_reason is not None or (most is not None and self.progress.updates >= most)

    def request_stop(self, reason: str, *, error: Exception | None = None) -> None:
        self.stop_reason, self._stop_error = reason, self._stop_error or error

    def last_losses(self) -> dict[str, float] | None:
        update = self._last.read(self.geometry, self._parts.loader_at)
        return None if update is None else losses(self.backend, update)

    def train(self) -> Progress:
        """Restore, train, clean up; again from a checkpoint after a ``GoBack``. Returns the progress. Collective."""
        try:
            while (back := self._train()) is not None:
                stops = dist.sum_floats([float(any(hook.wants_stop() for hook in self.hooks))])[0]
                self._use(parts_after(back, self._parts, self.model))
                if stops:  # the signal came before, and new hooks do not know of it
                    self.request_stop(SIGNAL_REASON)
        finally:
            self.backend.close()
        return self.progress

    def _train(self) -> GoBack | None:
        """``train`` until it is done, or a hook has it go back."""
        self.run_id = dist.on_main(self._lock_folders)
        watch = Watch(
            self.work_dir / "hang",
            timeout_s=self._parts.settings.env.dist_timeout_s,
            position=lambda: (self.progress.updates + 1, self.clock.section, self.clock.num_sections),
            samples=lambda: self._names(self._rows if self._rows else self._parts.loader.rows_ahead),
            end=rank_errors.end_here,
        )
        try:
            self._call("before_run")
            checkpoint = restore(self._parts, self.hooks, home=self.checkpoint_dir)
            if checkpoint is not None:
                self._call("after_load_checkpoint", checkpoint)
            dist.on_main(lambda: write_text_atomic(self.work_dir / store.CONFIG_FILE, self._config_text))
            dist.on_main(lambda: list_left_out(self._parts.start.data.parts, self.work_dir))
            self._call("before_train")
            check_states(self.hooks)
            updates = count_ahead(iter(self._parts.loader), terms=self._loss_weights, requests=self._requests)
            epoch: int | None = None
            while not self.done:
                if epoch != self.progress.epoch:
                    epoch = self.progress.epoch
                    self._call("before_train_epoch")
                self.train_update(updates)
                if epoch != self.progress.epoch:
                    self._call("after_train_epoch")
            self._call("after_train")
            if self._stop_error is not None:
                raise self._stop_error
            self._call("after_run")
        except GoBack as back:
            self._report(back)
            return back.with_traceback(None)  # its frames have the batches of an update
        except BaseException as error:
            cause = rank_errors.explain(error)
            self._report(cause)
            if cause is not error:
                raise cause from error
            if isinstance(error, OSError):
                for lock in self._locks:
                    lock.check()  # names the cause where a folder is gone
            raise
        finally:
            watch.close()
            self._parts.loader.close()
            if self._writer is not None:
                self._writer.close()
            self._unlock_folders()
        return None

    def _requests(self) -> list[bool]:
        return [any(hook.wants_stop() for hook in self.hooks), *(hook.has_request() for hook in self.hooks)]

    def _lock_folders(self) -> str:
        """Lock both folders, connect them, and remove unfinished files, on rank 0. Returns the id of the run."""
        folders = {"work_dir": self.work_dir, "checkpoint_dir": self.checkpoint_dir}
        if same(*folders.values()):
            folders.pop("checkpoint_dir")
        try:
            for key, folder in folders.items():
                self._locks.append(WorkDirLock(folder, key=key))
            claim(self.work_dir, self.checkpoint_dir)
            identifier = run_id(self.work_dir)
        except BaseException:
            self._unlock_folders()
            raise
        for lock, folder in zip(self._locks, folders.values(), strict=True):
            for path in store.sweep(folder) if lock.exclusive else ():
                logger().info("Removed %s, left by an interrupted save or deletion.", path)
        return identifier

    def _unlock_folders(self) -> None:
        while self._locks:
            self._locks.pop().release()

    def train_update(self, updates: Iterator[Update]) -> None:
        """One optimizer step: ``accumulative_counts`` micro-batches, each target weighing the same in the loss."""
        self._last = replace(self._last, update=None)  # its memory is freed
        self._rows = []
        with self.clock("data"):
            update = next(updates)
        micro_batches = update.micro_batches
        self._rows = [row for micro_batch in micro_batches for row in micro_batch.rows]
        self._call("before_update")
        self.hparams = hparams = self._parts.schedules.at(self.progress)
        self.backend.set_hparams(hparams)
        sums: dict[str, Tensor] = {}
        for i, micro_batch in enumerate(micro_batches):
            last = i == len(micro_batches) - 1
            self._call("before_train_iter", i, micro_batch.batch)
            with self.clock("forward_backward"), self.backend.accumulate(last=last):
                terms = self.backend.model(micro_batch.batch.to(self.backend.device))
                self.backend.backward(terms.weighted_sum(self._loss_weights, update.counts))
            values = {name: value.detach() for name, value in terms.sums.items()}
            each = {name: value.detach() for name, value in terms.each.items()}
            self.iteration = Iteration(micro_batch.batch, values, each, self._loss_weights)
            for name, value in values.items():
                sums[name] = sums[name] + value if name in sums else value
            if not last:
                self._call("after_train_iter", i, micro_batch.batch)
        with self.clock("step"):
            step = self.backend.step()
        self._call("after_train_iter", len(micro_batches) - 1, micro_batches[-1].batch)
        self._last = LastUpdate(self._cursor, self.geometry.global_batch_size, update)
        self._cursor, self.previous = micro_batches[-1].cursor, self.progress
        self.progress = self.progress.advance(
            sequences=self._cursor.sequences - self.progress.sequences,
            samples=update.samples,
            tokens=update.tokens,
            epoch=self._cursor.epoch,
            applied=step.applied,
        )
        sample_ids = self._names(self._rows)
        stop_wanted, *requests = update.requests()
        result = UpdateResult(
            local_sums=sums,
            counts=update.counts,
            loss_weights=self._loss_weights,
            grad_norm=step.grad_norm,
            applied=step.applied,
            hparams=hparams,
            num_skipped=update.num_skipped,
            sequences=(self.previous.sequences, self.progress.sequences),
            sample_digest=sample_digest(sample_ids),
            sample_ids=sample_ids,
            tokens=update.tokens,
            loss_scale=step.loss_scale,
            scale_fell=step.scale_fell,
            stop_wanted=stop_wanted,
            requests={hook.name for hook, requested in zip(self.hooks, requests, strict=True) if requested},
        )
        self._call("after_update", result)

    def _names(self, rows: Sequence[PackedRow]) -> list[str]:
        names = self._parts.start.data.stream.names
        return [draw.sample_id(names) for row in rows for draw in row]

    def _call(self, point: str, *arguments: Any) -> None:
        for hook in self.hooks:
            method = getattr(hook, point)
            if getattr(method, "__func__", None) is getattr(Hook, point):  # it does nothing
                continue
            with self.clock(f"hook:{hook.name or type(hook).__name__}"):
                method(self, *arguments)
            self._parameters.check(hook, point)

    def _report(self, error: BaseException) -> None:
        """Report an error to every hook. If a hook fails here, the others and the caller still get the error."""
        for hook in self.hooks:
            try:
                hook.on_exception(self, error)
            except Exception:
                logger().exception("%s failed in on_exception:", type(hook).__name__)

    def save_checkpoint(
        self, name: str, *, form: Form = "sharded", background: bool = False, weights: bool = False
    ) -> Path | None:
        if background and self._writer is None:
            self._writer = BackgroundWriter()
        parts, tokenizer = self._parts, getattr(self.processor, "tokenizer", None)
        of_files = parts.settings.tokenizer is not None and parts.settings.tokenizer.get("path")
        manifest = Manifest(
            commit=0,  # set by the saver
            parent=self._parent,
            progress=self.progress,
            geometry=self.geometry,
            ruler=self.ruler,
            topology=self.backend.topology(),
            schedule=parts.schedules.state_dict(),
            loader={"cursor": self._cursor.state_dict(), "last": self._last.state_dict(), **self._identity},
            parameters=parts.parameters,
            config=parts.plain_config,
            run=self.run_id,
            base=parts.plan.base,
        )
        for hook in self.hooks:
            hook.before_save_checkpoint(self, manifest.metrics)
        path = saver.save(
            self.checkpoint_dir,
            name,
            backend=self.backend,
            manifest=manifest,
            hook_states={hook.name: state for hook in self.hooks if (state := hook.state_dict())},
            hook_shards={folder: shards for hook in self.hooks for folder, shards in hook.shards().items()},
            config_text=self._config_text,
            form=form,
            before=self._before_save,
            then=export_weights if weights else None,
            write_tokenizer=getattr(tokenizer, "save_pretrained", None) if of_files else None,
            background=self._writer if background else None,
        )
        return self._end_save(path)

    def finish_save(self, *, wait: bool) -> Path | None:
        assert self._writer is not None
        return self._end_save(self._writer.finish(wait=wait))

    def _end_save(self, path: Path | None) -> Path | None:
        if path is not None:
            self._parent = path.name
            self._call("after_save_checkpoint", path)
        return path

    @property
    def skips(self) -> Sequence[Skip]:
        return self._parts.start.data.stream.skips

    @property
    def model(self) -> nn.Module:
        engine: Any = self.backend.model
        return cast(nn.Module, engine if isinstance(engine, self._parts.settings.model.cls) else engine.module)

    def save_base(self) -> None:
        base = self._parts.plan.base
        if base is None:
            raise ConfigError(
                "CheckpointHook has save_base=True, and this run has no adapters on files of a base",
                remedy="lora=dict(...) and model.pretrained, or save_base=False",
            )
        if (folder := dist.on_main(lambda: save_base(base, self.checkpoint_dir))) is not None:
            logger().info("Saved the base in %s.", folder)

    def export(self, checkpoint: Path, out: Path, *, raw: bool = False, dtype: str = "fp32") -> None:
        adapters = self._parts.settings.lora is not None  # they are written alone, as they are
        export_checkpoint(checkpoint, out, raw=raw, dtype=None if adapters else DTYPES[dtype])

    def _before_save(self) -> None:
        """Check locks and flush hooks' files, on rank 0. Raises ``OSError`` or ``TrainingError``: the save fails."""
        assert self._locks, "saved outside of train()"
        for lock in self._locks:
            lock.check()
        for hook in self.hooks:
            hook.sync()


def train_config(config: Any, *, max_updates: int | None = None) -> str | None:
    """Train a config. Returns why it stopped early: ``'signal'``, ``'time limit'`` or a hook's reason; else None.

    Raises what ``build_parts`` raises, and ``TrainingError``.
    """
    runner = Runner.from_cfg(config, max_updates=max_updates)
    progress = runner.train()
    state = "complete" if runner.finished else f"stopped ({runner.stop_reason})" if runner.stop_reason else "stopped"
    num_skipped = sum(hook.num_skipped for hook in runner.hooks if isinstance(hook, SkippedSamplesHook))
    logger().info(
        "Training %s after %d updates (%d updates skipped), %d samples (%d samples skipped), %d sequences, epoch %.2f.",
        state, progress.updates, progress.skipped_updates, progress.samples, num_skipped, progress.sequences,
        progress.sequences / runner.ruler.sequences_per_epoch,
    )  # fmt: skip
    limits = [limit.value for limit in runner._parts.start.limits if limit.unit == "sequence"]
    remaining, size = math.floor(min(limits, default=0.0)) - progress.sequences, runner.geometry.global_batch_size
    if runner.finished and 0 < remaining < size:
        logger().info("The %d sequences that are left until the end of train_cfg fill no update of %d.",
                      remaining, size)  # fmt: skip
    if dist.is_main():
        logger().info(outcome_line(runner._parts.settings, runner.datasets, complete=runner.finished))
    return runner.stop_reason


class Parameters:
    """The parameters that the engine was built with. A hook that freezes, adds or replaces one is refused: weight decay
    moves a weight without gradient, and a new one is neither trained nor saved.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend, self._parameters = backend, backend.named_parameters()
        self._states = self._state(self._parameters)

    @staticmethod
    def _state(parameters: Mapping[str, nn.Parameter]) -> dict[str, tuple[int, bool]]:
        return {name: (id(parameter), parameter.requires_grad) for name, parameter in parameters.items()}

    def check(self, hook: Hook, point: str) -> None:
        """Raise ``ConfigError`` where ``hook`` has changed them. Called after each of its methods."""
        if hook.name in PRIORITY and type(hook).__module__.startswith("unigen_ds."):
            return
        within_update = point not in ("before_run", "after_load_checkpoint", "before_train", "before_train_epoch",
                                      "after_train_epoch", "after_update")  # fmt: skip
        now = self._state(self._parameters if within_update else self._backend.named_parameters())  # may be gathered
        names = [name for name in {**self._states, **now} if self._states.get(name) != now.get(name)]
        if names:
            raise ConfigError(
                f"{hook.name or type(hook).__name__}.{point} freezes, adds, removes or replaces"
                f" {first_names(names)}, after the engine was built",
                allowed="hooks that leave the model's parameters as they are",
                remedy="model.freeze, or optim_wrapper.paramwise_cfg.groups=[dict(pattern=..., lr=0)], freezes; a model"
                " with other parameters is a class of your own (docs/extending/model.md)",
            )
