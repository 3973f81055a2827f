"""1,000 kills of training runs under every engine: each run must end bit-equal to the one that was never killed.

In: cases that are drawn from the seed, each an engine, 1 or 2 processes and a choice of features (workers, packing, a
mixture, validation with the best checkpoint, adapters, asynchronous saves and evaluations, bf16, ...). Every process of
a run gets SIGKILL at one time: within a save, between two, or during a start (``unigen_ds/checks/certificate.py``).
Out: ``results/kills_<date>.json``; exit status 1 if a run did not end, or not bit-equal. ``make test`` has 22.

    python benchmarks/kills.py [--num 1000] [--seed 0] [--minutes M] [--first K] [--jobs 2] [--only K] [--no-result]

``--minutes``: begin no further case after that time; ``--first K`` continues with case K. ``--only K`` runs one case
and keeps its files. Processes are forked from one that has imported torch (``tests/support/processes.py``), but for
the run without a kill, which so has another seed for hashes of strings.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.end_to_end.engines.jobs.cases import ALL, CURVE, DECODER, GEOMETRY
from tests.end_to_end.engines.jobs.texts import write_decoder, write_documents
from tests.end_to_end.engines.jobs.users import write_mixed
from tests.support.processes import ENVIRONMENT, ROOT, popen
from tests.tiny import TINY
from unigen_ds.checks.certificate import Launch, Trial

UPDATES, EVERY, PER_CASE = 12, 3, 15
PAIRS = [
    ("single", 1), ("zero1", 2), ("zero2", 2), ("zero3", 2), ("FULL_SHARD", 2), ("SHARD_GRAD_OP", 2), ("NO_SHARD", 2),
    ("zero2_offload", 2), ("zero2", 1), ("zero3", 1), ("FULL_SHARD", 1), ("zero1", 1),
]  # fmt: skip
EVALUATION = """
import json, sys
step = int(sys.argv[1])
json.dump({"global_step": step, "results": {"score": step / 7}}, open(sys.argv[2], "w"))
"""
FEATURES: dict[str, dict[str, Any]] = {
    "workers": {"train_dataloader.num_workers": 2},
    "packing": {"train_dataloader.packing": {"type": "BestFitPacking", "window": 32}},
    "async_save": {"default_hooks.checkpoint.async_save": True},
    "both": {"default_hooks.checkpoint.form": "both"},
    "bf16": {"optim_wrapper.precision": "bf16"},
    "validation": {
        "val_dataloader": {"split": 0.2, "batch_size": 2},
        "hook": {"type": "EvaluateHook", "interval": 2, "unit": "update", "save_best": "val/loss"},
    },
    "async_evaluation": {
        "hook": {
            "type": "AsyncEvaluateHook", "interval": 4,
            "command": [sys.executable, "-S", "-c", EVALUATION, "{step}", "{out}", "{checkpoint}"],
            "unit": "update", "poll_seconds": 0.05, "wait_at_end": True,
        },
    },
}  # fmt: skip
"""Name -> what it changes of the config; ``hook``: a further one. ``mixture`` and ``lora`` change the data."""


@dataclass(frozen=True)
class Case:
    """One run, which is killed up to ``PER_CASE`` times."""

    number: int
    seed: int
    engine: str
    world: int
    features: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.number} {self.engine}@{self.world} {'+'.join(self.features) or 'plain'}"

    def command(self, data: Path) -> list[str]:
        """``tools/train.py`` with a tiny model."""
        batch_size, counts = GEOMETRY[self.world]
        mixture = "mixture" in self.features
        files = (data / "documents.jsonl",) if "lora" in self.features else (data / "digits" / "mixed.jsonl",)
        source = {"type": "UnifiedGenerationDataset"}
        sources = [{**source, "data_path": str(file), "weight": 1 + n} for n, file in enumerate(files * 2)]
        changes: dict[str, Any] = {
            **TINY, "model.llm.dropout": 0.1, "backend": ALL[self.engine],
            "train_dataloader.batch_size": batch_size, "optim_wrapper.accumulative_counts": counts,
            "train_dataloader.packing": None, "train_cfg.max_epochs": 50, "param_scheduler": CURVE,
            "train_dataloader.dataset": sources if mixture else {**source, "data_path": str(files[0])},
            "default_hooks.checkpoint.interval": EVERY, "default_hooks.checkpoint.unit": "update",
            "default_hooks.checkpoint.max_keep_ckpts": 2, "env.dist_timeout_s": 120.0,
        }  # fmt: skip
        if "lora" in self.features:
            decoder = {**DECODER, "pretrained": str(data / "decoder")}
            layers = r"self_attn\.(q|v)_proj|down_proj"
            changes = {key: value for key, value in changes.items() if not key.startswith("model.")}
            changes |= {"model": decoder, "processor": None, "lora": {"r": 4, "alpha": 8, "target_modules": layers}}
        features = [FEATURES[name] for name in self.features if name in FEATURES]
        hooks = [{"type": "EMAHook", "momentum": 0.1}, *(one["hook"] for one in features if "hook" in one)]
        for one in features:
            changes |= {key: value for key, value in one.items() if key != "hook"}
        options = [f"{key}={value!r}" for key, value in {**changes, "custom_hooks": hooks}.items()]
        train = [sys.executable, str(ROOT / "tools" / "train.py"), "unified_digits", "--max-updates", str(UPDATES)]
        return [*train, "--cfg-options", *options]


def case(seed: int, number: int) -> Case:
    """Engines in turn; each feature with a chance of 0.4."""
    draw = random.Random(f"{seed}-{number}")
    engine, world = PAIRS[number % len(PAIRS)]
    features = [name for name in (*FEATURES, "mixture", "lora") if draw.random() < 0.4]
    if "lora" in features and "zero" in engine and world == 1:
        features.remove("lora")
    return Case(number, seed, engine, world, tuple(features))


def write_data(folder: Path) -> Path:
    """The data of all cases."""
    write_mixed(folder)
    write_documents(folder / "documents.jsonl")
    write_decoder(folder / "decoder")
    return folder


def run_case(
    case: Case,
    data: Path,
    folder: Path,
    *,
    kills: int = PER_CASE,
    fresh: bool = True,
    say: Callable[[str], None] = print,
) -> Trial:
    """Its kills, and what was seen. ``fresh``: the run without a kill is started by a new interpreter."""
    launch = Launch(case.command(data), case.world, environment=ENVIRONMENT, popen=popen)
    trial = Trial(launch, folder, EVERY, random.Random(f"{case.seed}-{case.number}-kills"), say=say)
    if fresh:
        trial.launch = replace(launch, popen=subprocess.Popen)
    trial.train_undisturbed()
    trial.launch = launch
    trial.kill(kills)
    return trial


def campaign(seed: int, num: int, *, first: int, minutes: float, jobs: int) -> dict[str, Any]:
    """Cases until there were ``num`` kills, or the time has passed."""
    began, numbers = time.monotonic(), count(first)
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="kills-") as scratch:
        data = write_data(Path(scratch) / "data")

        def work(_: int) -> None:
            while sum(one["kills"] for one in results.values()) < num and time.monotonic() < began + 60 * minutes:
                one = case(seed, next(numbers))
                folder = Path(tempfile.mkdtemp(prefix=f"kills-{seed}-{one.number}-"))
                try:
                    result = run_case(one, data, folder, say=lambda text: None).result()
                except Exception as error:
                    problem = f"{type(error).__name__}: {error} ({folder})"
                    result = {"bit_equal": False, "kills": 0, "differences": [problem]}
                results[one.name] = result
                kills, seconds = sum(one["kills"] for one in results.values()), time.monotonic() - began
                print(f"{one.name}: {'' if result['bit_equal'] else 'NOT '}bit-equal; {kills} kills, {seconds:.0f} s")
                print(*result["differences"][:5], sep="\n  ", flush=True)
                if result["bit_equal"]:
                    shutil.rmtree(folder)

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(work, range(jobs)))
    moments: Counter[str] = Counter()
    for one in results.values():
        moments.update(one.get("moments", {}))
    return {
        "seed": seed, "first": first, "kills": sum(one["kills"] for one in results.values()), "moments": dict(moments),
        "runs": sum(one.get("runs", 0) for one in results.values()), "seconds": round(time.monotonic() - began, 1),
        "wrong": sorted(name for name, one in results.items() if not one["bit_equal"]),
        "cases": dict(sorted(results.items(), key=lambda pair: int(pair[0].split()[0]))),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 4))
    parser.add_argument("--only", type=int)
    parser.add_argument("--no-result", action="store_true")
    options = parser.parse_args()
    if options.only is not None:
        folder = Path(tempfile.mkdtemp(prefix=f"kills-{options.seed}-{options.only}-"))
        one = case(options.seed, options.only)
        print(one.name, folder, flush=True)
        trial = run_case(one, write_data(folder / "data"), folder, say=partial(print, flush=True))
        print(trial.result())
        return int(bool(trial.problems))
    result = campaign(options.seed, options.num, first=options.first, minutes=options.minutes, jobs=options.jobs)
    print({key: value for key, value in result.items() if key != "cases"})
    if not options.no_result:
        from shared.record import write_result

        print(write_result("kills", result))
    return int(bool(result["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
