"""Evaluations of checkpoints by other processes, while a training continues: commands, records and results, as files.

One folder for each run, whose id is in ``run_id.txt``: ``step_<n>.job`` is the record of an evaluation of update n that
is not logged yet, ``step_<n>.log`` what its command prints, ``step_<n>.status`` its exit status, ``step_<n>.json`` its
result. The training writes and deletes records. A worker, a process of its own that outlives the training, runs what
they ask for, one after the other, and ends when nothing waits; it ends a command whose record is deleted. So nobody
needs the number of a process, and a training that was killed finds its evaluations again. No shell reads a command.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unigen_ds.core.errors import ConfigError
from unigen_ds.core.json_values import leaves
from unigen_ds.system.files import hold_lock, write_text_atomic

_POLL_S = 0.1
_FIELD = re.compile(r"\{(\w+)\}")
RESULT = re.compile(r"step_(\d+)\.json")
_JOB_NUMBER = re.compile(r"(?:Submitted batch job )?(\d+)(?:;\S+)?(?: on cluster \S+)?")
_LAUNCHER = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|MASTER_ADDR|MASTER_PORT"
    r"|(TORCHELASTIC|GROUP|ROLE|PMI|OMPI)_.*|SLURM_(?!CONF$).*"
)
"""Variables with which a command would try to join the training's processes."""
_WORKER = "import sys; folder, *sys.path = sys.argv[1:]; from {module} import work; work(folder)"
_RUNNING, _ENDED_UNSEEN, _NOT_STARTED = "running", -1, 127


@dataclass(frozen=True)
class Job:
    """The evaluation of one checkpoint."""

    update: int
    commit: int
    """The number of the checkpoint's commit, as its manifest has it."""
    checkpoint: str
    command: tuple[str, ...]
    created: float
    """Seconds since 1970, as of ``time.time()``."""


def arguments_of(command: str | Sequence[str], *, where: str) -> tuple[str, ...]:
    """The command as a list. Raises ``ConfigError`` where it has an unknown field, or lacks one that it needs."""
    try:
        arguments = tuple(shlex.split(command) if isinstance(command, str) else command)
    except ValueError as error:
        problem = f"{where} is {command!r}: {error}"
        raise ConfigError(problem, allowed="a command as typed, or a list of texts") from error
    fields = {name for argument in arguments for name in _FIELD.findall(argument)}
    wrong = [f"has no {{{name}}}" for name in ("checkpoint", "out") if name not in fields]
    wrong += [f"has {{{name}}}" for name in sorted(fields - {"checkpoint", "step", "out"})]
    if wrong:
        raise ConfigError(
            f"{where} {' and '.join(wrong)}: {shlex.join(arguments)}",
            allowed="{checkpoint} (its directory) and {out} (the file for the result), also for sbatch, whose script"
            " gets them as arguments; {step} (the update)",
        )
    return arguments


