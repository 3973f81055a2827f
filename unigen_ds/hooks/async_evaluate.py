"""Evaluate saved checkpoints in other processes while the training continues, and log each result once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from unigen_ds.checkpoint.lineage import Lineage
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.core import dist
from unigen_ds.core.errors import ConfigError
from unigen_ds.core.files import rename_into_place
from unigen_ds.core.log import logger
from unigen_ds.core.metrics import METRICS_FILE, read_lines
from unigen_ds.core.progress import Duration
from unigen_ds.core.registry import HOOKS
from unigen_ds.evaluation.job_queue import end_worker, start_worker
from unigen_ds.evaluation.jobs import (
    Job,
    JobFolder,
    arguments_of,
    check_needed,
    check_program,
    new_job,
    read_result,
)
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.hooks.logger import logger_of
from unigen_ds.hooks.signals import SignalHook

EVENT = "async_evaluation"
ABANDONED = ".abandoned"


@HOOKS.register_module()
class AsyncEvaluateHook(Hook):
    """A command of your own evaluates a checkpoint: as a local process, or by ``sbatch``. Training never waits for it,
    and nothing that it does ends the training ([evaluation.md](evaluation.md#in-another-process)).

    Args:
        command: a command line, or its list of arguments; ``{checkpoint}``, ``{step}`` (the update) and ``{out}`` (the
            file for its result) are replaced; the first and the last are needed. No shell reads it.
        interval: between evaluations, in ``unit``. A checkpoint is saved for each.
        by_epoch: whether ``interval`` means epochs; False: iterations.
        unit: of ``interval``, instead of ``by_epoch``: ``'epoch'``, ``'iteration'`` or ``'update'``.
        prefix: of the names of all results in the log.
        results: folder of the results; None: ``eval_results`` in the work dir.
        run_name: name of the run's own folder in ``results``; None: the work dir's name. Where that folder is another
            run's, the first 8 characters of the run's id are added.
        max_running: local processes at a time; further checkpoints wait, and are kept until then.
        environment: additional variables of the process, such as ``dict(CUDA_VISIBLE_DEVICES='7')``.
        give_up_hours: after which an evaluation by ``sbatch`` without a result no longer keeps its checkpoint.
        poll_seconds: least time between two looks for results.
        wait_at_end: at the end of the training, wait until every local evaluation has its result in the log; False: end
            at once, and a process of its own starts those that wait, one after the other.
    """

    name = "async_evaluate"

    def __init__(
        self,
        command: str | Sequence[str],
        interval: Annotated[float, Gt(0)] = 1,
        *,
        by_epoch: bool = True,
        unit: Literal["epoch", "iteration", "update"] | None = None,
        prefix: str = "lmms_eval",
        results: str | None = None,
        run_name: str | None = None,
        max_running: Annotated[int, Ge(1)] = 1,
        environment: Mapping[str, str] | None = None,
        give_up_hours: Annotated[float, Gt(0)] = 24.0,
        poll_seconds: Annotated[float, Ge(0)] = 10.0,
        wait_at_end: bool = False,
    ) -> None:
        if run_name is not None and (not run_name or Path(run_name).name != run_name):
            raise ConfigError(f"AsyncEvaluateHook.run_name is {run_name!r}", allowed="the name of a folder")
        self.command = arguments_of(command, where="AsyncEvaluateHook.command")
        check_needed(self.command, where="AsyncEvaluateHook.command")
        self.interval, self.unit = interval, unit or ("epoch" if by_epoch else "iteration")
        self.prefix, self.results, self.run_name = prefix, results, run_name
        self.max_running, self.environment = max_running, dict(environment or {})
        self.give_up_hours, self.poll_seconds, self.wait_at_end = give_up_hours, poll_seconds, wait_at_end
        self._every: Duration | None = None
        self._due = self._asks = False
        self._jobs: dict[int, Job] = {}
        """Of rank 0: by update, those without a result."""
        self._logged: set[int] = set()
        self._named: dict[Path, tuple[int, int]] = {}
        """Time and size of each malformed result that was named."""
        self._seen: dict[Path, tuple[int, int]] = {}
        self._looked = -float("inf")
        self._folder = self._wanted = JobFolder(Path())

    def before_run(self, run: Run) -> None:
        """Raises ``ConfigError`` where the program of the command is not there. Collective."""
        dist.on_main(lambda: check_program(self.command, self.environment))
        self._every = run.ruler.duration(self.interval, self.unit)
        folder = run.work_dir / "eval_results" if self.results is None else Path(self.results)
        name = self.run_name or run.work_dir.resolve().name
        self._wanted, self._folder = JobFolder(folder / name), JobFolder(folder / f"{name}-{run.run_id[:8]}")

    def before_train(self, run: Run) -> None:
        self._on_main(lambda: self._find(run))

    def after_update(self, run: Run, result: UpdateResult) -> None:
        assert self._every is not None
        self._asks = self._every.every(run.progress, run.previous)
        self._due = self._due or self._asks
        if time.monotonic() - self._looked >= self.poll_seconds:
            self._on_main(lambda: self._look(run))

    def wants_save(self) -> bool:
        return self._asks

    def after_save_checkpoint(self, run: Run, path: Path) -> None:
        if self._due:
            self._due = False  # a save that fails is made up for by the next one
            self._on_main(lambda: self._add(run, path))

    def after_train(self, run: Run) -> None:
        self._on_main(lambda: self._look(run))

    def after_run(self, run: Run) -> None:
        """On rank 0: wait for the results, or leave them to a process of their own."""
        self._on_main(lambda: self._finish(run))

    def _finish(self, run: Run) -> None:
        """After the last checkpoint is saved."""
        stopped = any(isinstance(hook, SignalHook) and hook.stopped for hook in run.hooks)
        if self.wait_at_end and not stopped:
            self._wait(run)
        if not self._jobs:
            return
        lines = [f"Evaluations without a result yet: {len(self._jobs)}."]
        running = [job for _, job in sorted(self._jobs.items()) if job.pid is not None]
        waiting = [update for update, job in sorted(self._jobs.items()) if job.pid is None]
        if running:
            lines.append("Running, also after this training has ended: " + ", ".join(map(_process, running)) + ".")
        if waiting and stopped:
            lines.append(f"Waiting: update {_listed(waiting)}; the next start of this run starts them.")
        elif waiting:
            number = start_worker(self._folder, max_running=self.max_running, environment=self.environment)
            lines.append(
                f"Waiting: update {_listed(waiting)}; process {number}, which remains until then, starts them in this"
                f" order, {self.max_running} at a time (after 'kill {number}', the next start of this run starts them)."
            )
        lines.append(
            f"Their checkpoints are kept. Results are written into {self._folder.folder}, where tools/report.py finds"
            " them; the next start of this run (tools/train.py with --resume, also of one that is finished) logs them."
        )
        if "SLURM_JOB_ID" in os.environ and any(job.batch_job is None for job in self._jobs.values()):
            lines.append("SLURM ends the local ones with this job: wait_at_end=True waits for them, and with sbatch as"
                         " the command each is a job of its own.")  # fmt: skip
        logger().info("%s", " ".join(lines))

    def _wait(self, run: Run) -> None:
        """Until no local evaluation is left; Ctrl-C ends it."""
        local = [job.update for job in self._jobs.values() if job.batch_job is None]
        if local:
            logger().info("Waiting for %d evaluations, of update %s (AsyncEvaluateHook.wait_at_end). Ctrl-C ends the"
                          " training without them: they continue.", len(local), _listed(local))  # fmt: skip
        try:
            while any(job.batch_job is None for job in self._jobs.values()):
                time.sleep(min(max(self.poll_seconds, 0.05), 1.0))
                self._look(run)
        except KeyboardInterrupt:
            logger().warning("Interrupted: the training ends without the results that are missing.")

    def keeps(self, manifest: Manifest) -> bool:
        return any(job.commit == manifest.commit for job in self._jobs.values())

    def _on_main(self, action: Callable[[], None]) -> None:
        """On rank 0 alone; not collective. Whatever goes wrong is a warning."""
        if not dist.is_main():
            return
        try:
            action()
        except Exception as error:
            logger().warning("AsyncEvaluateHook: %s: %s. Training continues.", type(error).__name__, error)

    def _find(self, run: Run) -> None:
        """What earlier starts of this run left: results that are in the log, and evaluations that are not finished."""
        if self._wanted.claim(run.run_id):
            self._folder = self._wanted
        else:
            logger().info("%s has the evaluations of another run: those of this one are in %s.",
                          self._wanted.folder, self._folder.folder)  # fmt: skip
        end_worker(self._folder)  # this start has the queue now
        lines = read_lines(run.work_dir / METRICS_FILE)
        self._logged = {int(line["update"]) for line in lines if line.get("event") == EVENT}
        for record in self._folder.records():
            if isinstance(record, str):
                logger().warning("%s.", record)
            else:
                self._jobs[record.update] = record
        for update, path in self._folder.results():
            if update > run.progress.updates:
                self._set_aside(path, "this start continues from an earlier checkpoint")
        self._release_abandoned(run)

    def _release_abandoned(self, run: Run) -> None:
        abandoned = Lineage.read(run.checkpoint_dir).abandoned
        for job in list(self._jobs.values()):
            if job.commit in abandoned or job.update > run.progress.updates:
                if self._folder.result_file(job.update).exists():
                    self._set_aside(self._folder.result_file(job.update), "its checkpoint was abandoned by a resume")
                logger().warning("The evaluation of update %d is ended: a resume abandoned its checkpoint %s.",
                                 job.update, job.checkpoint)  # fmt: skip
                self._folder.cancel(job)
                self._end(job)

    def _set_aside(self, path: Path, why: str) -> None:
        aside = path.with_name(path.name + ABANDONED)
        rename_into_place(path, aside)
        logger().warning("The result %s is not logged and is now %s: %s.", path, aside.name, why)

    def _add(self, run: Run, path: Path) -> None:
        update = run.progress.updates
        out = self._folder.result_file(update)
        if out.exists():
            self._set_aside(out, "its update is evaluated again")
        self._logged.discard(update)
        job = new_job(update, Manifest.read(path).commit, path, self.command, out)
        self._jobs[update] = self._folder.keep(job)
        self._look(run)

    def _look(self, run: Run) -> None:
        """Log new results, release what has ended, start what waits."""
        self._looked = time.monotonic()
        for job in list(self._jobs.values()):
            if job.pid is None:
                continue
            if job.update in self._logged or self._log_result(run, job.update, ended=False):
                self._end(job)
            else:
                self._check(run, job)
        for update, _ in self._folder.results():  # of others: written by hand, or after an evaluation was given up
            if update not in self._jobs and update <= run.progress.updates:
                self._log_result(run, update, ended=True)
        self._start_waiting()

    def _start_waiting(self) -> None:
        waiting = [job for job in self._jobs.values() if job.pid is None]
        local = sum(job.pid is not None and job.batch_job is None for job in self._jobs.values())
        for job in sorted(waiting, key=lambda job: job.update)[: max(0, self.max_running - local)]:
            try:
                self._jobs[job.update] = self._folder.start(job, self.environment)
                logger().info("Evaluation of update %d started: %s", job.update, job.text)
            except (OSError, ValueError) as error:  # a ConfigError, too: the program is gone
                logger().warning("The evaluation of update %d cannot be started: %s. Command: %s",
                                 job.update, error, job.text)  # fmt: skip
                self._end(job)

    def _check(self, run: Run, job: Job) -> None:
        """Whether a job without a result has ended, or needs too long."""
        if job.batch_job is not None:
            if time.time() - job.created > 3600 * self.give_up_hours:
                logger().warning("The evaluation of update %d (batch job %s) has no result after %g hours: %s is no"
                                 " longer kept for it.",
                                 job.update, job.batch_job, self.give_up_hours, job.checkpoint)  # fmt: skip
                self._end(job)
            return
        status = self._folder.status(job)
        if status is None:
            return
        if job.is_batch and (number := self._folder.submitted(job)) is not None and status <= 0:
            self._jobs[job.update] = self._folder.keep(replace(job, batch_job=number))
            logger().info("The evaluation of update %d is batch job %s.", job.update, number)
            return
        if not self._log_result(run, job.update, ended=True) and not self._folder.result_file(job.update).exists():
            ended = "has ended" if status < 0 else f"has ended with status {status}"
            logger().warning("The evaluation of update %d %s without a result. The last lines of its output, %s: %s."
                             " Command: %s", job.update, ended, self._folder.log_file(job.update),
                             self._folder.last_lines(job.update), job.text)  # fmt: skip
        self._end(job)

    def _end(self, job: Job) -> None:
        del self._jobs[job.update]
        self._folder.forget(job)

    def _log_result(self, run: Run, update: int, *, ended: bool) -> bool:
        """Log the result of an update's checkpoint, if it is there, complete, and not in the log yet. True: it was."""
        path = self._folder.result_file(update)
        if update in self._logged or not path.exists():
            return False
        try:
            values, others = read_result(path, update=update)
        except ValueError as error:
            self._name(path, str(error), ended=ended)
            return False
        self._logged.add(update)
        named = {f"{self.prefix}/{name}": value for name, value in values.items()}
        logger_of(run).log(run, named, update=update, axis=f"{self.prefix}/step", event=EVENT)
        if others:
            logger().info("%s has %d values that are no numbers: they are not logged.", path, others)
        return True

    def _name(self, path: Path, problem: str, *, ended: bool) -> None:
        """Name a malformed result, once for each content: not while it may still be being written."""
        status = path.stat()
        content = (status.st_mtime_ns, status.st_size)
        unchanged, self._seen[path] = self._seen.get(path) == content, content
        if (ended or unchanged) and self._named.get(path) != content:
            self._named[path] = content
            logger().warning("The result %s is not logged: %s.", path, problem)


def _listed(updates: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(updates)))


def _process(job: Job) -> str:
    kind = f"process {job.pid}" if job.batch_job is None else f"batch job {job.batch_job}"
    return f"update {job.update} ({kind})"
