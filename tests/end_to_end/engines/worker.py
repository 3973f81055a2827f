"""Runs jobs of ``cases.py``: ``python -m tests.end_to_end.engines.worker JOBS.json OUT``. Needs no test framework.

torch and DeepSpeed take 6 s to import and training a tiny model takes 2, so they are imported once, and every process
of every phase is forked from here: a process of its own, with its own process group and engine, that may be killed
with SIGKILL like any other. (Nothing may start threads before the fork; two jobs of one process run side by side.)
Up to ``TOGETHER`` jobs of one phase under the same kind of engine share their processes, one after the other, because a
start is a second of a core; where one of them fails, each is run again in processes of its own.

Out: ``OUT/<job>/`` is the work dir of the job's phases, ``OUT/<job>/<phase>.<rank>.log`` what a process printed, and
``OUT/results.json`` maps each job to its seconds, those of a core among them, and to what went wrong, or null.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROCESSES, LIMIT_S = 4, 900.0
"""At a time, two for each core: one that waits for the other ranks of its job leaves a core free."""
TOGETHER = 4
ALONE = ("MemoryHook", "FullDiskHook", "StructureHook", "custom_imports", 'config_file": "')
"""Of what changes its process, or measures it, in a job's text."""
PRELOADED = (
    "unigen_ds.runner", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.checkpoint",
    "transformers.tokenization_utils_tokenizers", "transformers.models.auto.tokenization_auto",
    "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.module_inject.auto_ep_layer",
)  # fmt: skip
"""What training would import sooner or later: 2 to 4 s of every process, were it not done before the fork."""
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # equality is proven on the CPU; and a CUDA context survives no fork
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not survive the fork


@dataclass
class Running:
    job: dict[str, Any]
    number: int
    following: list[dict[str, Any]] = field(default_factory=list)
    """Further jobs in the same processes."""
    group: int = 0
    start: float = field(default_factory=time.monotonic)
    waiting: set[int] = field(default_factory=set)
    statuses: list[int] = field(default_factory=list)

    @property
    def phase(self) -> dict[str, Any]:
        return self.job["phases"][self.number]


