"""Overhead of the runner: our loop compared with a hand-written one that makes the same updates.

In: a shipped config. Out: a table, and ``results/overhead_<backend>_<date>.json``. Accepted if the median ratio of the
times of an update is at most 1.03.

Both loops run in one process, in turns: a block of ours, two of the other, two of ours, and so on (A B B A), so that
other work of the machine affects both equally. Block k of either side trains on the same batches; pair k has one ratio.
The hand-written loop is the minimum for this training: a plain ``DataLoader`` over collated batches of sequences
planned in advance, with the same number of workers; forward, backward, ``clip_grad_norm_``, a torch optimizer, learning
rates from a list. It does not log, check or count anything. Ours is the whole ``Runner`` with its default hooks: timer,
non-finite guard, ledger, skipped samples, signals, a log line every 10 iterations. EMA and checkpoints are off in both.
At the end the weights of both are compared: equal bits show that both did the same work, dropout included.

With ``--processes 2`` every rank does all this, over gloo. The hand-written loop has its rank's rows of each global
batch, sums the targets over the ranks, and scales the loss for the engine's mean over them, as it must for the same
loss. Ours has the hooks of a real run: ``EMAHook``, and a ``CheckpointHook`` whose save comes after all blocks. A time
is that of the slower rank. DeepSpeed has the same options on both sides. The limit of ZeRO-2 is 1.05.

On a shared machine, use ``--threads 1`` (two threads that wait for each other multiply the noise) and also read the
ratio of this process's CPU times.

    python benchmarks/overhead.py [--config unified_digits] [--backend single] [--workers 2 0] [--threads N]
    python benchmarks/overhead.py --backend fsdp --processes 2

Another engine needs one subclass of ``HandWritten`` and one line in ``ENGINES``. Exit status: 1 if the overhead is
significantly above the limit (the whole confidence interval), otherwise 0.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from shared.processes import finish, launch
from shared.record import REAL_HOOKS, RESULTS, ROOT, interval, write_result
from shared.timing import Block, Plan, RandomState, Stopwatch

from unigen_ds.core.batch import PackedBatch
from unigen_ds.core.progress import Progress
from unigen_ds.data.batches.loader import collate
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.hooks.log.timer import IterTimerHook
from unigen_ds.runner.loop.runner import Runner
from unigen_ds.runner.settings.tree import Settings, load_config
from unigen_ds.runner.start.build import build_data, build_groups, build_model, build_optimizer_config
from unigen_ds.runner.start.parts import Parts, build_parts
from unigen_ds.system import dist

LIMIT, LIMITS = 1.03, {("zero2", 2): 1.05}
"""The second: by engine and number of processes, where it is another one."""
LOG_INTERVAL = 10


class HandWritten:
    """A typical loop for one config, of each rank. The model, the data and all values are those of the config."""

    fused: bool | None = True
    """The kernel of AdamW that ours has under the engine."""

    def __init__(self, config: Any, parts: Parts, plan: Plan) -> None:
        wrapper = config["optim_wrapper"]
        if wrapper.get("precision", "fp32") != "fp32":
            raise SystemExit(f"error: the hand-written loop trains in fp32, not {wrapper['precision']}")
        self.device, self.world = parts.backend.device, dist.world_size()
        self.max_norm: float = wrapper["clip_grad"]["max_norm"]
        self.accumulate: int = parts.geometry.accumulative_counts
        self.loss_weights = parts.settings.term_weights
        size = parts.geometry.global_batch_size
        self.rates = [
            [group["lr"] for group in parts.schedules.at(Progress(sequences=update * size))]
            for update in range(plan.total)
        ]
        self.plan, self.updates, self.waited = plan, 0, 0.0
        settings = Settings.from_config(config)
        self.batches = self._load(settings, parts)
        self.prepare(settings, parts)

    def _load(self, settings: Settings, parts: Parts) -> Iterator[PackedBatch]:
        loader = settings.train_dataloader
        data = build_data(settings, geometry=parts.geometry, ruler=parts.start.ruler)
        number = self.plan.total * parts.geometry.global_batch_size
        rows = [row for row, _ in islice(data.stream.rows(), number)]
        datasets, processor, seq_length = data.stream.datasets, data.processor, data.stream.seq_length
        return iter(
            DataLoader(
                rows[dist.rank() :: dist.world_size()],  # type: ignore[arg-type]
                batch_size=loader.batch_size,
                num_workers=loader.num_workers,
                collate_fn=lambda some: collate(some, datasets, processor, seq_length=seq_length),
                pin_memory=torch.cuda.is_available(),
            )
        )

    def prepare(self, settings: Settings, parts: Parts) -> None:
        """Model and optimizer, with the same weights as ours."""
        self.model = build_model(settings, parts.start.data.processor, seed=settings.seed)
        groups = build_groups(settings, self.model.named_parameters())
        self.model.to(self.device).train()
        self.shard()
        self.parameters = dict(self.model.named_parameters())
        self.trained = [self.parameters[name] for group in groups for name in group.parameters]
        self.optimizer: Any = torch.optim.AdamW(
            [
                {"params": [self.parameters[n] for n in g.parameters], "lr": g.lr, "weight_decay": g.weight_decay}
                for g in groups
            ],
            fused=self.fused,
            **build_optimizer_config(settings).arguments,
        )

    def shard(self) -> None:
        """One process: nothing to shard."""

    def update(self) -> None:
        """One optimizer step."""
        start = time.perf_counter()
        batches = [next(self.batches) for _ in range(self.accumulate)]
        self.waited += time.perf_counter() - start
        num_text = float(sum(batch.text_target_ids.numel() for batch in batches))
        num_image = float(sum(batch.image_target_index.numel() for batch in batches))
        if self.world > 1:
            num_text, num_image = dist.sum_floats([num_text, num_image])
        text_weight = self.world * self.loss_weights["text"] / num_text if num_text else 0.0
        image_weight = self.world * self.loss_weights["image"] / num_image if num_image else 0.0
        for group, lr in zip(self.optimizer.param_groups, self.rates[self.updates], strict=True):
            group["lr"] = lr
        for batch in batches:
            sums = self.model(batch.to(self.device)).sums
            self.backward(sums["text"] * text_weight + sums["image"] * image_weight, last=batch is batches[-1])
        self.step()
        self.updates += 1

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.trained, self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def weights(self) -> Mapping[str, Tensor]:
        """Trained parameters by name, in this process."""
        return {name: p.detach() for name, p in self.parameters.items() if p.requires_grad}

    def turn(self) -> Block:
        """One block: the untimed first updates, then the timed ones."""
        for _ in range(self.plan.lead):
            self.update()
        self.waited, watch = 0.0, Stopwatch()
        for _ in range(self.plan.timed):
            self.update()
        return watch.block(self.waited)


class HandWrittenFSDP(HandWritten):
    """The same with ``fully_shard`` of every unit, as in PyTorch's tutorial."""

    def shard(self) -> None:
        from torch.distributed.fsdp import fully_shard

        for unit in self.model.shard_units():  # type: ignore[operator]
            fully_shard(unit)
        fully_shard(self.model)

    def weights(self) -> Mapping[str, Tensor]:
        return {name: p.full_tensor() for name, p in super().weights().items()}  # type: ignore[attr-defined]


