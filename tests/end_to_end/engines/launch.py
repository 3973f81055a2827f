"""Start ``worker.py`` once for many jobs, and look at what they left behind."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.end_to_end.engines.jobs.cases import Job
from tests.end_to_end.engines.jobs.groups import jobs_of
from tests.support import full_disk
from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.layouts.safetensors import tensor_readers
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.core.shards import EMA
from unigen_ds.system.journals import read_lines

ROOT = Path(__file__).resolve().parents[3]
Tensors = dict[tuple[str, str], Tensor]
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
"""Variables that a worker must not inherit."""


@dataclass(frozen=True)
class Outcome:
    folder: Path

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """The metrics that count."""
        return [line for line in read_lines(self.folder / "metrics.jsonl") if "loss" in line]

    @property
    def checkpoints(self) -> list[Path]:
        return [checkpoint.path for checkpoint in store.list_checkpoints(self.folder) if checkpoint.problem is None]

    @cached_property
    def final(self) -> Tensors:
        """Everything in the last checkpoint, whole, by (kind, name): weights, moments, steps, buffers, average."""
        return tensors(self.checkpoints[-1])

    @cached_property
    def initial(self) -> dict[str, Tensor]:
        """The weights before the first update, as the engine had them."""
        return load_file(self.folder / "initial.safetensors")

    @cached_property
    def state(self) -> dict[str, Tensor]:
        """The weights after the last update, as the engine had them: not read from a checkpoint."""
        return load_file(self.folder / "final.safetensors")

    def records(self, rank: int) -> list[dict[str, Any]]:
        """What each micro-batch of a rank held."""
        text = (self.folder / f"record_{rank}.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def memory(self) -> list[dict[str, int]]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("memory_*.json"))]

    def counted_bytes(self) -> list[dict[str, int]]:
        """The highest sum of tensor bytes of each rank, and what is held between updates (``CountedBytesHook``)."""
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("counted_*.json"))]


def tensors(checkpoint: Path) -> Tensors:
    return {key: read().clone() for key, read in tensor_readers(checkpoint, Manifest.read(checkpoint)).items()}


class LaunchedRuns:
    """Jobs of one worker, which has begun; ``on_demand``: each, with what it resumes from, when ``outcome`` asks for
    it."""

    def __init__(self, out: Path, jobs: Sequence[Job], *, on_demand: bool = False, timeout_s: float = 3000.0) -> None:
        self.out, self.on_demand, self._timeout_s = out, on_demand, timeout_s
        self.results: dict[str, dict[str, Any]] = {}
        self._jobs = {job.name: job for job in jobs}
        self._worker = None if on_demand else self._begin(jobs)
        atexit.register(self._stop)

    def _begin(self, jobs: Sequence[Job]) -> subprocess.Popen[bytes]:
        out = self.out
        out.mkdir(parents=True, exist_ok=True)
        (out / "results.json").unlink(missing_ok=True)
        cases = out / "jobs.json"
        text = json.dumps([asdict(job) for job in jobs])
        cases.write_text(text, encoding="utf-8")
        # of jobs on a full disk: the library that makes its calls fail
        preload = {"LD_PRELOAD": str(full_disk.library(out))} if '"FullDiskHook"' in text else {}
        with (out / "worker.log").open("w", encoding="utf-8") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.end_to_end.engines.worker", str(cases), str(out)],
                cwd=ROOT,
                env={k: v for k, v in os.environ.items() if k not in LAUNCHER} | preload,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _stop(self) -> None:
        """Where pytest ends before the jobs do."""
        if self._worker is not None:
            self._worker.terminate()
            self._worker.wait()

    def has_ended(self) -> bool:
        """Also in a process that was forked from this one."""
        running = Path(f"/proc/{self._worker.pid}/stat") if self._worker else Path("/no/worker")
        return not running.exists() or running.read_text().rpartition(")")[2].split()[0] == "Z"

    def finish(self) -> LaunchedRuns:
        """Wait for the worker's last job, and read how each of them ended."""
        if self._worker is not None:
            with suppress(subprocess.TimeoutExpired):
                self._worker.wait(self._timeout_s)
            self._worker.kill()
            log = (self.out / "worker.log").read_text(encoding="utf-8", errors="replace")[-5000:]
            assert (self.out / "results.json").is_file(), log
            self.results |= json.loads((self.out / "results.json").read_text())
            self._worker = None
        return self

    def outcome(self, name: str, folder: str = "") -> Outcome:
        """Raises with the log of a job that failed. ``folder``: of a phase, where all are in the same processes."""
        chain: list[Job] = []
        job: str | None = name if self.on_demand else None
        while job is not None and job not in self.results:
            chain.insert(0, self._jobs[job])
            job = chain[0].resumes
        if chain:
            self._worker = self._begin(chain)
        problem = self.finish().results[name]["problem"]
        assert problem is None, f"{name}: {problem}"
        return Outcome(self.out / name / folder)


