"""A process that outlives a training and starts the evaluations that still wait, so that the training can end.

It imports no torch and holds no GPU. It starts the jobs of a run's ``JobFolder`` while ``queue.worker`` has its token,
which it checks under the folder's lock. A later start of the run removes that file (``end_worker``) and has the queue
itself from then on; the process then ends, and what it has started continues.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from unigen_ds.core.files import write_text_atomic
from unigen_ds.evaluation.jobs import Job, JobFolder, outside_launcher

_PROGRAM = (
    "import json, sys; given = json.load(sys.stdin); sys.path[:] = given.pop('sys_path');"
    " from unigen_ds.evaluation.job_queue import work_off; work_off(**given)"
)
_POLL_SECONDS = 0.5


def start_worker(jobs: JobFolder, *, max_running: int, environment: Mapping[str, str]) -> int:
    """Start the process; returns its number. What it prints is in ``queue.log``. Raises ``OSError``."""
    token = uuid.uuid4().hex
    with jobs.alone():
        write_text_atomic(jobs.worker_file, token)
    given = {"folder": str(jobs.folder.absolute()), "token": token, "max_running": max_running,
             "environment": dict(environment), "sys_path": sys.path}  # fmt: skip
    with (jobs.folder / "queue.log").open("wb") as log:
        process = subprocess.Popen(
            (sys.executable, "-c", _PROGRAM),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=outside_launcher(),
            start_new_session=True,
        )
    assert process.stdin is not None
    process.stdin.write(json.dumps(given).encode())
    process.stdin.close()
    jobs.worker = process
    return process.pid


def end_worker(jobs: JobFolder) -> None:
    """From now on no such process of this folder starts anything."""
    if jobs.worker_file.exists():
        with jobs.alone():
            jobs.worker_file.unlink(missing_ok=True)


def work_off(folder: str, token: str, max_running: int, environment: Mapping[str, str]) -> None:
    """Start what waits, oldest first and ``max_running`` at a time, until nothing waits or ``token`` is not valid."""
    jobs, failed = JobFolder(Path(folder)), set[int]()
    while True:
        with jobs.alone():
            if not _is_valid(jobs, token):
                return
            records = [job for job in jobs.records() if isinstance(job, Job) and job.update not in failed]
            started, waiting = _start_next(jobs, records, max_running, environment)
            failed |= {job.update for job in started if job.pid is None}
            if not waiting:
                jobs.worker_file.unlink()
                return
        time.sleep(_POLL_SECONDS)


def _is_valid(jobs: JobFolder, token: str) -> bool:
    try:
        return jobs.worker_file.read_text(encoding="utf-8") == token
    except OSError:
        return False


def _start_next(
    jobs: JobFolder, records: Sequence[Job], max_running: int, environment: Mapping[str, str]
) -> tuple[list[Job], int]:
    """What was started (without a process: it could not be), and how many wait."""
    waiting = sorted((job for job in records if job.pid is None), key=lambda job: job.update)
    running = sum(job.pid is not None and job.batch_job is None and jobs.status(job) is None for job in records)
    now = waiting[: max(0, max_running - running)]
    started = []
    for job in now:
        try:
            started.append(jobs.start(job, environment))
        except (OSError, ValueError) as error:
            print(f"The evaluation of update {job.update} cannot be started: {error}", flush=True)
            started.append(job)
    return started, len(waiting) - len(now)