class HandWrittenZeRO(HandWritten):
    """The same with ``deepspeed.initialize``; the engine clips and steps."""

    fused = None

    def prepare(self, settings: Settings, parts: Parts) -> None:
        import deepspeed

        super().prepare(settings, parts)
        preset = json.loads((ROOT / "ds_configs" / "zero2.json").read_text())
        self.engine, *_ = deepspeed.initialize(
            model=self.model,
            optimizer=self.optimizer,
            config={
                "train_micro_batch_size_per_gpu": parts.geometry.batch_size,
                "gradient_accumulation_steps": self.accumulate,
                "gradient_clipping": self.max_norm,
                "zero_allow_untested_optimizer": True,
                "steps_per_print": 10**12,
                "zero_optimization": preset["zero_optimization"],
            },
            dist_init_required=False,
        )
        self.model, self.optimizer = self.engine, self.engine.optimizer

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.engine.backward(loss, scale_wrt_gas=False)
        if not last:
            self.engine.step()

    def step(self) -> None:
        self.engine.step()


ENGINES: dict[str, tuple[dict[str, Any], type[HandWritten]]] = {
    "single": ({"type": "single"}, HandWritten),
    "fsdp": ({"type": "fsdp", "sharding_strategy": "FULL_SHARD"}, HandWrittenFSDP),
    "zero2": ({"type": "deepspeed", "config": "zero2"}, HandWrittenZeRO),
}
"""``--backend`` -> the config's ``backend``, and the loop written by hand for that engine."""


