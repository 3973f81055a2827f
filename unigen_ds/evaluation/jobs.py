"""Evaluations by other processes, while a training continues: their commands, their records and their results.

One folder for each run, whose id is in ``run_id.txt``: ``step_<n>.json`` is the result for the checkpoint of update n,
``step_<n>.log`` what the command printed, and ``step_<n>.job`` the record of an evaluation that has no result yet.
Records are on disk, so a training that was killed finds its evaluations again. A command is a list of arguments; no
shell reads it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unigen_ds.core.errors import ConfigError
from unigen_ds.core.files import PID_SPACE, write_text_atomic
from unigen_ds.core.locks import held

FIELDS = ("checkpoint", "step", "out")
"""What a command may contain in braces: a checkpoint's directory, its update, the file for the result."""
NEEDED = ("checkpoint", "out")
"""Without these there is nothing to evaluate, or no result."""
_FIELD = re.compile(r"\{(\w+)\}")
_WORD = re.compile(r"""(?:[^\s'"\\]|\\.|'[^']*'|"(?:\\.|[^"\\])*")+""")
"""A word of a command line, with its quotes."""
_OPERATOR = re.compile(r"(?:\d*[<>]|&>).*|\|\|?|&&?|;.*|.*[^\\];")
"""A word in which a shell would see a redirection, or the end of a command."""
_INTERPRETER = re.compile(r"python[\d.]*|sh|bash")
_SHELL_TEXT = ("--wrap", "-c")
"""Options whose value is read by a shell: ``sbatch --wrap``, ``bash -c``."""
RESULT = re.compile(r"step_(\d+)\.json")
_SUBMITTED = re.compile(r"(?:Submitted batch job )?(\d+)(?:;\S+)?(?: on cluster \S+)?")
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
_LAUNCHER_BEGINNINGS = ("TORCHELASTIC_", "GROUP_", "ROLE_", "SLURM_", "PMI_", "OMPI_")
OWNER = "run_id.txt"
_STORE_STATUS = '"$@"; status=$?; echo $status > "$0"; exit $status'
"""Runs the arguments after the first as they are, and leaves their status in the first, whoever is there to see it."""
_SHOWN_LINES = 5


@dataclass(frozen=True)
class Job:
    """The evaluation of one checkpoint."""

    update: int
    commit: int
    """Of the checkpoint's manifest."""
    checkpoint: str
    command: tuple[str, ...]
    created: float
    """Seconds since 1970, as of ``time.time()``."""
    pid_space: str = PID_SPACE
    """Where its process can be seen."""
    pid: int | None = None
    """Of the local process; None: it waits for its turn."""
    pid_start: str | None = None
    """When the process started, in the kernel's ticks: another process may get the same number later."""
    batch_job: str | None = None
    """SLURM's number, where ``sbatch`` has accepted it."""

    @property
    def is_batch(self) -> bool:
        """Whether the command only submits the evaluation."""
        return os.path.basename(self.command[0]) == "sbatch"

    @property
    def text(self) -> str:
        """The command, as one would type it."""
        return shlex.join(self.command)


def arguments_of(command: str | Sequence[str], *, where: str) -> tuple[str, ...]:
    """The command as a list of arguments. Raises ``ConfigError`` where it cannot be split, has an unknown field, or is
    written for a shell.
    """
    try:
        found = tuple(shlex.split(command) if isinstance(command, str) else command)
    except ValueError as error:
        allowed = "a command as typed, or a list of texts"
        raise ConfigError(f"{where} is {command!r}: {error}", allowed=allowed) from error
    unknown = sorted({name for part in found for name in _FIELD.findall(part)} - set(FIELDS))
    if not found or unknown:
        problem = f"{where} has {', '.join(f'{{{name}}}' for name in unknown)}" if unknown else f"{where} is empty"
        raise ConfigError(problem, allowed=", ".join(f"{{{name}}}" for name in FIELDS))
    words = _WORD.findall(command) if isinstance(command, str) else ()
    operator = next((word for word in words if _OPERATOR.fullmatch(word)), None)
    if operator is not None:
        raise ConfigError(
            f"{where} has {operator!r}, which only a shell understands, and no shell reads it: {command}",
            allowed="a program with its arguments; what it prints is in step_<n>.log beside its result",
            remedy="sh -c '...' around the command as it is, or quotes around what is an argument",
        )
    return found


