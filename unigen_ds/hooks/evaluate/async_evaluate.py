"""Evaluate saved checkpoints in other processes while the training continues, and log each result once."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.checkpoint.store import Lineage
from unigen_ds.config.registry import HOOKS
from unigen_ds.evaluation.jobs.evaluation_job import (
    Job,
    JobFolder,
    arguments_of,
    check_program,
    fill_fields,
    read_result,
)
from unigen_ds.hooks.base import Hook, Run, UpdateResult, is_due
from unigen_ds.hooks.guard.signals import SignalHook
from unigen_ds.hooks.log.logger import logger_of
from unigen_ds.system import dist
from unigen_ds.system.files import rename_into_place
from unigen_ds.system.journals import METRICS_FILE, read_lines
from unigen_ds.system.log import logger

EVENT = "async_evaluation"


@HOOKS.register_module()
class AsyncEvaluateHook(Hook):
    """A command of your own evaluates a checkpoint: as a local process, or by ``sbatch``. Training never waits for it,
    and nothing that it does ends the training ([another process](evaluation/other_process.md)).

    Args:
        command: a command line, or its list of arguments; ``{checkpoint}``, ``{step}`` (the update) and ``{out}`` (the
            file for its result) are replaced; the first and the last are needed. No shell reads it.
        interval: between evaluations, in ``unit``. A checkpoint is saved for each.
        by_epoch: whether ``interval`` means epochs; False: iterations.
        unit: of ``interval``, instead of ``by_epoch``: ``'epoch'``, ``'iteration'`` or ``'update'``.
        prefix: of the names of all results in the log.
        results: folder in which each run has its own, with the name of its work dir; None: ``eval_results`` in the work
            dir. Where that folder is another run's, the first 8 characters of the run's id are added.
        environment: additional variables of the processes, such as ``dict(CUDA_VISIBLE_DEVICES='7')``.
        give_up_hours: after which an evaluation by ``sbatch`` without a result no longer keeps its checkpoint.
        poll_seconds: least time between two looks for results.
        wait_at_end: at the end of the training, wait until every local evaluation has its result in the log; False: end
            at once, and a process of its own runs those that are left, one after the other.
    """

    name = "async_evaluate"
    state_attributes = ("evaluates",)

    def __init__(
        self,
        command: str | Sequence[str],
        interval: Annotated[float, Gt(0)] = 1,
        *,
        by_epoch: bool = True,
        unit: Literal["epoch", "iteration", "update"] | None = None,
        prefix: str = "lmms_eval",
        results: str | None = None,
        environment: Mapping[str, str] | None = None,
        give_up_hours: Annotated[float, Gt(0)] = 24.0,
        poll_seconds: Annotated[float, Ge(0)] = 10.0,
        wait_at_end: bool = False,
    ) -> None:
        self.command = arguments_of(command, where="AsyncEvaluateHook.command")
        self.interval, self.unit = interval, unit or ("epoch" if by_epoch else "iteration")
        self.prefix, self.results = prefix, results
        self.environment = dict(environment or {})
        self.give_up_hours, self.poll_seconds, self.wait_at_end = give_up_hours, poll_seconds, wait_at_end
        self._asks = self._due = self.evaluates = False
        """Whether one is wanted at this update; since the last save; by a save that is not complete, or has failed. A
        checkpoint has the last: a run that is killed before its evaluation is asked for, asks for it when it resumes.
        """
        self._jobs: dict[int, Job] = {}
        """Evaluations without a result, by update; on rank 0."""
        self._updates_in_log: set[int] = set()
        self._warnings: set[tuple[Path, int]] = set()
        """Each malformed result that a warning has named, with its time."""
        self._last_look = -float("inf")
        self._folder = JobFolder(Path())

    def before_run(self, run: Run) -> None:
        """Raises ``ConfigError`` where the program of the command is not there. Collective."""
        dist.on_main(lambda: check_program(self.command, self.environment))

    def before_train(self, run: Run) -> None:
        self._on_main(lambda: self._find(run))
        self.evaluates = False

    def after_update(self, run: Run, result: UpdateResult) -> None:
        self._asks = is_due(run, self.interval, self.unit)
        self._due = self._due or self._asks
        if time.monotonic() - self._last_look >= self.poll_seconds:
            self._on_main(lambda: self._look(run))

    def wants_save(self) -> bool:
        return self._asks

    def before_save_checkpoint(self, run: Run, metrics: dict[str, float]) -> None:
        self._due, self.evaluates = False, self._due or self.evaluates

    def after_save_checkpoint(self, run: Run, path: Path) -> None:
        if self.evaluates:
            self.evaluates = False
            self._on_main(lambda: self._add(run, path))

    def after_run(self, run: Run) -> None:
        """After the last checkpoint is saved. On rank 0: wait for the results, or leave them to the worker."""
        self._on_main(lambda: self._finish(run))

    def keeps(self, manifest: Manifest) -> bool:
        return any(job.commit == manifest.commit for job in self._jobs.values())

    def _on_main(self, action: Callable[[], None]) -> None:
        """Run ``action`` on rank 0 alone; not collective. Whatever goes wrong is a warning."""
        if not dist.is_main():
            return
        try:
            action()
        except Exception as error:
            logger().warning("AsyncEvaluateHook: %s: %s. Training continues.", type(error).__name__, error)

    def _find(self, run: Run) -> None:
        """What earlier starts of this run left: results that are in the log, and evaluations that are not finished."""
        results = run.work_dir / "eval_results" if self.results is None else Path(self.results)
        name = run.work_dir.resolve().name
        self._folder = JobFolder(results / name)
        if not self._folder.claim(run.run_id):
            self._folder = JobFolder(results / f"{name}-{run.run_id[:8]}")
            self._folder.claim(run.run_id)
            logger().info("%s has the evaluations of another run: those of this one are in %s.",
                          results / name, self._folder.folder)  # fmt: skip
        self._folder.stop_file.unlink(missing_ok=True)
        lines = read_lines(run.work_dir / METRICS_FILE)
        self._updates_in_log = {int(line["update"]) for line in lines if line.get("event") == EVENT}
        void = Lineage.read(run.checkpoint_dir).abandoned
        for job in self._folder.records():
            if isinstance(job, str):
                logger().warning("%s.", job)
            elif job.commit in void or job.update > run.progress.updates:
                self._set_aside(job.update)
                logger().warning("The evaluation of update %d is ended: a resume abandoned its checkpoint %s.",
                                 job.update, job.checkpoint)  # fmt: skip
                self._folder.remove(job, cancel=True)
            else:
                self._jobs[job.update] = job
        for update, _ in self._folder.results():
            if update > run.progress.updates:
                self._set_aside(update)
        present = run.progress.updates
        if self.evaluates and present not in (*self._jobs, *self._updates_in_log):
            for checkpoint in store.current(store.list_checkpoints(run.checkpoint_dir)):
                if checkpoint.manifest is not None and checkpoint.manifest.progress.updates == present:
                    self._add(run, checkpoint.path)

    def _set_aside(self, update: int) -> None:
        """Rename a result, if it is there: its checkpoint was abandoned by a resume."""
        path = self._folder.file(update, "json")
        if path.exists():
            aside = path.with_name(f"{path.name}.abandoned")
            rename_into_place(path, aside)
            logger().warning("The result %s of an abandoned checkpoint is not logged and is now %s.", path, aside.name)

    def _add(self, run: Run, path: Path) -> None:
        manifest = Manifest.read(path)
        update = manifest.progress.updates
        self._set_aside(update)
        self._updates_in_log.discard(update)
        out = self._folder.file(update, "json").absolute()
        values = {"checkpoint": str(path.absolute()), "step": str(update), "out": str(out)}
        job = Job(update, manifest.commit, str(path), fill_fields(self.command, values), time.time())
        self._folder.add(job)
        self._jobs[update] = job
        logger().info("Evaluation of update %d asked for: %s", update, shlex.join(job.command))
        self._look(run)

    def _look(self, run: Run) -> None:
        """Log new results, release checkpoints whose evaluation has ended, and see that a worker runs the others."""
        self._last_look = time.monotonic()
        for job in list(self._jobs.values()):
            if isinstance(status := self._folder.status(job), int) and self._has_ended(run, job, status):
                del self._jobs[job.update]
                self._folder.remove(job)
        for update, _ in self._folder.results():  # of others: written by hand, or after an evaluation was given up
            if update not in self._jobs and update <= run.progress.updates:
                self._log_result(run, update)
        worker = self._folder.worker
        if self._local() and (worker is None or worker.poll() is not None):
            self._folder.start_worker(self.environment)

    def _local(self) -> list[int]:
        """Updates whose commands wait or run."""
        return sorted(n for n, job in self._jobs.items() if not isinstance(self._folder.status(job), int))

    def _has_ended(self, run: Run, job: Job, status: int) -> bool:
        """Whether nothing more comes of an ended command: its result is logged, or a warning has the reason."""
        if job.update in self._updates_in_log or self._log_result(run, job.update):
            return True
        if (number := self._folder.batch_job(job)) is not None:
            if time.time() - job.created <= 3600 * self.give_up_hours:
                return False
            logger().warning("The evaluation of update %d (batch job %s) has no result after %g hours: %s is no longer"
                             " kept for it.", job.update, number, self.give_up_hours, job.checkpoint)  # fmt: skip
        elif not self._folder.file(job.update, "json").exists():
            logger().warning("The evaluation of update %d has ended%s without a result. The last lines of its output,"
                             " %s: %s. Command: %s", job.update, f" with status {status}" if status >= 0 else "",
                             self._folder.file(job.update, "log"), self._folder.last_lines(job.update),
                             shlex.join(job.command))  # fmt: skip
        return True

    def _log_result(self, run: Run, update: int) -> bool:
        """Log the result of an update's checkpoint, if it is there, complete, and not in the log yet. True: it was."""
        path = self._folder.file(update, "json")
        if update in self._updates_in_log or not path.exists():
            return False
        try:
            values, others = read_result(path, update=update)
        except ValueError as error:
            if (content := (path, path.stat().st_mtime_ns)) not in self._warnings:
                self._warnings.add(content)
                logger().warning("The result %s is not logged: %s.", path, error)
            return False
        self._updates_in_log.add(update)
        record = {f"{self.prefix}/{name}": value for name, value in values.items()}
        logger_of(run).log(run, record, update=update, axis=f"{self.prefix}/step", event=EVENT)
        if others:
            logger().info("%s has %d values that are no numbers: they are not logged.", path, others)
        return True

    def _finish(self, run: Run) -> None:
        stopped = any(isinstance(hook, SignalHook) and hook.stopped for hook in run.hooks)
        if stopped:
            self._folder.stop_file.touch()
        self._look(run)
        if self.wait_at_end and not stopped:
            if local := self._local():
                logger().info("Waiting for %d evaluations (AsyncEvaluateHook.wait_at_end). Ctrl-C ends the training"
                              " without them: they continue.", len(local))  # fmt: skip
            try:
                while self._local():
                    time.sleep(min(max(self.poll_seconds, 0.05), 1.0))
                    self._look(run)
            except KeyboardInterrupt:
                logger().warning("Interrupted: the training ends without the results that are missing.")
            self._look(run)
        if not self._jobs:
            return
        waits = any(self._folder.status(self._jobs[update]) is None for update in self._local())
        what = "they wait for the next start of this run"
        if self._local() and not (waits and stopped):
            number = self._folder.start_worker(self.environment)  # the former one may be about to end
            what = f"process {number}, which remains until then, runs them in this order, one at a time"
        logger().info("Evaluations without a result yet: update %s; %s. Their checkpoints are kept. Results are written"
                      " into %s, where tools/report.py finds them; the next start with --resume logs them.",
                      ", ".join(map(str, sorted(self._jobs))), what, self._folder.folder)  # fmt: skip
