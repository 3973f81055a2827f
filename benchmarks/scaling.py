"""Sharded training against the plain loop: time of an update, scaling efficiency, memory of a process.

In: nothing. Out: a table, and ``results/scaling_<date>.json``. Accepted if on one process the Runner
trains at least 0.95 times as many tokens a second as the plain loop, if FSDP on two needs at most 0.75 of the memory of
torch's ``DistributedDataParallel``, and if the losses of all sides agree. How fast an engine is over gloo, between
processes that share the memory of one machine, is shown and has no limit: it is the engine's, and the network's. What
the Runner adds to an engine's own loop is measured by ``overhead.py``.

The model is a decoder of 70 M parameters in fp32 with AdamW. Every process trains one sequence of 256 tokens an
update, so twice the processes train twice the tokens (weak scaling). ``plain``: forward, backward, clipping and step of
one process, without any framework; ``ddp``: the same loop around ``DistributedDataParallel``; all others are our
``Runner`` (``replicated``: FSDP's NO_SHARD). Efficiency is tokens a second over those of ``plain``, divided by the
number of processes; on two cores only the memory of four processes is of use. Memory is the growth of ``RssAnon`` from
before the model is built to its highest value, of the fullest process; imports do not count. DeepSpeed's buckets
have 4 million elements.

In every round each side is one launch, in an order that is reversed from round to round; a ratio is that of two sides
in one round, so that other work of the machine affects both.

    python benchmarks/scaling.py [--rounds 3] [--timed 4] [--sides plain@1 ddp@2 zero3@2 ...]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
os.environ.update(MALLOC_MMAP_THRESHOLD_="262144", MALLOC_ARENA_MAX="2")  # freed tensors are given back at once
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from shared.processes import Memory, finish, launch
from shared.record import RESULTS, ROOT, interval, write_result

from unigen_ds.core.progress import Geometry
from unigen_ds.data.batches.loader import collate
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.runner.loop.runner import Runner
from unigen_ds.runner.settings.tree import Settings, load_config
from unigen_ds.runner.start.build import build_data, build_groups, build_model
from unigen_ds.runner.start.parts import build_parts
from unigen_ds.system import dist

SPEED, MEMORY, AGREE = 0.95, 0.75, 1e-3
"""Limits: tokens a second of ``single@1`` against ``plain@1``; memory of ``fsdp@2`` against ``ddp@2``; relative
difference of the last losses."""
LENGTH, WORDS, WARM_UP = 256, 8192, 2
BUCKET = 4_000_000
"""Elements of DeepSpeed's buckets and of what ZeRO-3 keeps gathered; the presets have more than this model."""
SIDES = (
    "plain@1",
    "single@1",
    "ddp@2",
    "replicated@2",
    "zero1@2",
    "zero2@2",
    "zero3@2",
    "fsdp@2",
    "zero2@4",
    "zero3@4",
    "fsdp@4",
)
CONFIG = f"""
model = dict(type="DecoderLM", dropout=0.0, llm=dict(model_type="llama", vocab_size={WORDS + 16}, hidden_size=640,
             intermediate_size=1728, num_hidden_layers=12, num_attention_heads=10, num_key_value_heads=10,
             max_position_embeddings={LENGTH}))
tokenizer = dict(type="WordTokenizer", words=[f"w{{i}}" for i in range({WORDS})])
train_dataloader = dict(batch_size=1, seq_length={LENGTH}, packing=dict(type="BestFitPacking", window=64),
                        dataset=dict(type="UnifiedGenerationDataset", data_path="train.jsonl"))
optim_wrapper = dict(optimizer=dict(type="AdamW", lr=1e-3, weight_decay=0.1), clip_grad=dict(max_norm=1.0))
backend = dict(type="single")
default_hooks = dict(logger=dict(interval=1), checkpoint=None)
"""