class Pool:
    def __init__(self, jobs: list[dict[str, Any]], out: Path) -> None:
        self.out, self.waiting_jobs, self.running = out, [*jobs], list[Running]()
        self.kinds = {job["name"]: kind for job in jobs if (kind := _shared_kind(job)) is not None}
        self.names = {job["name"] for job in jobs}
        self.results: dict[str, dict[str, Any]] = {}
        self.starts: dict[str, float] = {}
        self.cpu_seconds: defaultdict[str, float] = defaultdict(float)

    def run(self) -> None:
        parent = os.getppid()
        try:
            while self.waiting_jobs or self.running:
                if os.getppid() != parent:
                    sys.exit(1)  # the tests were killed
                while (job := self._next()) is not None:
                    following = self._following(job)
                    for one in (job, *following):
                        self.waiting_jobs.remove(one)
                        self.starts[one["name"]] = time.monotonic()
                    self._start(job, 0, following)
                self._collect()
        finally:
            for running in self.running:
                _kill(running.group)
        (self.out / "results.json").write_text(json.dumps(self.results, indent=1), encoding="utf-8")

    def _next(self) -> dict[str, Any] | None:
        """The first job whose predecessor is done, here or by an earlier launch, if its processes may begin now."""
        waiting = self.names - self.results.keys()
        ready = (job for job in self.waiting_jobs if job["resumes"] not in waiting)
        job = next(ready, None)
        busy = sum(r.phase["world"] for r in self.running)
        return job if job and (not busy or busy + job["phases"][0]["world"] <= PROCESSES) else None

    def _following(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        """Those that may share the processes of a job: of the same kind, and ready."""
        waiting, kind = self.names - self.results.keys(), self.kinds.get(job["name"])
        ready = (one for one in self.waiting_jobs if one is not job and one["resumes"] not in waiting)
        return [one for one in ready if kind is not None and self.kinds.get(one["name"]) == kind][: TOGETHER - 1]

    def _start(self, job: dict[str, Any], number: int, following: Sequence[dict[str, Any]] = ()) -> None:
        from unigen_ds.system.dist import free_port

        running = Running(job, number, [*following])
        port = free_port()
        for rank in range(running.phase["world"]):
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                _process([job, *following], number, rank, port, self.out, running.group)
            running.group = running.group or child
            os.setpgid(child, running.group)
            running.waiting.add(child)
        self.running.append(running)

    def _collect(self) -> None:
        """Wait for one process to end, at most a moment."""
        child, status, usage = os.wait4(-1, os.WNOHANG)
        if child == 0:
            time.sleep(0.02)
            late = [r for r in self.running if time.monotonic() - r.start > LIMIT_S]
            for running in late:
                _kill(running.group)
            return
        running = next(r for r in self.running if child in r.waiting)
        running.waiting.discard(child)
        self.cpu_seconds[running.job["name"]] += usage.ru_utime + usage.ru_stime
        running.statuses.append(os.waitstatus_to_exitcode(status))
        if running.statuses[-1] != 0 and running.waiting:
            time.sleep(1.0)  # the others may have something to say, too
            _kill(running.group)
        if not running.waiting:
            self.running.remove(running)
            self._record_end(running)

    def _record_end(self, running: Running) -> None:
        name, phase = running.job["name"], running.phase
        expected = -signal.SIGKILL if phase["killed"] else 0
        problem = None
        if any(status != expected for status in running.statuses):
            problem = f"phase {running.number} ended with {running.statuses}\n" + _logs(self.out / name, running.number)
        elif running.number + 1 < len(running.job["phases"]) and not running.job["same_process"]:
            self._start(running.job, running.number + 1)
            return
        jobs = [running.job, *running.following]
        cpu_seconds = self.cpu_seconds.pop(name) / len(jobs)
        if problem is not None and running.following:
            self.waiting_jobs[:0] = jobs
            for job in jobs:
                del self.kinds[job["name"]]
                shutil.rmtree(self.out / job["name"], ignore_errors=True)
            return
        for name in (job["name"] for job in jobs):
            seconds = time.monotonic() - self.starts[name]
            result = {"problem": problem, "seconds": round(seconds, 2), "cpu_seconds": round(cpu_seconds, 2)}
            self.results[name] = result
            how = "failed" if problem else "done"
            print(f"{name}: {how} after {seconds:.1f} s, {cpu_seconds:.1f} s of a core", flush=True)


def _shared_kind(job: dict[str, Any]) -> tuple[Any, ...] | None:
    """Jobs with the same one may share processes; None: those of this one are its own."""
    (phase, *more), text = job["phases"], json.dumps(job)
    if more or phase["killed"] or any(word in text for word in ALONE):
        return None
    return phase["world"], phase["per_node"], phase["config"]["backend"]["type"]


def _kill(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def _logs(folder: Path, number: int) -> str:
    return "\n".join(f"-- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(folder.glob(f"{number}.*.log")))


def _process(jobs: Sequence[dict[str, Any]], number: int, rank: int, port: int, out: Path, group: int) -> None:
    status, job = 1, jobs[0]
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, group)
        world = job["phases"][number]["world"]
        per_node = job["phases"][number]["per_node"] or world
        if world > 1:
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank % per_node), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(per_node),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
            )  # fmt: skip
        for job in jobs:
            folder = out / job["name"]
            folder.mkdir(parents=True, exist_ok=True)
            log = os.open(folder / f"{number}.{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            sys.stdout.flush()
            os.dup2(log, 1)
            os.dup2(log, 2)
            if job["same_process"]:
                for i, phase in enumerate(job["phases"]):
                    _train(phase, folder / (phase["folder"] or str(i)), out)
                continue
            pointer = out / job["resumes"] / "last_checkpoint" if job["resumes"] and number == 0 else None
            _train(job["phases"][number], folder, out, resume=pointer.read_text().strip() if pointer else None)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # engines' threads and groups are not waited for: exits of DeepSpeed sometimes abort


def _train(phase: dict[str, Any], work_dir: Path, out: Path, *, resume: str | None = None) -> None:
    if phase["config_file"]:
        return _train_file(phase, work_dir, out)
    from tests.tiny import tiny_config
    from unigen_ds.runner import Runner
    from unigen_ds.system import dist

    data = {"type": "UnifiedGenerationDataset", "data_path": str(out / "data" / phase["data"])}
    changes = json.loads(json.dumps(phase["config"]).replace("{data}", str(out / "data")))
    overrides = {"train_cfg__max_epochs": 2, "train_dataloader__dataset": data, **changes}
    if resume is not None:
        overrides["load_from" if "load_cfg" in overrides else "resume"] = resume
    Runner.from_cfg(tiny_config(work_dir, out, **overrides), max_updates=phase["max_updates"]).train()
    dist.barrier()


def _train_file(phase: dict[str, Any], work_dir: Path, out: Path) -> None:
    """As ``tools/train.py CONFIG`` with the options of the phase."""
    from tools.train import main as train

    changes = json.loads(json.dumps(phase["config"]).replace("{data}", str(out / "data")))
    resume = ["--resume"] * bool(changes.pop("resume", False))
    options = [f"{key.replace('__', '.')}={value!r}" for key, value in changes.items()]
    limit = ["--max-updates", str(phase["max_updates"])]
    status = train([phase["config_file"], "--work-dir", str(work_dir), *resume, *limit, "--cfg-options", *options])
    assert status == 0, status


def main() -> None:
    import torch
    from deepspeed.utils import nvtx
    from PIL import Image

    from tests.end_to_end.engines.jobs import mixture_data, pictures, previews, texts  # noqa: F401 - previews registers its hooks
    from tests.end_to_end.engines.jobs import users as users
    from tests.families import tiny_transformers
    from unigen_ds.checkpoint.manifest import current_versions

    text = Path(sys.argv[1]).read_text(encoding="utf-8")
    adapters = ["peft"] * ('"lora"' in text)
    for name in (*PRELOADED, *adapters):
        importlib.import_module(name)
    Image.init()
    current_versions()
    torch.set_num_threads(1)
    nvtx.enable_nvtx = False  # ranges for a profiler, which take a tenth of ZeRO-3's time here
    jobs, out = json.loads(text), Path(sys.argv[2])
    # a compiler that was killed leaves half a library in torch's shared cache, on which every later process fails
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str((out / "compiled_code").resolve())
    if not (out / "data").exists():  # else this is a later launch for further jobs
        users.write_mixed(out / "data")
        users.write_parts(out / "data" / "parts")
        pictures.write_drawings(out / "data" / "drawings")
        pictures.write_talks(out / "data" / "talks")
        texts.write_documents(out / "data" / "digits" / "text.jsonl")
        mixture_data.write_sources(out / "data" / "mixture")
        texts.write_decoder(out / "data" / "decoder")
        users.write_rows(out / "data" / "rows.txt")
        texts.write_numbers(out / "data" / "numbers.txt")
    models = out / "data" / "models"
    kinds = [kind for kind in tiny_transformers.KINDS if f'/models/{kind}"' in text]
    tiny_transformers.write(models, [kind for kind in kinds if not (models / kind).is_dir()])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the tests have ended before the jobs
    gc.freeze()  # else every collection of a process would go through, and so copy, all that was imported
    Pool(jobs, out).run()


if __name__ == "__main__":
    main()
