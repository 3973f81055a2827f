"""Kills a run at random moments, resumes it, and compares its end with that of the same run without a kill, bit by bit.

``tools/certify.py`` does it with a user's own config, ``benchmarks/kills.py`` with many configs under every engine. The
processes of a run are those of a user: all get SIGKILL at one time, and the next start is a plain ``--resume``.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, median
from subprocess import DEVNULL, Popen
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.home import home_of
from unigen_ds.checkpoint.layouts.safetensors import tensor_readers
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.core.errors import TrainingError
from unigen_ds.hooks.evaluate.async_evaluate import AsyncEvaluateHook
from unigen_ds.hooks.save.exports import PushToHubHook
from unigen_ds.report.goodput import PARTS, spent_by_start
from unigen_ds.report.reading import read_work_dir
from unigen_ds.runner.settings.tree import Settings
from unigen_ds.system.dist import free_port
from unigen_ds.system.files import delete_inside
from unigen_ds.system.journals import LEDGER_FILE, METRICS_FILE, last_update, read_lines

MOMENTS = ("save", "save", "save", "update", "update", "start")
"""When a kill happens: within a save, between two saves, before the first new update. One is drawn for each start."""
TIMES = (
    "time", "share", "tokens_per_second", "samples_per_second", "epoch_tokens_per_second", "eta", "tflops", "memory",
    "mfu", "loader", "host", "training_stats",
)  # fmt: skip
"""Beginnings of the names of measurements in ``metrics.jsonl``, which no two runs have alike."""
KILL, END = "killed", "ended"
_POLL_S, _OTHERS_S, _SLOW, _SLOWEST_S = 0.002, 20.0, 20.0, 180.0
"""Between two looks; until the others end after one has failed; a start hangs that needs so many times as long as the
run without a kill, and at least so long."""


@dataclass(frozen=True)
class Launch:
    """How a run is started: ``command`` with its folder and ``--resume``, in ``world_size`` processes here."""

    command: Sequence[str]
    world_size: int = 1
    checkpoints: Path | None = None
    """Where each run has a folder of its checkpoints; None: its work dir."""
    environment: Mapping[str, str] = field(default_factory=lambda: {**os.environ})
    popen: Callable[..., Popen[bytes]] = field(default_factory=lambda: Popen)

    def start(self, work_dir: Path) -> list[Popen[bytes]]:
        """Each process has a session of its own; all append what they print to ``<work_dir>.log``."""
        command = [*self.command, "--work-dir", str(work_dir), "--resume"]
        if self.checkpoints is not None:
            command += ["--checkpoint-dir", str(self.checkpoints / work_dir.name)]
        several = {}
        if self.world_size > 1:
            several = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            several |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(self.world_size))
        processes = []
        with log_of(work_dir).open("ab") as log:
            for rank in range(self.world_size):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if several else {}
                streams = {"stdin": DEVNULL, "stdout": log, "stderr": log}
                environment = {**self.environment, **several, **own}
                processes.append(self.popen(command, env=environment, start_new_session=True, **streams))
        return processes


def log_of(work_dir: Path) -> Path:
    """What the processes of all starts printed."""
    return work_dir.with_name(f"{work_dir.name}.log")


def _end(ranks: Sequence[Popen[bytes]]) -> list[int]:
    """SIGKILL to each process with all that are in its group. Returns how the processes ended."""
    for rank in ranks:
        if rank.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.kill()
    return [rank.wait() for rank in ranks]


@dataclass
class Trial:
    """Trains a run without a kill, then again and again with kills; the fields have what was seen.

    Args:
        folder: of the work dirs.
        every: updates between two saves.
        keep: whether work dirs of bit-equal runs are kept.
        say: called with a line after each kill and each run.
    """

    launch: Launch
    folder: Path
    every: int
    rng: random.Random
    keep: bool = False
    say: Callable[[str], None] = print
    moments: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    """Runs with kills that were compared."""
    starts: list[float] = field(default_factory=list)
    """Seconds from the start of the processes to the first new update: of the undisturbed run, then of each resume."""
    saves: list[float] = field(default_factory=list)
    """Seconds in which a save wrote its folder."""
    resumed: int = 0
    """Kills after which there was a checkpoint to resume from."""
    lost_updates: list[int] = field(default_factory=list)
    """Updates that each kill lost: made, and not saved."""
    problems: list[str] = field(default_factory=list)
    """What was not bit-equal, or did not end."""
    deterministic: bool | None = None
    """Whether a second run without a kill is bit-equal; None: not tried, there was no problem."""
    _longest: float = float("inf")
    _update_s: float = 0.0

    def __post_init__(self) -> None:
        self.reference = self.folder / "undisturbed"

    @property
    def kills(self) -> int:
        return sum(self.moments.values())

    def train_undisturbed(self, name: str = "undisturbed") -> None:
        """Raises ``TrainingError`` where the run fails without a kill."""
        began, end = time.monotonic(), self._train(self.folder / name, None)
        if end != END:
            raise TrainingError(f"without any kill, {end}", remedy="tools/train.py CONFIG --dry-run lists what fails")
        self._longest = max(time.monotonic() - began, _SLOWEST_S / _SLOW)
        self._update_s = self.result()["seconds_of_update"]

    def kill(self, number: int) -> None:
        """Kill ``number`` times, over as many runs as that needs, each compared at its end; until the first problem."""
        while self.kills < number and not self.problems:
            self.runs += 1
            work_dir, end = self.folder / f"killed_{self.runs}", KILL
            while end == KILL:
                end = self._train(work_dir, self.rng.choice(MOMENTS) if self.kills < number else None)
            self.problems = [end] if end != END else differences(self.reference, work_dir)
            equal = "is NOT the run without a kill" if self.problems else "is bit-equal to the run without a kill"
            self.say(f"{work_dir.name} {equal}; {self.kills} of {number} kills")
            if not (self.keep or self.problems):
                for path in (home_of(work_dir), work_dir, log_of(work_dir)):
                    delete_inside(path, path.parent)
        if self.problems and self.deterministic is None:
            self.train_undisturbed("undisturbed_again")
            self.deterministic = not differences(self.reference, self.folder / "undisturbed_again")

    def _train(self, work_dir: Path, moment: str | None) -> str:
        """One start, killed at ``moment`` unless it ends before. Returns ``KILL``, ``END``, or how it failed."""
        ledger, home = work_dir / LEDGER_FILE, (self.launch.checkpoints or self.folder) / work_dir.name
        size = ledger.stat().st_size if ledger.exists() else 0
        least = self.rng.choice((1, self.every + 1)) if moment == "save" else self.rng.randint(1, 2 * self.every)
        longest = {"start": self.starts[-1] if self.starts else 1.0, "save": 1.5 * mean(self.saves or [0.1])}
        delay = self.rng.uniform(0.0, longest.get(moment or "", self._update_s))
        began, count, save_start, due = time.monotonic(), 0, None, float("inf")
        ranks = self.launch.start(work_dir)
        try:
            while any([rank.poll() is None for rank in ranks]) and not any(rank.returncode for rank in ranks):
                now = time.monotonic()
                before, count = count, _new_updates(ledger, size)
                if count and not before:
                    self.starts.append(now - began)
                saving = bool(count) and any(store.is_checkpoint_name(p.name, unfinished=True) for p in home.iterdir())
                if not saving and save_start is not None:
                    self.saves.append(now - save_start)
                save_start = (save_start or now) if saving else None
                reached = count >= least and (saving or moment == "update")
                if due == float("inf") and moment and (moment == "start" or reached):
                    due = now + delay
                if now >= due:
                    break
                if now > began + _SLOW * self._longest:
                    return f"{work_dir.name} has not ended after {now - began:.0f} s: {_last_lines(work_dir)}"
                time.sleep(_POLL_S)
            else:
                due, deadline = float("inf"), time.monotonic() + _OTHERS_S
                while any([rank.poll() is None for rank in ranks]) and time.monotonic() < deadline:
                    time.sleep(_POLL_S)  # the others have something to report, too
        finally:
            statuses = _end(ranks)
        if not any(statuses):
            return END
        if due == float("inf"):
            return f"{work_dir.name} ended with status {statuses} after {self.kills} kills: {_last_lines(work_dir)}"
        newest, _ = store.newest(home, hashes=False)
        update = newest.manifest.progress.updates if newest is not None and newest.manifest is not None else 0
        self.moments[str(moment)] += 1
        self.resumed += update > 0
        self.lost_updates.append(max(0, last_update(ledger) - update))
        self.say(f"kill {self.kills}, {moment}: {update + self.lost_updates[-1]} updates were made, {update} are saved")
        return KILL

    def result(self) -> dict[str, Any]:
        seconds = spent_by_start(read_work_dir(self.reference).starts)[0]
        updates = max(1, last_update(self.reference / LEDGER_FILE))
        training = {part: getattr(seconds, part) for part in PARTS if part not in ("start_up", "repeated")}
        total = max(sum(training.values()), 1e-9)
        update_s, save_s = (total - seconds.saves) / updates, seconds.saves / max(1, updates // self.every)
        return {
            "bit_equal": not self.problems, "kills": self.kills, "moments": dict(self.moments), "runs": self.runs,
            "resumed": self.resumed, "differences": self.problems[:1000], "deterministic": self.deterministic,
            "updates": updates, "updates_between_saves": self.every, "seconds_of_update": update_s,
            "seconds_of_save": save_s, "share_of_saves": seconds.saves / total, "first_start_seconds": self.starts[0],
            "resume_seconds": _summary(self.starts[1:]), "lost_updates": _summary(self.lost_updates),
            "lost_seconds": _summary([number * update_s for number in self.lost_updates]),
        }  # fmt: skip


def _summary(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "mean": mean(values), "max": max(values)} if values else {}


def _new_updates(ledger: Path, size: int) -> int:
    """Lines of updates after the first ``size`` bytes."""
    if not ledger.exists():
        return 0
    with ledger.open("rb") as stream:
        stream.seek(size)
        return stream.read().count(b'"update": ')


def _last_lines(work_dir: Path) -> str:
    text = log_of(work_dir).read_text(encoding="utf-8", errors="replace")
    return "\n".join(text.splitlines()[-30:])


# ---- the user's own config ------------------------------------------------------------------------------------------

ELSEWHERE = (AsyncEvaluateHook, PushToHubHook)
"""Hooks that act outside of the work dir."""


def changes_of(settings: Settings, *, every: int) -> tuple[dict[str, Any], list[str]]:
    """Overrides for a run that saves often and writes only into its folders, and the names of what they leave out."""
    hooks = settings.custom_hooks
    local_hooks = [hook for hook in hooks if not issubclass(hook.cls, ELSEWHERE)]
    saves = {"interval": every, "unit": "update", "max_keep_ckpts": 2}
    changes: dict[str, Any] = {f"default_hooks.checkpoint.{key}": value for key, value in saves.items()}
    changes |= {"default_hooks.logger.interval": 1, "visualizer.vis_backends": (), "launcher": "none", "resume": False}
    if settings.randomness.seed is None:
        changes["randomness.seed"] = 0
    if len(local_hooks) < len(hooks):
        changes["custom_hooks"] = [{**hook.spec, "type": hook.name} for hook in local_hooks]
    return changes, [one.name for one in (*settings.visualizer.vis_backends, *hooks) if one not in local_hooks]


# ---- what must be equal ---------------------------------------------------------------------------------------------


def differences(one: Path, other: Path) -> list[str]:
    """What is not bit-equal of two work dirs: lines of their journals, in order, then their last checkpoints."""
    lines = sorted([*_line_differences(METRICS_FILE, one, other), *_line_differences(LEDGER_FILE, one, other)])
    newest = [store.newest(home_of(folder))[0] for folder in (one, other)]
    a, b = (None if checkpoint is None else checkpoint.path for checkpoint in newest)
    missing = [f"the last checkpoints are {a} and {b}"]
    return [text for _, text in lines] + (checkpoint_differences(a, b) if a and b else missing)


def _line_differences(name: str, one: Path, other: Path) -> Iterator[tuple[int, str]]:
    lines: list[dict[tuple[int, str], list[dict[str, Any]]]] = [{}, {}]
    for events, folder in zip(lines, (one, other), strict=True):
        for line in read_lines(folder / name):  # "at": when a late result came
            values = {key: value for key, value in line.items() if key != "at" and not key.startswith(TIMES)}
            events.setdefault((line.get("update", 0), str(line.get("event", "line"))), []).append(values)
    for update, event in sorted(lines[0].keys() | lines[1].keys()):
        a, b = (events.get((update, event), []) for events in lines)
        if len(a) != len(b):
            yield update, f"update {update}: {name} has {len(a)} and {len(b)} lines ({event})"
        for x, y in zip(a, b, strict=False):
            for key in sorted(x.keys() | y.keys()):
                if x.get(key) != y.get(key):
                    yield update, f"update {update}: {name} {key} is {x.get(key)!r} and {y.get(key)!r}"


def checkpoint_differences(one: Path, other: Path) -> list[str]:
    """Names of tensors, generators and states of hooks that are not bit-equal, or that only one of them has."""
    a, b = _contents(one), _contents(other)
    names = [key for key in sorted(a.keys() | b.keys()) if not (key in a and key in b and _equal(a[key](), b[key]()))]
    return [f"checkpoint {one.name}: {name} is not equal" for name in names]


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return bool(a == b)
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _contents(checkpoint: Path) -> dict[str, Callable[[], Any]]:
    """Name -> what reads it: tensors, states of hooks and of generators, the progress."""
    manifest = Manifest.read(checkpoint)
    tensors = tensor_readers(checkpoint, manifest).items()
    entries: dict[str, Callable[[], Any]] = {"|".join(key): read for key, read in tensors}
    for name, state in store.read_hook_states(checkpoint, manifest).items():
        entries[f"state of the hook {name}"] = partial(lambda state: state, state)
    for path in sorted((checkpoint / store.RNG_DIRECTORY).glob("*.safetensors")):
        stream = safe_open(path, framework="pt")
        entries |= {f"rng/{path.name} {key}": partial(stream.get_tensor, key) for key in stream.keys()}  # noqa: SIM118
        entries[f"rng/{path.name} scalars"] = partial(stream.metadata().get, "scalars")
    return {**entries, "progress": lambda: manifest.progress}