class Watch(Hook):
    """The times of updates, and the loss of the last one."""

    priority = 10_000  # type: ignore[assignment]

    def __init__(self) -> None:
        self.times: list[float] = []
        self.loss = 0.0

    def after_update(self, run: Run, result: UpdateResult) -> None:
        self.add(float(result.local_sums["text"]), result.counts["text"])

    def add(self, local_sum: float, count: float) -> None:
        self.times.append(time.perf_counter())
        self.loss = dist.sum_floats([local_sum])[0] / count

    def result(self, timed: int) -> dict[str, float]:
        return {"seconds": (self.times[-1] - self.times[-1 - timed]) / timed, "loss": self.loss}


def config_of(kind: str, folder: Path, work_dir: str, *, updates: int) -> Any:
    backends: dict[str, Any] = {"fsdp": {"type": "fsdp", "sharding_strategy": "FULL_SHARD"}}
    backends |= {key: {"type": "fsdp", "sharding_strategy": "NO_SHARD"} for key in ("replicated", "ddp")}
    backends |= {
        f"zero{stage}": {"type": "deepspeed", "config": str(folder / f"zero{stage}.json")} for stage in (1, 2, 3)
    }
    overrides = {
        "work_dir": work_dir,
        "train_dataloader.dataset.data_path": str(folder / "train.jsonl"),
        "train_cfg": {"max_updates": updates},
        "backend": backends.get(kind, {"type": "single"}),
    }
    return load_config(folder / "config.py", overrides)


def ours(config: Any, watch: Watch) -> None:
    parts = build_parts(config)
    Runner(dataclasses.replace(parts, hooks=[*parts.hooks, watch])).train()