@dataclass(frozen=True)
class Runs:
    """What a test module calls ``runs``: the jobs that its tests look at. A call inside a test waits for the results.

    All modules are imported before the first test runs, so one launch serves whatever was selected; ``conftest.py``
    begins it then, and has those tests run last."""

    groups: tuple[str, ...]

    def __call__(self) -> LaunchedRuns:
        return begin().finish()


def want(*groups: str) -> Runs:
    return Runs(groups)


_RUNS: list[LaunchedRuns] = []


def begin(groups: Iterable[str] = ()) -> LaunchedRuns:
    """Called with all groups when all tests are collected: the engines' jobs run beside the tests that need none.

    With ``ENGINE_JOBS=needed`` in the environment (``tests/mutate.py`` sets it) only the jobs that tests ask for run.
    """
    if not _RUNS:
        out = Path(tempfile.mkdtemp(prefix="engines-"))
        atexit.register(shutil.rmtree, out, ignore_errors=True)
        on_demand = os.environ.get("ENGINE_JOBS") == "needed"
        _RUNS.append(LaunchedRuns(out, jobs_of(groups, full=False), on_demand=on_demand))
    return _RUNS[0]


def relative(a: float | None, b: float | None) -> float:
    """|a - b| / |b|; a value that only one of them has is infinitely far away."""
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    return abs(a - b) / max(abs(b), 1e-30)


METRICS = ("loss", "loss/text", "loss/image", "grad_norm")


def different_values(run: Outcome, other: Outcome) -> list[tuple[int, str]]:
    """(update, name) of what is not bit-equal in two runs' lines of the same updates: metrics, rate, counts."""
    names = (*METRICS, "lr", "sequences", "tokens", "samples")
    pairs = zip(run.lines, other.lines, strict=True)
    return [(a["update"], name) for a, b in pairs for name in names if a[name] != b[name]]


def metric_deviation(run: Outcome, oracle: Outcome, *, after: int = 0, updates: int | None = None) -> float:
    """The largest relative deviation of losses and gradient norms over the updates ``after + 1 .. updates``."""
    a, b = ([x for x in side.lines if after < x["update"] <= (updates or x["update"])] for side in (run, oracle))
    assert [line["update"] for line in a] == [line["update"] for line in b] and a, (run.folder, oracle.folder)
    return max(relative(x[key], y[key]) for x, y in zip(a, b, strict=True) for key in METRICS)


def has_zero_gradient(name: str) -> bool:
    """A key bias of a vision tower: softmax ignores what all keys share, so Adam amplifies pure rounding noise.

    Not so in the language model, where a norm follows the projection.
    """
    towers = ("vit_model.", "vision_model.", "model.vision_tower.", "model.vision_model.")
    return name.startswith(towers) and name.endswith("k_proj.bias")


@dataclass(frozen=True)
class Deviation:
    """How far the weights of two runs are apart."""

    relative_l2: float
    """The largest over tensors."""
    where: str
    absolute: float
    """The largest element among the tensors whose true gradient is zero."""


def weight_deviation(run: Tensors, oracle: Tensors, *, kinds: Sequence[str] = ("master", EMA)) -> Deviation:
    """Weights (and their average) of ``run`` against ``oracle``, tensor by tensor."""
    worst, where, absolute = 0.0, "", 0.0
    keys = {key for key in oracle if key[0] in kinds}
    assert keys == {key for key in run if key[0] in kinds}
    for key in sorted(keys):
        difference = run[key].double() - oracle[key].double()
        if has_zero_gradient(key[1]):
            absolute = max(absolute, float(difference.abs().max()))
            continue
        norm = float(oracle[key].double().norm())
        deviation = float(difference.norm()) / norm if norm else float(difference.norm() > 0) * float("inf")
        if deviation > worst:
            worst, where = deviation, "|".join(key)
    return Deviation(worst, where, absolute)


def unequal(a: Tensors, b: Tensors) -> list[str]:
    """Names of the tensors that are not bit-equal or that only one of the two has."""
    names = ["|".join(key) for key in sorted(a.keys() ^ b.keys())]
    return names + ["|".join(key) for key in sorted(a.keys() & b.keys()) if not torch.equal(a[key], b[key])]