def check_program(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raise ``ConfigError`` where the program of a command is not there."""
    if shutil.which(command[0], path={**os.environ, **environment}.get("PATH")) is None:
        raise ConfigError(
            f"there is no program {command[0]!r} (PATH and the present folder {Path.cwd()} were looked at)",
            remedy="install it, or write its path out",
        )


def fill_fields(command: Sequence[str], values: Mapping[str, str]) -> tuple[str, ...]:
    """The command with its fields replaced. What a shell will read (``sbatch --wrap``, ``bash -c``) is quoted."""

    def fill(text: str, before: str) -> str:
        quoted = before in ("--wrap", "-c") or text.startswith("--wrap=")
        return _FIELD.sub(lambda field: shlex.quote(values[field[1]]) if quoted else values[field[1]], text)

    return tuple(fill(text, before) for before, text in zip(("", *command), command, strict=False))


class JobFolder:
    """The folder of one run's evaluations. Every method may raise ``OSError``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.stop_file = folder, folder / "stop"
        """While the file is there, no worker starts another evaluation."""
        self.worker: subprocess.Popen[bytes] | None = None
        """That this process started last."""

    def claim(self, run_id: str) -> bool:
        """Whether the folder is that of this run: from now on, where it was no run's."""
        self.folder.mkdir(parents=True, exist_ok=True)
        owner = self.folder / "run_id.txt"
        with hold_lock(self.folder / "run_id.lock"):
            if not owner.exists():
                write_text_atomic(owner, f"{run_id}\n")
        return owner.read_text(encoding="utf-8").strip() == run_id

    def file(self, update: int, kind: str) -> Path:
        """``kind``: ``job``, ``log``, ``status`` or ``json``, the result."""
        return self.folder / f"step_{update}.{kind}"

    def output(self, update: int) -> list[str]:
        with contextlib.suppress(OSError):
            text = self.file(update, "log").read_text(encoding="utf-8", errors="replace")
            return [line.strip() for line in text.splitlines() if line.strip()]
        return []

    def last_lines(self, update: int) -> str:
        """What the command printed last, in one line of text."""
        return " | ".join(self.output(update)[-5:]) or "nothing was printed"

    def batch_job(self, job: Job) -> str | None:
        """The number that ``sbatch`` printed; None: it accepted nothing, or the command is another one."""
        if os.path.basename(job.command[0]) != "sbatch" or self.status(job) not in (0, _ENDED_UNSEEN):
            return None
        return next((match[1] for match in map(_JOB_NUMBER.fullmatch, self.output(job.update)) if match), None)

    def results(self) -> list[tuple[int, Path]]:
        """Updates and files of all results that are there, in order."""
        names = ((RESULT.fullmatch(path.name), path) for path in self.folder.iterdir()) if self.folder.is_dir() else ()
        return sorted((int(match[1]), path) for match, path in names if match)

    def records(self) -> Iterator[Job | str]:
        """Every record; for one that cannot be read a sentence that names it."""
        for path in sorted(self.folder.glob("step_*.job")):
            try:
                state = json.loads(path.read_text(encoding="utf-8"))
                yield Job(**{**state, "command": tuple(map(str, state["command"])), "update": int(state["update"])})
            except FileNotFoundError:  # deleted a moment ago
                continue
            except (ValueError, KeyError, TypeError) as error:
                yield f"{path} is no record of an evaluation ({type(error).__name__}: {error}): it is not used"

    def add(self, job: Job) -> None:
        """Write the record of an evaluation that waits."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file(job.update, "status").unlink(missing_ok=True)
        write_text_atomic(self.file(job.update, "job"), json.dumps(dataclasses.asdict(job), indent=1) + "\n")

    def remove(self, job: Job, *, cancel: bool = False) -> None:
        """Delete the record: a worker ends the command if it still runs, and with ``cancel`` Slurm the batch job."""
        batch_job = self.batch_job(job) if cancel else None
        self.file(job.update, "job").unlink(missing_ok=True)
        if batch_job is not None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(("scancel", batch_job), stdin=subprocess.DEVNULL, capture_output=True, timeout=60)

    def status(self, job: Job) -> int | str | None:
        """Exit status (below 0: a signal ended the command, or nobody saw its end), ``running``, or None: it waits."""
        with contextlib.suppress(OSError):
            text = self.file(job.update, "status").read_text(encoding="utf-8").strip()
            return text if text == _RUNNING else int(text)
        return None

    def start_worker(self, environment: Mapping[str, str]) -> int:
        """Start one, without torch, that begins when no other works here, and no signal to the training reaches."""
        variables = {name: value for name, value in os.environ.items() if not _LAUNCHER.fullmatch(name)}
        with (self.folder / "worker.log").open("ab") as log:
            self.worker = subprocess.Popen(
                (sys.executable, "-c", _WORKER.format(module=__name__), str(self.folder.absolute()), *sys.path),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**variables, **environment},
                start_new_session=True,
            )
        return self.worker.pid

    def run(self, job: Job) -> None:
        """Run its command to the end, or until its record is deleted. By a worker."""
        status = self.file(job.update, "status")
        write_text_atomic(status, _RUNNING)
        with self.file(job.update, "log").open("wb") as log:
            options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            try:
                process = subprocess.Popen(job.command, start_new_session=True, **options)
            except OSError as error:
                log.write(f"it cannot be started: {error}\n".encode())
                log.flush()
                write_text_atomic(status, str(_NOT_STARTED))
                return
        try:
            while process.poll() is None and job in self.records():
                time.sleep(_POLL_S)
        finally:  # also where this worker is ended by a signal
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        code = process.wait()
        if job in self.records():  # not of another evaluation of this update, which waits
            write_text_atomic(status, str(code))


def work(folder: str) -> None:
    """Run what waits in a folder, oldest first, until nothing does; what a worker that was killed left has ended."""
    jobs = JobFolder(Path(folder))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with hold_lock(jobs.folder / "worker.lock"):
        for job in jobs.records():
            if isinstance(job, Job) and jobs.status(job) == _RUNNING:
                write_text_atomic(jobs.file(job.update, "status"), str(_ENDED_UNSEEN))
        while not jobs.stop_file.exists():
            waiting = [job for job in jobs.records() if isinstance(job, Job) and jobs.status(job) is None]
            if not waiting:
                return
            jobs.run(min(waiting, key=lambda job: job.update))


def read_result(path: Path, *, update: int) -> tuple[dict[str, float], int]:
    """Numbers of a result, with joined names (``mmstar/average``), and how many other values (texts) it has.

    ``{"global_step": n, "results": {...}}`` as nanoVLM writes it, or ``{"results": [{"values": {...}}, ...]}`` of
    ``tools/evaluate.py``. Raises ``ValueError`` with what is wrong.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"it is no JSON ({error})") from error
    content = content if isinstance(content, dict) else {}
    values: Any = content.get("results")
    if isinstance(values, list) and all(isinstance(p, dict) and isinstance(p.get("values"), dict) for p in values):
        values = {name: value for part in values for name, value in part["values"].items()}
    if not isinstance(values, dict):
        raise ValueError('it has no object under "results"')
    step = content.get("global_step", update)
    if step != update:
        raise ValueError(f'its "global_step" is {step!r}')
    numbers, others = numbers_of(values)
    if not numbers:
        raise ValueError("it has no number")
    return numbers, others


def numbers_of(values: Mapping[str, Any]) -> tuple[dict[str, float], int]:
    """The numbers among nested values, by joined names, and how many values are none."""
    numbers: dict[str, float] = {}
    every = [*leaves(values)]
    for leaf, value in every:
        if type(value) is float or (type(value) is int and value.bit_length() < 1024):  # a larger one is no float
            numbers["/".join(map(str, leaf))] = float(value)
    return numbers, len(every) - len(numbers)