class Pacer(Hook):
    """Runs last in our loop: measures our blocks, and runs the hand-written loop between them."""

    priority = 10_000  # type: ignore[assignment]

    def __init__(self, other: HandWritten, plan: Plan) -> None:
        self.other, self.plan = other, plan
        self.ours: list[Block] = []
        self.theirs: list[Block] = []
        self.same_weights = False
        self._watch: Stopwatch | None = None
        self._their_random: RandomState | None = None

    def before_train(self, run: Run) -> None:
        self._their_random = RandomState()  # both sides start with the generators that the runner has seeded

    def after_update(self, run: Run, result: UpdateResult) -> None:
        updates, plan = run.progress.updates - self.plan.warm_up, self.plan
        if updates < 0:
            return
        if updates == 0:
            self._run_other(turns=0)
        elif updates % plan.block == plan.lead:
            self._watch = Stopwatch()
        elif updates % plan.block == 0:
            timer = next((hook for hook in run.hooks if isinstance(hook, IterTimerHook)), None)
            assert self._watch is not None and timer is not None
            self.ours.append(self._watch.block(timer.summary()["time/data"] * plan.timed))
            # O0 P0 | P1 O1 | O2 P2 | ...: after every other block of ours, two of theirs
            time.sleep(plan.settle_s) if len(self.ours) % 2 == 0 else self._run_other(turns=2)

    def after_train(self, run: Run) -> None:
        theirs = self.other.weights()
        self.same_weights = all(
            torch.equal(s.data, theirs[s.name].view(-1)[s.flat_start : s.flat_stop])
            for s in run.backend.master_shards()
        )

    def _run_other(self, *, turns: int) -> None:
        """Run the other side's turns, with its own generators; ``turns=0`` is its warm-up."""
        mine = RandomState()
        assert self._their_random is not None
        self._their_random.restore()
        if not turns:
            for _ in range(self.plan.warm_up):
                self.other.update()
        for _ in range(turns):
            time.sleep(self.plan.settle_s)  # meanwhile the workers of the side that just ran fill their queues
            self.theirs.append(self.other.turn())
        self._their_random = RandomState()
        mine.restore()
        time.sleep(self.plan.settle_s)


def measure(task: Mapping[str, Any]) -> dict[str, Any]:
    """The blocks of both sides, of this rank."""
    backend, hand_written = ENGINES[task["backend"]]
    plan, folder = Plan(task["pairs"], task["timed"]), Path(task["folder"])
    if task["threads"]:
        torch.set_num_threads(task["threads"])
    if task["processes"] > 1:
        dist.ensure_initialized()
    hooks = REAL_HOOKS if task["processes"] > 1 else {"default_hooks.checkpoint": None, "custom_hooks": []}
    config = load_config(
        task["config"],
        {
            "work_dir": str(folder / "run"),
            "train_dataloader.dataset.root": str(folder / "digits"),
            "train_dataloader.num_workers": task["num_workers"],
            "train_cfg": {"max_updates": plan.total},
            "backend": backend,
            "default_hooks.logger.interval": LOG_INTERVAL,
            "default_hooks.timer.window": plan.timed,  # so that its averages are those of a block
            **hooks,
        },
    )
    with (folder / f"log{dist.rank()}").open("w") as log, contextlib.redirect_stderr(log):
        parts = build_parts(config)
        pacer = Pacer(hand_written(config, parts, plan), plan)
        runner = Runner(dataclasses.replace(parts, hooks=[*parts.hooks, pacer]))
        runner.train()
    assert len(pacer.ours) == len(pacer.theirs) == plan.pairs and runner.progress.updates == pacer.other.updates
    sides = {"ours": pacer.ours, "theirs": pacer.theirs}
    blocks = {name: [dataclasses.asdict(block) for block in some] for name, some in sides.items()}
    return {"same_weights": pacer.same_weights, **blocks}


def compare(arguments: argparse.Namespace, *, num_workers: int) -> dict[str, Any]:
    """Train both sides with ``num_workers`` and return the measurements: of a block the slower rank's."""
    load_before, processes = os.getloadavg(), arguments.processes
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        names = ("config", "backend", "pairs", "timed", "threads", "processes")
        task = {name: getattr(arguments, name) for name in names} | {"num_workers": num_workers, "folder": folder}
        name = f"{arguments.backend} on {processes} processes"
        ranks = launch(__file__, task, world=processes, name=name) if processes > 1 else [measure(task)]
    blocks = {
        side: [max((Block(**block) for block in turn), key=lambda block: block.wall)
               for turn in zip(*(rank[side] for rank in ranks), strict=True)]
        for side in ("ours", "theirs")
    }  # fmt: skip
    # rows of a summary that are of one process name num_workers
    kind = {"num_workers": num_workers} if processes == 1 else {"processes": processes, "loader_workers": num_workers}
    return {
        **kind,
        "same_weights": all(rank["same_weights"] for rank in ranks),
        **summary(blocks["ours"], blocks["theirs"], updates=arguments.timed),
        "load_before": load_before,
        "load_after": os.getloadavg(),
        **{side: [dataclasses.asdict(block) for block in some] for side, some in blocks.items()},
    }