def check_needed(command: Sequence[str], *, where: str) -> None:
    """Raise ``ConfigError`` where a command does not name what to evaluate, or where its result is to be."""
    given = {name for part in command for name in _FIELD.findall(part)}
    missing = [f"{{{name}}}" for name in NEEDED if name not in given]
    if missing:
        raise ConfigError(
            f"{where} has no {' and no '.join(missing)}, so no result can come: {shlex.join(command)}",
            allowed="{checkpoint} (its directory) and {out} (the file for the result), also for sbatch, whose script"
            " gets them as arguments; {step} (the update)",
        )


def check_program(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raise ``ConfigError`` where the program of a command, or the script that it runs, is not there."""
    if shutil.which(command[0], path={**os.environ, **environment}.get("PATH")) is None:
        raise ConfigError(
            f"there is no program {command[0]!r} (PATH and the present folder {Path.cwd()} were looked at)",
            remedy="install it, or write its path out",
        )
    script = script_of(command)
    if script is not None and not Path(script).is_file():
        raise ConfigError(
            f"there is no file {script!r}, which {shlex.join(command)} runs",
            remedy=f"a relative path begins at {Path.cwd()}, where the training was started",
        )


def script_of(command: Sequence[str]) -> str | None:
    """The file that ``python FILE ...`` (or ``sh``, ``bash``) runs; None: another command, or it is not known."""
    if _INTERPRETER.fullmatch(os.path.basename(command[0])) is None:
        return None
    rest = iter(command[1:])
    for argument in rest:
        if not argument.startswith("-"):
            return None if _FIELD.search(argument) else argument
        if (
            not os.path.basename(command[0]).startswith("python")
            or argument[1:2] in ("-", "")
            or set("cm") & {*argument}
        ):
            return None
        if argument in ("-W", "-X"):
            next(rest, None)
    return None


def filled(command: Sequence[str], values: Mapping[str, str]) -> tuple[str, ...]:
    """The command with its fields replaced. What a shell will read (``sbatch --wrap``) gets them quoted."""

    def fill(text: str, before: str) -> str:
        quoted = before in _SHELL_TEXT or text.startswith("--wrap=")
        return _FIELD.sub(lambda field: shlex.quote(values[field[1]]) if quoted else values[field[1]], text)

    return tuple(fill(text, before) for before, text in zip(("", *command), command, strict=False))


class JobFolder:
    """The folder of one run's evaluations. Every method may raise ``OSError``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.worker: subprocess.Popen[bytes] | None = None
        """The process that starts what waits when the training has ended (``job_queue``), if this one started it."""

    @property
    def worker_file(self) -> Path:
        """Names the process that may start waiting jobs after the training; absent: there is none."""
        return self.folder / "queue.worker"

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other process starts a job of this folder inside the context."""
        with held(self.folder / "queue.lock"):
            yield

    def claim(self, run_id: str) -> bool:
        """Whether the folder is that of this run: from now on, where it was no run's."""
        self.folder.mkdir(parents=True, exist_ok=True)
        owner = self.folder / OWNER
        with self.alone():
            if not owner.exists():
                write_text_atomic(owner, f"{run_id}\n")
        return owner.read_text(encoding="utf-8").strip() == run_id

    def result_file(self, update: int) -> Path:
        return self.folder / f"step_{update}.json"

    def log_file(self, update: int) -> Path:
        return self.folder / f"step_{update}.log"

    def status_file(self, update: int) -> Path:
        return self.folder / f"step_{update}.status"

    def last_lines(self, update: int) -> str:
        """What the command printed last, in one line of text."""
        with contextlib.suppress(OSError):
            lines = self.log_file(update).read_text(encoding="utf-8", errors="replace").splitlines()
            return " | ".join(line.strip() for line in lines[-_SHOWN_LINES:] if line.strip()) or "nothing was printed"
        return "it is not there"

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
            except (ValueError, KeyError, TypeError) as error:
                yield f"{path} is no record of an evaluation ({type(error).__name__}: {error}): it is not used"

    def keep(self, job: Job) -> Job:
        """Write the record."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text_atomic(self._record(job.update), json.dumps(dataclasses.asdict(job), indent=1) + "\n")
        return job

    def forget(self, job: Job) -> None:
        """Delete the record; the status stays beside the result."""
        self._record(job.update).unlink(missing_ok=True)

    def _record(self, update: int) -> Path:
        return self.folder / f"step_{update}.job"

    def start(self, job: Job, environment: Mapping[str, str]) -> Job:
        """Start its command in a session of its own: no signal to the training reaches it. Returns it with its number.

        It does not see the launcher's variables, or it would try to join the training's processes.
        """
        check_program(job.command, environment)
        self.status_file(job.update).unlink(missing_ok=True)
        with self.log_file(job.update).open("wb") as log:
            with contextlib.suppress(OSError):  # the process inherits it, and has it until it ends
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            process = subprocess.Popen(
                ("/bin/sh", "-c", _STORE_STATUS, self.status_file(job.update).absolute(), *job.command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**outside_launcher(), **environment},
                start_new_session=True,
            )
        self._processes[process.pid] = process
        return self.keep(replace(job, pid=process.pid, pid_start=_start_of(process.pid), pid_space=PID_SPACE))

    def status(self, job: Job) -> int | None:
        """Exit status of its process; None while it runs; below 0 where it was ended by a signal, or nobody knows."""
        if job.pid in self._processes:
            return self._processes[job.pid].poll()
        with contextlib.suppress(OSError, ValueError):
            return int(self.status_file(job.update).read_text(encoding="utf-8"))
        if job.pid_space != PID_SPACE:  # its process cannot be seen from here, but the lock of its log
            try:
                with self.log_file(job.update).open("rb") as log:
                    fcntl.flock(log, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return -1
            except OSError:
                return None
        started = "" if job.pid is None else _start_of(job.pid)
        return None if started and started == job.pid_start else -1

    def cancel(self, job: Job) -> None:
        """End its process, or have ``scancel`` end its batch job, if it is still there."""
        with contextlib.suppress(OSError):
            if job.batch_job is not None:
                subprocess.run(("scancel", job.batch_job), stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
            elif job.pid is not None and self.status(job) is None and job.pid_space == PID_SPACE:
                os.killpg(job.pid, signal.SIGTERM)

    def submitted(self, job: Job) -> str | None:
        """The number that ``sbatch`` printed."""
        with contextlib.suppress(OSError):
            for line in self.log_file(job.update).read_text(encoding="utf-8", errors="replace").splitlines():
                if match := _SUBMITTED.fullmatch(line.strip()):
                    return match[1]
        return None


def outside_launcher() -> dict[str, str]:
    """The environment without the launcher's variables."""
    return {name: value for name, value in os.environ.items() if not _of_launcher(name)}


def _of_launcher(name: str) -> bool:
    return name in _LAUNCHER or (name.startswith(_LAUNCHER_BEGINNINGS) and name != "SLURM_CONF")


def _start_of(pid: int) -> str:
    """When a process started, in the kernel's ticks; empty where there is none, or it is dead and not yet reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def read_result(path: Path, *, update: int) -> tuple[dict[str, float], int]:
    """Numbers of a result, with joined names (``mmstar/average``), and how many other values (texts) it has.

    ``{"global_step": n, "results": {...}}`` as nanoVLM writes it, or ``{"results": [{"values": {...}}, ...]}`` of
    ``tools/evaluate.py``.
    Raises ``ValueError`` with what is wrong.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"it is no JSON ({error})") from error
    found = found if isinstance(found, dict) else {}
    values: Any = found.get("results")
    if isinstance(values, list) and all(
        isinstance(part, dict) and isinstance(part.get("values"), dict) for part in values
    ):
        values = {name: value for part in values for name, value in part["values"].items()}
    if not isinstance(values, dict):
        raise ValueError('it has no object under "results"')
    step = found.get("global_step", update)
    if step != update:
        raise ValueError(f'its "global_step" is {step!r}')
    numbers = numbers_of(values)
    if not numbers:
        raise ValueError("it has no number")
    return numbers, len(dict(_leaves(values))) - len(numbers)


def numbers_of(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among nested values, by joined names."""
    return {name: float(value) for name, value in _leaves(values) if _is_number(value)}


def _leaves(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{above}{name}/")
        else:
            yield f"{above}{name}", value


def _is_number(value: Any) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return value.bit_length() < 1024  # a larger one is no float
    return isinstance(value, float)


def new_job(update: int, commit: int, checkpoint: Path, command: Sequence[str], out: Path) -> Job:
    """A job that waits."""
    values = {"checkpoint": str(checkpoint.absolute()), "step": str(update), "out": str(out.absolute())}
    return Job(update, commit, str(checkpoint), filled(command, values), time.time())
