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

On a shared machine, use ``--threads 1`` (two threads that wait for each other multiply the noise) and also read the
ratio of this process's CPU times.

    python benchmarks/overhead.py [--config unified_digits] [--backend single] [--workers 2 0] [--threads N]

Another engine needs one subclass of ``HandWritten`` and one line in ``ENGINES``. Exit status: 1 if the overhead is
significantly above the limit (the whole confidence interval), otherwise 0.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
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

from shared.record import RESULTS, interval, write_result
from shared.timing import Block, Plan, RandomState, Stopwatch

from unigen_ds.core.batch import PackedBatch
from unigen_ds.core.progress import Progress
from unigen_ds.data.batches.loader import collate
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.hooks.log.timer import IterTimerHook
from unigen_ds.runner.loop.runner import Runner
from unigen_ds.runner.settings.tree import Settings, load_config
from unigen_ds.runner.start.build import build_data, build_groups, build_model
from unigen_ds.runner.start.parts import Parts, build_parts

LIMIT = 1.03
LOG_INTERVAL = 10


class HandWritten:
    """A typical loop for one config and one process. The model, the data and all values are those of the config."""

    def __init__(self, config: Any, parts: Parts, plan: Plan) -> None:
        wrapper = config["optim_wrapper"]
        if wrapper.get("precision", "fp32") != "fp32":
            raise SystemExit(f"error: the hand-written loop trains in fp32, not {wrapper['precision']}")
        self.device = parts.backend.device
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
                rows,  # type: ignore[arg-type]
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
        optimizer_settings = parts.plain_config["optim_wrapper"]["optimizer"]  # with the same kernel as ours
        arguments = {k: v for k, v in optimizer_settings.items() if k not in ("type", "lr")}
        self.optimizer: Any = torch.optim.AdamW(
            [
                {"params": [self.parameters[n] for n in g.parameters], "lr": g.lr, "weight_decay": g.weight_decay}
                for g in groups
            ],
            **arguments,
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
        text_weight = self.loss_weights["text"] / num_text if num_text else 0.0
        image_weight = self.loss_weights["image"] / num_image if num_image else 0.0
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

    def prepare(self, settings: Settings, parts: Parts) -> None:
        import deepspeed

        super().prepare(settings, parts)
        self.engine, *_ = deepspeed.initialize(
            model=self.model,
            optimizer=self.optimizer,
            config={
                "train_micro_batch_size_per_gpu": parts.geometry.batch_size,
                "gradient_accumulation_steps": self.accumulate,
                "gradient_clipping": self.max_norm,
                "zero_allow_untested_optimizer": True,
                "steps_per_print": 10**12,
                "zero_optimization": {"stage": 2},
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
        self.same_weights = all(torch.equal(s.data, theirs[s.name].view(-1)) for s in run.backend.master_shards())

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


def compare(arguments: argparse.Namespace, plan: Plan, *, num_workers: int) -> dict[str, Any]:
    """Train both sides with ``num_workers`` and return the measurements."""
    backend, hand_written = ENGINES[arguments.backend]
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder, (Path(folder) / "log").open("w") as log:
        config = load_config(
            arguments.config,
            {
                "work_dir": str(Path(folder) / "run"),
                "train_dataloader.dataset.root": str(Path(folder) / "digits"),
                "train_dataloader.num_workers": num_workers,
                "train_cfg": {"max_updates": plan.total},
                "backend": backend,
                "default_hooks.checkpoint": None,
                "default_hooks.logger.interval": LOG_INTERVAL,
                "default_hooks.timer.window": plan.timed,  # so that its averages are those of a block
                "custom_hooks": [],
            },
        )
        with contextlib.redirect_stderr(log):
            parts = build_parts(config)
            pacer = Pacer(hand_written(config, parts, plan), plan)
            runner = Runner(dataclasses.replace(parts, hooks=[*parts.hooks, pacer]))
            runner.train()
    assert len(pacer.ours) == len(pacer.theirs) == plan.pairs and runner.progress.updates == pacer.other.updates
    return {
        "num_workers": num_workers,
        "same_weights": pacer.same_weights,
        **summary(pacer.ours, pacer.theirs, updates=plan.timed),
        "load_before": load_before,
        "load_after": os.getloadavg(),
        "ours": [dataclasses.asdict(block) for block in pacer.ours],
        "theirs": [dataclasses.asdict(block) for block in pacer.theirs],
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


def verdict(ratio: Mapping[str, float]) -> str:
    if ratio["median"] <= LIMIT:
        return "accepted" if ratio["high"] <= LIMIT else "accepted, not significant"
    return "too slow" if ratio["low"] > LIMIT else "too slow, not significant"


def show(results: Sequence[Mapping[str, Any]]) -> None:
    """The table, with a column for each number of workers."""

    def ratio(r: Mapping[str, float]) -> str:
        return f"{r['median']:.3f} ({r['low']:.3f} - {r['high']:.3f})"

    rows = {
        "ratio of times (95 %)": [ratio(r["ratio"]) for r in results],
        "ratio of CPU times (95 %)": [ratio(r["cpu_ratio"]) for r in results],
        "an update, ours": [f"{r['ours_ms']:.1f} ms" for r in results],
        "an update, by hand": [f"{r['theirs_ms']:.1f} ms" for r in results],
        "waits for data, ours": [f"{r['ours_data_share']:.1%}" for r in results],
        "waits for data, by hand": [f"{r['theirs_data_share']:.1%}" for r in results],
        "weights are bit-equal": [str(r["same_weights"]) for r in results],
        "load before, after": [f"{r['load_before'][0]:.1f}, {r['load_after'][0]:.1f}" for r in results],
        f"ratio <= {LIMIT}": [verdict(r["ratio"]) for r in results],
    }
    print(f"{'':26}" + "".join(f"{r['num_workers']} workers".rjust(28) for r in results))
    for name, values in rows.items():
        print(f"{name:26}" + "".join(value.rjust(28) for value in values))


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--config", default="unified_digits", help="its data set is the digits")
    p.add_argument("--backend", default="single", choices=sorted(ENGINES))
    p.add_argument("--workers", type=int, nargs="+", default=[2, 0], help="loader workers; one comparison for each")
    p.add_argument("--threads", type=int, help="torch threads of both loops; default: torch's own")
    p.add_argument("--pairs", type=int, default=20)
    p.add_argument("--timed", type=int, default=20, help="timed updates of a block; a multiple of the log interval")
    p.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    return p.parse_args()


def main() -> int:
    arguments = parse()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    plan = Plan(arguments.pairs, arguments.timed)
    results = [compare(arguments, plan, num_workers=number) for number in arguments.workers]
    show(results)
    record = {
        "limit": LIMIT,
        "config": arguments.config,
        "backend": arguments.backend,
        "plan": dataclasses.asdict(plan),
        "verdict": {str(r["num_workers"]): verdict(r["ratio"]) for r in results},
        "results": results,
    }
    print(f"Written: {os.path.relpath(write_result(f'overhead_{arguments.backend}', record, folder=arguments.out))}")
    return int(any(r["ratio"]["low"] > LIMIT for r in results))


if __name__ == "__main__":
    sys.exit(main())