def summary(ours: Sequence[Block], theirs: Sequence[Block], *, updates: int) -> dict[str, Any]:
    """Medians over the pairs; times of an update in milliseconds."""
    numbers: dict[str, Any] = {
        "ratio": interval([a.wall / b.wall for a, b in zip(ours, theirs, strict=True)]),
        "cpu_ratio": interval([a.cpu / b.cpu for a, b in zip(ours, theirs, strict=True)]),
    }
    for name, blocks in (("ours", ours), ("theirs", theirs)):
        numbers[f"{name}_ms"] = 1e3 * float(np.median([block.wall for block in blocks])) / updates
        numbers[f"{name}_data_share"] = float(np.median([block.data / block.wall for block in blocks]))
    return numbers


def verdict(ratio: Mapping[str, float], limit: float) -> str:
    if ratio["median"] <= limit:
        return "accepted" if ratio["high"] <= limit else "accepted, not significant"
    return "too slow" if ratio["low"] > limit else "too slow, not significant"


def show(results: Mapping[str, Mapping[str, Any]], limit: float) -> None:
    """The table, with a column for each number of workers."""

    def ratio(r: Mapping[str, float]) -> str:
        return f"{r['median']:.3f} ({r['low']:.3f} - {r['high']:.3f})"

    rows = {
        "ratio of times (95 %)": [ratio(r["ratio"]) for r in results.values()],
        "ratio of CPU times (95 %)": [ratio(r["cpu_ratio"]) for r in results.values()],
        "an update, ours": [f"{r['ours_ms']:.1f} ms" for r in results.values()],
        "an update, by hand": [f"{r['theirs_ms']:.1f} ms" for r in results.values()],
        "waits for data, ours": [f"{r['ours_data_share']:.1%}" for r in results.values()],
        "waits for data, by hand": [f"{r['theirs_data_share']:.1%}" for r in results.values()],
        "weights are bit-equal": [str(r["same_weights"]) for r in results.values()],
        "load before, after": [f"{r['load_before'][0]:.1f}, {r['load_after'][0]:.1f}" for r in results.values()],
        f"ratio <= {limit}": [verdict(r["ratio"], limit) for r in results.values()],
    }
    print(f"{'':26}" + "".join(f"{name} workers".rjust(28) for name in results))
    for name, values in rows.items():
        print(f"{name:26}" + "".join(value.rjust(28) for value in values))


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--config", default="unified_digits", help="its data set is the digits")
    p.add_argument("--backend", default="single", choices=sorted(ENGINES))
    p.add_argument("--processes", type=int, default=1)
    p.add_argument("--workers", type=int, nargs="+", help="loader workers; one comparison for each;"
                   " default: 2 and 0, with several processes 0")  # fmt: skip
    p.add_argument("--threads", type=int, help="torch threads of both loops; default: torch's own")
    p.add_argument("--pairs", type=int, default=20)
    p.add_argument("--timed", type=int, default=20, help="timed updates of a block; a multiple of the log interval")
    p.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    p.add_argument("--worker", help=argparse.SUPPRESS)
    return p.parse_args()


def main() -> int:
    arguments = parse()
    if arguments.worker:
        task = json.loads(arguments.worker)
        finish(task, measure(task))
    limit, workers = LIMITS.get((arguments.backend, arguments.processes), LIMIT), arguments.workers
    workers = workers or ([2, 0] if arguments.processes == 1 else [0])
    plan = Plan(arguments.pairs, arguments.timed)
    results = {str(number): compare(arguments, num_workers=number) for number in workers}
    show(results, limit)
    record = {
        "limit": limit,
        "config": arguments.config,
        "backend": arguments.backend,
        "plan": dataclasses.asdict(plan),
        "verdict": {name: verdict(r["ratio"], limit) for name, r in results.items()},
        "results": list(results.values()),
    }
    print(f"Written: {os.path.relpath(write_result(f'overhead_{arguments.backend}', record, folder=arguments.out))}")
    return int(any(r["ratio"]["low"] > limit or not r["same_weights"] for r in results.values()))


if __name__ == "__main__":
    sys.exit(main())
