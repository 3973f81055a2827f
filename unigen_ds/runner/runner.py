"""The loop. It sees interfaces only; a feature is a hook or a backend, never an ``if`` in here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from torch import Tensor

from unigen_ds.checkpoint import saver, store
from unigen_ds.checkpoint.layouts import own_files, shard_folders
from unigen_ds.checkpoint.layouts.safetensors import SafetensorsReader
from unigen_ds.checkpoint.lock import WorkDirLock
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.checkpoint.partial import DIFFERENCES, REPORT_FILE, FittedReader, fit
from unigen_ds.core import dist
from unigen_ds.core.clock import Clock
from unigen_ds.core.files import write_text_atomic
from unigen_ds.core.log import logger
from unigen_ds.core.metrics import sample_digest
from unigen_ds.core.progress import Progress
from unigen_ds.core.seeding import derive_seed, seed_everything
from unigen_ds.core.shards import ShardReader
from unigen_ds.data.loader import lost_worker
from unigen_ds.data.stream import Cursor
from unigen_ds.hooks.base import Hook, UpdateResult
from unigen_ds.resume.edited import other_sizes
from unigen_ds.resume.finding import refuse
from unigen_ds.resume.model_check import check_weights, model_findings
from unigen_ds.runner.adopt import open_checkpoint
from unigen_ds.runner.parts import Parts, build_parts
from unigen_ds.runner.replay import LastUpdate, losses
from unigen_ds.runner.updates import Update, counted


class Runner:
    """Trains ``Parts`` to its limits. ``Runner.from_cfg(cfg).train()``; implements ``hooks.base.Run``."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.config, self.work_dir, self.backend = parts.config, parts.work_dir, parts.backend
        self.ruler, self.geometry, self.total_sequences = parts.ruler, parts.geometry, parts.total_sequences
        self.hooks: Sequence[Hook] = sorted(parts.hooks, key=lambda hook: hook.priority)
        manifest = parts.resumed
        self.progress = self.previous = manifest.progress if manifest else Progress()
        self.processor = parts.processor
        self.clock = Clock(device=parts.backend.device)
        self.stop_reason: str | None = None
        self._cursor: Cursor = parts.cursor
        self._last: LastUpdate = LastUpdate.stored(manifest, parts.cursor)
        self._parent = _parent_name(parts.work_dir, parts.plan.checkpoint) if manifest else None
        self._lock: WorkDirLock | None = None

    @classmethod
    def from_cfg(cls, config: Mapping[str, Any], *, max_updates: int | None = None) -> Runner:
        """Build everything a config names. See ``runner/parts.py`` for the errors."""
        return cls(build_parts(config, max_updates=max_updates))

    @property
    def finished(self) -> bool:
        """Whether the next update would go beyond a limit of ``train_cfg``: a run never trains on more than asked.

        A limit in tokens ends with the update that reaches it: how many the next one has is not known before.
        """
        ahead = self.progress.sequences + self.geometry.global_batch_size
        return any(
            ahead > limit.value if limit.unit == "sequence" else limit.reached(self.progress)
            for limit in self._parts.limits
        )

    @property
    def done(self) -> bool:
        most = self._parts.max_updates
        return self.finished or self.stop_reason is not None or (most is not None and self.progress.updates >= most)

    def request_stop(self, reason: str) -> None:
        self.stop_reason = reason

    def last_losses(self) -> dict[str, float] | None:
        """See ``hooks.base.Run``."""
        update = self._last.read(self.geometry, self._parts.loader_at)
        return None if update is None else losses(self.backend, update)

    def train(self) -> Progress:
        """Restore, train until done, clean up. Collective. Returns the final progress."""
        dist.on_main(self._occupy)
        try:
            self._call("before_run")
            self._restore()
            dist.on_main(lambda: write_text_atomic(self.work_dir / saver.CONFIG_FILE, self._parts.config_text))
            self._call("before_train")
            updates = counted(iter(self._parts.loader), stop=lambda: any(hook.wants_stop() for hook in self.hooks))
            epoch: int | None = None
            while not self.done:
                if epoch != self.progress.epoch:
                    epoch = self.progress.epoch
                    self._call("before_train_epoch")
                self.train_update(updates)
                if epoch != self.progress.epoch:
                    self._call("after_train_epoch")
            self._call("after_train")
            self._call("after_run")
        except BaseException as error:
            lost = lost_worker(error)
            self._tell(lost or error)
            if lost is not None:
                raise lost from error
            if isinstance(error, OSError) and self._lock is not None:
                self._lock.check()  # names the cause where the work dir is gone
            raise
        finally:
            self._parts.loader.close()
            self.backend.close()
            if self._lock is not None:
                self._lock.release()
        return self.progress

    def _occupy(self) -> None:
        """On rank 0: keep other runs out of the work dir, and remove what killed ones left unfinished."""
        self._lock = WorkDirLock(self.work_dir)
        hour = 3600.0
        for path in store.sweep(self.work_dir, older_than_s=0.0 if self._lock.exclusive else hour):
            logger().info("Removed %s, left by a save or deletion that was cut short.", path)

    def train_update(self, updates: Iterator[Update]) -> None:
        """One optimizer step: ``accumulative_counts`` micro-batches, each target weighing the same in the loss."""
        self._last = self._last.without_data()
        with self.clock("data"):
            update = next(updates)
        micro_batches = update.micro_batches
        self._call("before_update")
        hparams = self._parts.schedules.at(self.progress)
        self.backend.set_hparams(hparams)
        sums: dict[str, Tensor] = {}
        for i, micro_batch in enumerate(micro_batches):
            last = i == len(micro_batches) - 1
            self._call("before_train_iter", i, micro_batch.batch)
            with self.clock("forward_backward"), self.backend.accumulate(last=last):
                terms = self.backend.model(micro_batch.batch.to(self.backend.device))
                self.backend.backward(terms.weighted(self._parts.loss_weights, update.counts))
            for name, value in terms.sums.items():
                sums[name] = sums[name] + value.detach() if name in sums else value.detach()
            if not last:
                self._call("after_train_iter", i, micro_batch.batch)
        with self.clock("step"):
            step = self.backend.step()
        self._call("after_train_iter", len(micro_batches) - 1, micro_batches[-1].batch)
        self._advance(update, applied=step.applied)
        names = self._parts.source_names
        sample_ids = [draw.sample_id(names) for m in micro_batches for row in m.rows for draw in row]
        result = UpdateResult(
            local_sums=sums,
            counts=update.counts,
            loss_weights=self._parts.loss_weights,
            grad_norm=step.grad_norm,
            applied=step.applied,
            hparams=hparams,
            num_skipped=update.skipped,
            sequences=(self.previous.sequences, self.progress.sequences),
            sample_digest=sample_digest(sample_ids),
            sample_ids=sample_ids,
            tokens=update.tokens,
            stop_wanted=update.stop_wanted(),
        )
        self._call("after_update", result)

    def _advance(self, update: Update, *, applied: bool) -> None:
        self._last = LastUpdate(self._cursor, self.geometry.global_batch_size, update)
        self._cursor = update.micro_batches[-1].cursor
        self.previous = self.progress
        self.progress = self.progress.advance(
            sequences=self._cursor.sequences - self.progress.sequences,
            samples=update.samples,
            tokens=update.tokens,
            epoch=self._cursor.epoch,
            applied=applied,
        )

    def _call(self, point: str, *arguments: Any) -> None:
        for hook in self.hooks:
            getattr(hook, point)(self, *arguments)

    def _tell(self, error: BaseException) -> None:
        """Tell every hook of an error; one that fails at that must hide neither the error nor it from the others."""
        for hook in self.hooks:
            try:
                hook.on_exception(self, error)
            except Exception:
                logger().exception("%s failed while it was told of an error:", type(hook).__name__)

    def _restore(self) -> None:
        """Load what the plan says: weights; on resume also moments, hook states and, last, the random generators."""
        checkpoint, manifest = self._parts.plan.checkpoint, self._parts.resumed
        if checkpoint is None:
            return
        reader, stored, stored_config = open_checkpoint(self._parts.plan)
        if manifest is None:
            hidden = other_sizes(stored_config, self._parts.plain_config, hidden=True)
            self._load_weights(reader, stored, hidden)
            return
        check_weights(stored, parameters=self._parts.parameters)
        refuse(model_findings(manifest, parameters=self._parts.parameters, config=self._parts.plain_config))
        self.backend.load_tensors(reader)
        self._restore_hooks(checkpoint, manifest)
        if not saver.restore_rng(checkpoint):
            seed = derive_seed(self._parts.data_identity["seed"], "resume", self.progress.updates)
            seed_everything(seed, rank=dist.rank())
            logger().warning("The checkpoint is of another number of processes: network dropout is seeded anew.")
        dist.on_main(lambda: store.go_on_from(self.work_dir, checkpoint))
        self._call("after_load_checkpoint", {**manifest.state_dict(), "path": str(checkpoint)})

    def _load_weights(self, reader: ShardReader, stored: Sequence[Mapping[str, Any]], sizes: Sequence[str]) -> None:
        """As ``load_cfg`` allows. What differs is said, or refused; ``load_report.json`` has every name of it."""
        buffers = {name: buffer.numel() for name, buffer in self.backend.buffers().items()}
        cfg = self._parts.plan.load_cfg
        found = fit(reader, stored, parameters=self._parts.parameters, buffers=buffers, cfg=cfg, sizes=sizes)
        report = {"checkpoint": str(self._parts.plan.checkpoint), **found.state_dict()}
        dist.on_main(lambda: write_text_atomic(self.work_dir / REPORT_FILE, json.dumps(report, indent=1) + "\n"))
        found.check(cfg)
        if dist.is_main():
            for kind, line in found.lines():
                logger().log(WARNING if kind in DIFFERENCES else INFO, "Weights: %s.", line)
            numbers = len(found.taken), len(found.kept)
            logger().info("Weights: %d tensors are the checkpoint's, %d stay as initialised. What differs: %s.",
                          *numbers, self.work_dir / REPORT_FILE)  # fmt: skip
        self.backend.load_tensors(FittedReader(reader, found), weights_only=True, keep=found.kept)

    def _restore_hooks(self, checkpoint: Path, manifest: Manifest) -> None:
        states = saver.read_hook_states(checkpoint)
        folders = [name for name in shard_folders(manifest) if name != saver.RNG_DIRECTORY]
        readers = {name: SafetensorsReader(checkpoint / name, files=own_files(manifest, name)) for name in folders}
        for hook in self.hooks:
            if hook.name in states:
                hook.load_state_dict(states[hook.name])
            hook.load_shards(readers)
        dropped = sorted(set(states) - {hook.name for hook in self.hooks})
        if dropped:
            logger().warning("State of hooks that this config does not have is dropped: %s.", ", ".join(dropped))

    def save_checkpoint(self, name: str) -> Path:
        """See ``hooks.base.Run``."""
        parts = self._parts
        manifest = Manifest(
            commit=0,  # given by the saver
            parent=self._parent,
            progress=self.progress,
            geometry=self.geometry,
            ruler=self.ruler,
            topology=self.backend.topology(),
            schedule=parts.schedules.state_dict(),
            loader={"cursor": self._cursor.state_dict(), "last": self._last.state_dict(), **parts.data_identity},
            parameters=parts.parameters,
            config=parts.plain_config,
        )
        for hook in self.hooks:
            hook.before_save_checkpoint(self, manifest.metrics)
        path = saver.save(
            self.work_dir,
            name,
            backend=self.backend,
            manifest=manifest,
            hook_states={hook.name: state for hook in self.hooks if (state := hook.state_dict())},
            hook_shards={folder: shards for hook in self.hooks for folder, shards in hook.shards().items()},
            config_text=parts.config_text,
            before=self._before_save,
            write_tokenizer=write_tokenizer(parts.plain_config, parts.processor.tokenizer),
        )
        self._parent = path.name
        return path

    def _before_save(self) -> None:
        """On rank 0. Raises ``OSError`` or ``TrainingError``: then the save fails."""
        assert self._lock is not None, "saved outside of train()"
        self._lock.check()
        for hook in self.hooks:
            hook.sync()


def write_tokenizer(config: Mapping[str, Any], tokenizer: Any) -> Callable[[str], None] | None:
    """What writes the tokenizer's files, where its config names a folder or a hub's name; else the config is enough."""
    return getattr(tokenizer, "save_pretrained", None) if (config.get("tokenizer") or {}).get("path") else None


def _parent_name(work_dir: Path, checkpoint: Path | None) -> str | None:
    """What a manifest calls its parent: the name of one in the same work dir, the whole path of one elsewhere."""
    if checkpoint is None:
        return None
    return checkpoint.name if store.is_inside(work_dir, checkpoint) else str(checkpoint)