def plain(config: Any, watch: Watch) -> None:
    """What a user writes without a framework; with several processes around ``DistributedDataParallel``."""
    settings, world = Settings.from_config(config), dist.world_size()
    updates = int(settings.train_cfg.max_updates or 0)
    data = build_data(settings, geometry=Geometry(1, 1, world), ruler=None)
    model = build_model(settings, data.processor, seed=settings.seed).train()
    groups = build_groups(settings, model.named_parameters())
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [{"params": [parameters[n] for n in g.parameters], "lr": g.lr, "weight_decay": g.weight_decay} for g in groups],
        fused=True,
    )
    whole = torch.nn.parallel.DistributedDataParallel(model) if world > 1 else model
    stream = data.stream
    for row, _ in islice(stream.rows(), dist.rank(), world * updates, world):
        batch: Any = collate([row], stream.datasets, data.processor, seq_length=stream.seq_length)
        count = dist.sum_floats([float(batch.text_target_ids.numel())])[0]
        total = whole(batch).sums["text"]
        (total * world / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        watch.add(float(total.detach()), count)


def measure(task: Mapping[str, Any]) -> dict[str, Any]:
    """One process."""
    kind, timed = task["side"].partition("@")[0], task["timed"]
    if dist.env_world_size() > 1:
        dist.ensure_initialized()
    if kind.startswith("zero"):
        import deepspeed  # noqa: F401 - its memory does not count
    watch = Watch()
    train: Callable[[Any, Watch], None] = plain if kind in ("plain", "ddp") else ours
    with Memory() as memory:
        train(config_of(kind, Path(task["folder"]), task["work_dir"], updates=WARM_UP + timed), watch)
    return {**watch.result(timed), "peak": memory.highest - memory.before}


def write_data(folder: Path) -> None:
    draw = random.Random(0)
    lines = ("".join(f"w{draw.randrange(WORDS)} " for _ in range(draw.randint(100, 400))) for _ in range(400))
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": line.strip()}) + "\n" for line in lines))
    (folder / "config.py").write_text(CONFIG)
    for stage in (1, 2, 3):
        config = json.loads((ROOT / "ds_configs" / f"zero{stage}.json").read_text())
        zero = config["zero_optimization"]
        zero |= {key: BUCKET for key in zero if zero[key] > BUCKET}
        (folder / f"zero{stage}.json").write_text(json.dumps(config))


def run(sides: Sequence[str], *, rounds: int, timed: int) -> dict[str, Any]:
    load_before = os.getloadavg()
    measures: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        write_data(Path(folder))
        for number in range(rounds):
            for side in sides if number % 2 == 0 else reversed(sides):
                world = int(side.partition("@")[2])
                task = {"side": side, "folder": folder, "work_dir": f"{folder}/{side}-{number}", "timed": timed}
                ranks = launch(__file__, task, world=world, name=side)
                fullest, slowest = (max(rank[key] for rank in ranks) for key in ("peak", "seconds"))
                measures[side].append({"peak": fullest, "seconds": slowest, "loss": ranks[0]["loss"]})
                print(f"{side}: {slowest:.2f} s, {fullest / 2**20:.0f} MiB, loss {ranks[0]['loss']:.4f}", flush=True)
    return {
        "limits": {"speed": SPEED, "memory": MEMORY, "losses": AGREE},
        "tokens_per_process": LENGTH,
        "rows": {side: row_of(side, measures) for side in sides},
        "load_before": load_before,
        "load_after": os.getloadavg(),
    }


def row_of(side: str, measures: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Medians of a side over the rounds, and its ratios within each."""
    world, rounds = int(side.partition("@")[2]), measures[side]

    def against(peer: str, key: str, *, inverse: bool) -> dict[str, float] | None:
        pairs = zip(measures.get(peer, ()), rounds, strict=False)
        ratios = [(theirs[key] / mine[key]) if inverse else (mine[key] / theirs[key]) for theirs, mine in pairs]
        return interval(ratios) if ratios else None

    return {
        "processes": world,
        **{key: float(np.median([each[key] for each in rounds])) for key in ("seconds", "peak", "loss")},
        "efficiency": against("plain@1", "seconds", inverse=True),
        "speed_to_ddp": against("ddp@2", "seconds", inverse=True) if world == 2 else None,
        "memory_to_ddp": against("ddp@2", "peak", inverse=False),
        "rounds": rounds,
    }


def problems(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What exceeds a limit, with its whole confidence interval."""
    texts = []
    for side, row in rows.items():
        if side == "single@1" and row["efficiency"] and row["efficiency"]["high"] < SPEED:
            texts.append(f"{side}: {row['efficiency']['median']:.2f} times the tokens a second of plain@1")
        if side == "fsdp@2" and row["memory_to_ddp"] and row["memory_to_ddp"]["low"] > MEMORY:
            texts.append(f"{side}: {row['memory_to_ddp']['median']:.2f} times the memory of ddp@2")
        peers = [other["loss"] for other in rows.values() if other["processes"] == row["processes"]]
        if max(peers) - min(peers) > AGREE * min(peers):
            texts.append(f"{side}: the last losses of {row['processes']} processes are {min(peers)} to {max(peers)}")
    return texts


def show(rows: Mapping[str, Mapping[str, Any]]) -> None:
    heads = ("update", "tokens/s", "efficiency", "to ddp@2", "memory", "to ddp@2")
    print(f"{'':10}" + "".join(head.rjust(12) for head in heads))
    for side, row in rows.items():
        ratios = {key: "" if row[key] is None else f"{row[key]['median']:.2f}" for key in
                  ("efficiency", "speed_to_ddp", "memory_to_ddp")}  # fmt: skip
        speed = f"{row['processes'] * LENGTH / row['seconds']:.0f}"
        cells = (f"{row['seconds']:.2f} s", speed, ratios["efficiency"], ratios["speed_to_ddp"],
                 f"{row['peak'] / 2**20:.0f} MiB", ratios["memory_to_ddp"])  # fmt: skip
        print(f"{side:10}" + "".join(cell.rjust(12) for cell in cells))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timed", type=int, default=4, help="timed updates of a launch")
    parser.add_argument("--sides", nargs="+", default=list(SIDES), help="name@processes")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        task = json.loads(arguments.worker)
        torch.set_num_threads(1)
        finish(task, measure(task))
    record = run(arguments.sides, rounds=arguments.rounds, timed=arguments.timed)
    show(record["rows"])
    failures = problems(record["rows"])
    print("\n".join(failures) or "Accepted.")
    record = {**record, "accepted": not failures}
    print(f"Written: {os.path.relpath(write_result('scaling', record, folder=arguments.out))}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
