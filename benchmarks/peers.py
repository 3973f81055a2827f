"""Fixed time of an update: our Runner, Hugging Face's Trainer, mmengine's Runner, Lightning and a bare loop.

In: nothing. Out: a table, and ``results/peers_<date>.json``. Accepted if the median of (ours - bare loop over our
loader) is at most 1 ms, in time, and in CPU time of the training thread, which other work of the machine affects less.
With the hooks of a real run 0.9 ms is to reach; it has no effect on the exit status.

All sides train the same tiny unified model from the same weights on the same packed batches of real digits, which one
``DataLoader`` makes in a worker process (ours uses its own loader), with AdamW (fused), clipping at 1.0, a constant
learning rate, and a logged loss every 10 updates; at the end the weights of all are compared. Only the framework around
forward and backward differs. The bare loop does nothing else: no log file, no check for finite gradients, no ledger; it
runs with torch's ``DataLoader`` as the peers do, and a second time with our loader, which by itself saves some
milliseconds per batch. Ours has all default hooks; checkpoints are off on every side. ``ours_real_hooks`` has the hooks
of a real run: also a ``CheckpointHook``, whose save comes after all blocks, and an ``EMAHook``, which no peer has.

Each side runs in its own thread, one at a time, for a block of updates; the first updates of a block consume the
batches that the workers prepared meanwhile, and are not timed. In every round each side has one block, in an order that
is reversed from round to round; the differences to the bare loop are computed within a round, so that other work of
the machine affects all sides equally.

    pip install -e '.[bench]' -c constraints.txt
    python benchmarks/peers.py [--rounds 12] [--timed 30] [--sides ours trainer ...]

Loading, saving and indexing have scripts of their own: ``reading.py``, ``saving.py``, ``index.py``. A side whose
package is not installed is skipped, with a message. Exit status: 1 if the limit is significantly exceeded, otherwise 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from shared.record import REAL_HOOKS, RESULTS, interval, write_result
from torch import Tensor, nn
from torch.utils.data import DataLoader

from unigen_ds.core.batch import PackedBatch
from unigen_ds.data.batches.loader import collate
from unigen_ds.hooks.base import Hook, Run, UpdateResult
from unigen_ds.runner.loop.runner import Runner
from unigen_ds.runner.settings.tree import Settings, load_config
from unigen_ds.runner.start.build import build_data, build_model
from unigen_ds.runner.start.parts import build_parts

LIMIT_MS, REAL_LIMIT_MS, LR, MAX_NORM, LOG_INTERVAL = 1.0, 0.9, 1e-3, 1.0, 10
OPTIMIZER = {"betas": (0.9, 0.95), "weight_decay": 0.05, "fused": True}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
WARM_UP, LEAD = 20, 6


class Turns:
    """Runs one thread at a time, and records the seconds of each block."""

    def __init__(self, *, timed: int, total: int) -> None:
        self.timed, self.total = timed, total
        self.blocks: dict[str, list[float]] = {}
        self.cpu_blocks: dict[str, list[float]] = {}
        """CPU seconds of the side's own thread."""
        self._go: dict[str, threading.Semaphore] = {}
        self._ended = threading.Semaphore(0)
        self._updates: dict[str, int] = {}
        self._started: dict[str, tuple[float, float]] = {}
        self._error: BaseException | None = None

    def start(self, name: str, train: Callable[[Callable[[], None]], None]) -> None:
        """Start a side; it stops after its warm-up."""
        self.blocks[name], self.cpu_blocks[name], self._updates[name] = [], [], 0
        self._go[name] = threading.Semaphore(0)

        def body() -> None:
            try:
                train(functools.partial(self._count_update, name))
            except BaseException as error:
                self._error = error
            self._ended.release()

        threading.Thread(target=body, name=name, daemon=True).start()
        self._wait()

    def turn(self, name: str) -> None:
        """One block of a side."""
        self._go[name].release()
        self._wait()

    def _wait(self) -> None:
        self._ended.acquire()
        if self._error is not None:
            raise self._error

    def _count_update(self, name: str) -> None:
        """Called by a side after each of its updates."""
        self._updates[name] += 1
        updates = self._updates[name] - WARM_UP
        position = updates % (LEAD + self.timed)
        if updates > 0 and position == LEAD:
            self._started[name] = time.perf_counter(), time.thread_time()
        if updates >= 0 and position == 0:
            if updates:
                wall, cpu = self._started[name]
                self.blocks[name].append(time.perf_counter() - wall)
                self.cpu_blocks[name].append(time.thread_time() - cpu)
            if self._updates[name] < self.total:
                self._ended.release()
                self._go[name].acquire()


@dataclasses.dataclass(frozen=True)
class Task:
    """The training of every side."""

    folder: Path
    total: int

    def config(self, name: str, **hooks: Any) -> Any:
        """``hooks``: those of a real run, beside the default ones."""
        llm = {f"model.llm.{key}": value for key, value in {**SIZES, "num_key_value_heads": 4, "dropout": 0.0}.items()}
        return load_config(
            "unified_digits",
            {
                **llm,
                "work_dir": str(self.folder / name),
                "train_dataloader.dataset.root": str(self.folder / "digits"),
                "train_dataloader.batch_size": 4,
                "train_dataloader.num_workers": 1,
                "optim_wrapper.optimizer": {"type": "AdamW", "lr": LR, **OPTIMIZER},
                "optim_wrapper.clip_grad.max_norm": MAX_NORM,
                "param_scheduler": [],
                "train_cfg": {"max_updates": self.total},
                "default_hooks.checkpoint": None,
                "default_hooks.logger.interval": LOG_INTERVAL,
                "custom_hooks": [],
                **hooks,
            },
        )

    def model(self) -> nn.Module:
        settings = Settings.from_config(self.config("other"))
        parts = build_data(settings, geometry=self.geometry, ruler=None)
        return Loss(build_model(settings, parts.processor, seed=settings.seed).train())

    @property
    def geometry(self) -> Any:
        from unigen_ds.core.progress import Geometry

        return Geometry(4)

    def batches(self) -> DataLoader[Any]:
        """The batches of our own loader, made by torch's ``DataLoader``."""
        data = build_data(Settings.from_config(self.config("other")), geometry=self.geometry, ruler=None)
        rows = [row for row, _ in islice(data.stream.rows(), self.total * 4)]
        return DataLoader(
            rows,  # type: ignore[arg-type]
            batch_size=4,
            num_workers=1,
            collate_fn=functools.partial(_collate, data=data),
        )


def _collate(rows: Any, *, data: Any) -> dict[str, PackedBatch]:
    return {"batch": collate(rows, data.stream.datasets, data.processor, seq_length=data.stream.seq_length)}


class Loss(nn.Module):
    """The sum of the means of all terms over their targets, as our loop computes it for one micro-batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: PackedBatch) -> dict[str, Tensor]:
        counts, sums = batch.target_counts(), self.model(batch).sums
        terms = [value * (1.0 / counts[name] if counts[name] else 0.0) for name, value in sums.items()]
        return {"loss": functools.reduce(torch.add, terms)}

    def optimizer(self) -> torch.optim.Optimizer:
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(parameters, lr=LR, **OPTIMIZER)  # type: ignore[arg-type]


Weights = Mapping[str, Tensor]


def bare(task: Task, on_update: Callable[[], None]) -> Weights:
    return _bare(task, task.batches(), on_update)


def bare_own_loader(task: Task, on_update: Callable[[], None]) -> Weights:
    """The bare loop over our loader, which sends a batch in one block: ours differs from it by the Runner only."""
    loader = build_parts(task.config("bare_own_loader")).loader
    batches = ({"batch": micro_batch.batch} for micro_batches in loader for micro_batch in micro_batches)
    try:
        return _bare(task, islice(batches, task.total), on_update)
    finally:
        loader.close()


def _bare(task: Task, batches: Any, on_update: Callable[[], None]) -> Weights:
    model = task.model()
    optimizer = model.optimizer()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, inputs in enumerate(batches, start=1):
        loss = model(**inputs)["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if number % LOG_INTERVAL == 0:
            loss.item()
        on_update()
    return dict(model.model.named_parameters())


def ours(task: Task, on_update: Callable[[], None], **hooks: Any) -> Weights:
    class Last(Hook):
        priority = 10_000  # type: ignore[assignment]

        def after_update(self, run: Run, result: UpdateResult) -> None:
            on_update()

    parts = build_parts(task.config("real" if hooks else "ours", **hooks))
    runner = Runner(dataclasses.replace(parts, hooks=[*parts.hooks, Last()]))
    weights: dict[str, Tensor] = {}

    class Keep(Hook):
        def after_train(self, run: Run) -> None:
            weights.update((name, p.detach().clone()) for name, p in run.backend.model.named_parameters())

    runner.hooks = [*runner.hooks, Keep()]
    runner.train()
    return weights


def ours_real_hooks(task: Task, on_update: Callable[[], None]) -> Weights:
    return ours(task, on_update, **REAL_HOOKS)


def trainer(task: Task, on_update: Callable[[], None]) -> Weights:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Callback(TrainerCallback):
        def on_step_end(self, *arguments: Any, **more: Any) -> None:
            on_update()

    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(task.batches())

    model = task.model()
    optimizer = model.optimizer()
    arguments = TrainingArguments(
        output_dir=str(task.folder / "trainer"), max_steps=task.total, logging_steps=LOG_INTERVAL, report_to=[],
        save_strategy="no", max_grad_norm=MAX_NORM, disable_tqdm=True, use_cpu=True, remove_unused_columns=False,
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    own = Own(model, arguments, train_dataset=[0] * (4 * task.total), optimizers=(optimizer, scheduler),
              callbacks=[Callback()])  # fmt: skip
    own.train()
    return dict(model.model.named_parameters())


def mmengine(task: Task, on_update: Callable[[], None]) -> Weights:
    from mmengine.hooks import Hook as TheirHook
    from mmengine.model import BaseModel
    from mmengine.optim import OptimWrapper
    from mmengine.runner import Runner as TheirRunner

    class Model(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.inner = task.model()

        def forward(self, batch: PackedBatch, mode: str = "loss") -> dict[str, Tensor]:
            return self.inner(batch)

    class Last(TheirHook):
        priority = "LOWEST"

        def after_train_iter(self, *arguments: Any, **more: Any) -> None:
            on_update()

    model = Model()
    runner = TheirRunner(
        model,
        work_dir=str(task.folder / "mmengine"),
        train_dataloader=task.batches(),
        train_cfg={"by_epoch": False, "max_iters": task.total},
        optim_wrapper=OptimWrapper(model.inner.optimizer(), clip_grad={"max_norm": MAX_NORM}),
        default_hooks={"logger": {"type": "LoggerHook", "interval": LOG_INTERVAL}, "checkpoint": None},
        custom_hooks=[Last()],
        log_level="WARNING",
    )
    runner.train()
    return dict(model.inner.model.named_parameters())


def lightning(task: Task, on_update: Callable[[], None]) -> Weights:
    import lightning as pl
    from lightning.pytorch.loggers import CSVLogger

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = task.model()

        def training_step(self, inputs: dict[str, PackedBatch], index: int) -> Tensor:
            loss = self.inner(**inputs)["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return self.inner.optimizer()

    class Last(pl.Callback):
        def on_train_batch_end(self, *arguments: Any, **more: Any) -> None:
            on_update()

    module = Module()
    own = pl.Trainer(
        max_steps=task.total, max_epochs=-1, accelerator="cpu", devices=1, gradient_clip_val=MAX_NORM,
        log_every_n_steps=LOG_INTERVAL, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, logger=CSVLogger(str(task.folder / "lightning")), callbacks=[Last()],
    )  # fmt: skip
    own.fit(module, task.batches())
    return dict(module.inner.model.named_parameters())


SIDES: dict[str, Callable[[Task, Callable[[], None]], Weights]] = {
    "bare": bare, "bare_own_loader": bare_own_loader, "ours": ours, "ours_real_hooks": ours_real_hooks,
    "trainer": trainer, "mmengine": mmengine, "lightning": lightning,
}  # fmt: skip


def order(names: Sequence[str], rounds: int) -> Iterator[Sequence[str]]:
    """The order is reversed in each round and rotated: no side always runs after the same other one."""
    for number in range(rounds):
        k = number // 2 % len(names)
        turn = [*names[k:], *names[:k]]
        yield turn if number % 2 == 0 else turn[::-1]


def available(names: Sequence[str]) -> list[str]:
    """The sides whose packages are installed; a message names the others."""
    import importlib.util

    packages = {"trainer": ("accelerate", "transformers"), "mmengine": ("mmengine",), "lightning": ("lightning",)}
    sides = []
    for name in names:
        missing = [package for package in packages.get(name, ()) if importlib.util.find_spec(package) is None]
        if missing:
            print(f"{name} is skipped: {', '.join(missing)} is not installed (extra 'bench')")
        else:
            sides.append(name)
    return sides


def measure(names: Sequence[str], *, rounds: int, timed: int) -> dict[str, Any]:
    """Milliseconds of an update by side, and the differences to the bare loop within each round."""
    total = WARM_UP + rounds * (LEAD + timed)
    turns, weights = Turns(timed=timed, total=total), dict[str, Weights]()
    with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as folder:
        task = Task(Path(folder), total)

        def side(name: str, on_update: Callable[[], None]) -> None:
            weights[name] = {key: p.detach().clone() for key, p in SIDES[name](task, on_update).items()}

        for name in names:
            turns.start(name, functools.partial(side, name))
        for turn in order(names, rounds):
            for name in turn:
                turns.turn(name)
    blocks = {name: [1e3 * seconds / timed for seconds in turns.blocks[name]] for name in names}
    cpu = {name: [1e3 * seconds / timed for seconds in turns.cpu_blocks[name]] for name in names}
    result: dict[str, Any] = {"ms": {name: interval(values) for name, values in blocks.items()}, "blocks_ms": blocks,
                              "cpu_ms": {name: interval(values) for name, values in cpu.items()}}  # fmt: skip
    result["added_ms"] = {
        name: interval([a - b for a, b in zip(values, blocks["bare"], strict=True)])
        for name, values in blocks.items() if name != "bare"
    }  # fmt: skip
    for label, of in (("ms", blocks), ("cpu_ms", cpu)):
        more = {
            name: interval([a - b for a, b in zip(of[name], of["bare_own_loader"], strict=True)])
            for name in ("ours", "ours_real_hooks") if {name, "bare_own_loader"} <= set(of)
        }  # fmt: skip
        if "ours" in more:
            result[f"runner_{label}"] = more["ours"]
        if "ours_real_hooks" in more:
            result[f"real_hooks_{label}"] = {"ours": more["ours_real_hooks"]}
    result["largest_weight_difference"] = {
        name: max(float((w - weights["bare"][key]).abs().max()) for key, w in others.items())
        for name, others in weights.items() if name != "bare"
    }  # fmt: skip
    return result


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=12)
    p.add_argument("--timed", type=int, default=30, help="timed updates of a block")
    p.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    p.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    options = p.parse_args()
    torch.set_num_threads(1)
    names = available(list(dict.fromkeys(["bare", *options.sides])))
    load_before = os.getloadavg()
    result = measure(names, rounds=options.rounds, timed=options.timed)
    print(f"{'':16}{'an update':>19}{'more than the bare loop (95 %)':>36}{'weights differ by':>20}")
    for name, each in result["ms"].items():
        cost, apart = result["added_ms"].get(name), result["largest_weight_difference"].get(name)
        text = f"{cost['median']:+.2f} ms ({cost['low']:+.2f} to {cost['high']:+.2f})" if cost else "-"
        print(f"{name:16}{each['median']:>16.2f} ms{text:>36}{'-' if apart is None else f'{apart:.1e}':>20}")
    for label, of in (("ms", "time"), ("cpu_ms", "CPU time of its thread")):
        hooks = (
            ("default hooks", LIMIT_MS, result.get(f"runner_{label}")),
            ("hooks of a real run", REAL_LIMIT_MS, result.get(f"real_hooks_{label}", {}).get("ours")),
        )
        for name, limit, more in hooks:
            if more:
                print(f"The Runner alone, {name} (ours - bare loop over our loader), {of}: {more['median']:+.2f} ms "
                      f"({more['low']:+.2f} to {more['high']:+.2f}); limit {limit} ms")  # fmt: skip
    record = {"limit_ms": LIMIT_MS, "real_limit_ms": REAL_LIMIT_MS, "rounds": options.rounds, "timed": options.timed,
              **result, "load_before": load_before, "load_after": os.getloadavg()}  # fmt: skip
    print(f"Written: {os.path.relpath(write_result('peers', record, folder=options.out))}")
    sys.stdout.flush()
    os._exit(int(result.get("runner_ms", {"low": 0.0})["low"] > LIMIT_MS))  # daemon threads of the sides are done


if __name__ == "__main__":
    main()
