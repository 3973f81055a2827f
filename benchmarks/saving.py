"""Time of a checkpoint: how long training waits for it, and how long it needs in all, blocking and asynchronous.

In: nothing. Out: a table, and ``results/saving_<date>.json``. 134 M parameters with moments and an average of the
weights, 16 bytes per parameter, under ``single``, ZeRO-2, ZeRO-3 and FSDP2 on two processes. All sides run in turns in
the same processes, so that other work of the machine affects them equally:

- ``plain``: the same bytes, one file for each process, one write and one fsync. A blocking save
  (``checkpoint/saver.py``: files with hashes, flush, manifest, rename) is accepted at 1.5 times that.
- ``copy``: the same bytes, each tensor copied into memory of its own, as PyTorch's own staging does (in one buffer, the
  distance of both modulo a page decides the speed). An asynchronous save is accepted if training waits for at most 1.1
  times that.
- ``added``: the time from the call until the checkpoint exists, less the time of the updates meanwhile, as fast as they
  are without a save. Accepted at 0.4 times a blocking save.
- ``dcp``: the same of ``torch.distributed.checkpoint.async_save``, where its state is tensors by name (single, FSDP2).

Without a limit: the speed of ``store.verify``.

    python benchmarks/saving.py [--millions 134] [--rounds 6] [--sides single@1 zero2@2 zero3@2 fsdp@2] [--folder DIR]

Exit status: 1 if a limit is exceeded, otherwise 0.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as td
import torch.distributed.checkpoint as dcp
from shared.processes import finish, launch
from shared.record import RESULTS, interval, write_result
from torch import nn

from unigen_ds.backends.base import Backend
from unigen_ds.checkpoint import saver, store
from unigen_ds.checkpoint.background import BackgroundWriter, _Pickler
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.core.progress import Geometry, Progress, Ruler
from unigen_ds.core.shards import EMA
from unigen_ds.hooks.evaluate.ema import ShardEMA
from unigen_ds.optim.optimizer import OptimizerConfig, ParamGroup
from unigen_ds.system import dist

LIMITS = {"blocking": 1.5, "wait": 1.1, "added": 0.4}
WIDTH, UPDATES = 1024, 3
"""Features of a layer, and updates whose mean is the time of one without a save."""


class Layers(nn.Module):
    """Square matrices."""

    def __init__(self, millions: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(max(1, millions * 10**6 // WIDTH**2)))

    def shard_units(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + 0.01 * layer(x)
        return x.square().mean()


def make_backend(engine: str, millions: int, geometry: Geometry) -> Backend:
    torch.manual_seed(0)
    backend: Any
    if engine == "single":
        from unigen_ds.backends.single import SingleBackend

        backend = SingleBackend()
    elif engine == "fsdp":
        from unigen_ds.backends.fsdp.fsdp import FSDPBackend

        backend = FSDPBackend()
    else:
        from unigen_ds.backends.deepspeed.deepspeed import DeepSpeedBackend

        backend = DeepSpeedBackend(config=engine)
    backend.check(geometry=geometry, optimizer_cfg=OptimizerConfig())
    model = Layers(millions)
    groups = [ParamGroup("default", 1e-6, 0.0, tuple(name for name, _ in model.named_parameters()))]
    backend.prepare(model, groups)
    return backend


class Bench:
    """One process of one engine. All methods are collective; times are those of the slowest process."""

    def __init__(self, engine: str, millions: int, folder: Path) -> None:
        self.geometry = Geometry(1, 1, dist.world_size())
        self.backend = make_backend(engine, millions, self.geometry)
        self.update()  # so that the moments exist
        self.average = ShardEMA(self.backend.master_shards(), momentum=0.1)
        self.folder, self.writer, self.number = folder, BackgroundWriter(), 0
        pickler = _Pickler(io.BytesIO())
        pickler.dump(self.backend.state_files())
        pickler.dump([shard.data for shard in self.average.shards])
        storages = [storage for _, storage in pickler.storages.values()]
        self.tensors = [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages]
        """All that is saved, as bytes."""
        self.size = sum(tensor.nbytes for tensor in self.tensors)
        self.copies = [torch.zeros_like(tensor) for tensor in self.tensors]

    def update(self) -> None:
        with self.backend.accumulate(last=True):
            self.backend.backward(self.backend.model(torch.randn(2, WIDTH)))
        self.backend.step()

    def save(self, background: BackgroundWriter | None = None) -> Path | None:
        manifest = Manifest(
            commit=0,
            parent=None,
            progress=Progress(),
            geometry=self.geometry,
            ruler=Ruler(self.geometry, sequences_per_epoch=1),
            topology=self.backend.topology(),
            schedule={},
            loader={},
            parameters=[],
            config={},
        )
        self.number += 1
        return saver.save(
            self.folder, f"iter_{self.number}.pth", backend=self.backend, manifest=manifest, hook_states={},
            hook_shards={EMA: self.average.shards}, config_text="", background=background,
        )  # fmt: skip

    def seconds(self, action: Callable[[], Any]) -> float:
        dist.barrier()
        start = time.perf_counter()
        action()
        return max(dist.gather_objects(time.perf_counter() - start))

    def plain(self) -> None:
        path = self.folder / f"plain{dist.rank()}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
        for tensor in self.tensors:
            view = memoryview(tensor.numpy())
            while view:
                view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
        os.close(descriptor)

    def copy(self) -> None:
        for copy, tensor in zip(self.copies, self.tensors, strict=True):
            copy.copy_(tensor)

    def asynchronous(self, begin: Callable[[], Any], has_ended: Callable[[], bool]) -> tuple[float, float, int]:
        """Seconds that training waits, all seconds until it has ended, and updates meanwhile."""
        waits = [self.seconds(begin)]
        start, updates = time.perf_counter() - waits[0], 0
        while True:
            self.update()
            updates += 1
            dist.barrier()  # one update may be longer than the other's
            now = time.perf_counter()
            is_done = has_ended()
            waits.append(time.perf_counter() - now)
            if is_done:
                return max(dist.gather_objects(sum(waits))), time.perf_counter() - start, updates

    def of_dcp(self) -> tuple[Callable[[], Any], Callable[[], bool]]:
        """Begin and end of torch's asynchronous save of the same tensors."""
        backend: Any = self.backend
        state = {f"{kind}|{name}": tensor for (kind, name), tensor in backend._optimizer_tensors().items()}
        state |= {f"master|{name}": master.detach() for name, master in backend._masters.items()}
        state |= {f"ema|{shard.name}|{dist.rank()}": shard.data for shard in self.average.shards}
        future: list[Any] = []
        group = td.new_group(backend="gloo")  # its thread must not mix with the collectives of the training

        def has_ended() -> bool:
            is_done = future[-1].done()
            return dist.sum_floats([float(is_done)])[0] == dist.world_size()

        def begin() -> None:
            future.append(dcp.async_save(state, checkpoint_id=str(self.folder / "dcp"), process_group=group))

        return begin, has_ended

    def clear(self) -> None:
        if dist.is_main():
            for path in self.folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()  # pending writes of the last turn must not be measured in the next one
        dist.barrier()

    def measure(self, rounds: int) -> dict[str, list[float]]:
        """Each turn comes after updates, as a save does in a training. What was written before it still counts:
        blocking saves alternate by up to 1.5 times. Of an even number of rounds, half have the other order.
        """
        times: dict[str, list[float]] = {}

        def keep(**values: float) -> None:
            for name, value in values.items():
                times.setdefault(name, []).append(value)

        def updates() -> float:
            return self.seconds(lambda: [self.update() for _ in range(UPDATES)]) / UPDATES

        def beside(prefix: str, begin: Callable[[], Any], has_ended: Callable[[], bool]) -> None:
            """The time of an update is that of some before and some after, as is that of a copy: a machine's speed
            changes.
            """
            wait, total, number = self.asynchronous(begin, has_ended)
            update = (before[-1] + updates()) / 2
            values = {"update": update, "wait": wait, "added": total - number * update, "until": total}
            keep(**{prefix + name: value for name, value in values.items()})

        def ours() -> None:
            earlier = self.seconds(self.copy)
            self.update()
            beside("", lambda: self.save(self.writer), lambda: self.writer.finish() is not None)
            keep(copy=(earlier + self.seconds(self.copy)) / 2)

        turns = [
            lambda: keep(plain=self.seconds(self.plain)),
            lambda: keep(blocking=self.seconds(self.save)),
            ours,
        ]
        turns += [lambda: beside("dcp_", *self.of_dcp())] * hasattr(self.backend, "_masters")
        before: list[float] = []
        for number in range(rounds + 1):  # the first is a rehearsal: the writer starts, memory is touched
            for turn in turns if number % 2 else reversed(turns):
                self.clear()
                before.append(updates())
                turn()
        return {name: values[1:] for name, values in times.items()}

    def verify(self) -> float:
        """GiB of a checkpoint that are hashed in a second; on rank 0."""
        path = self.save()
        assert path is not None
        if not dist.is_main():
            return 0.0
        start = time.perf_counter()
        problem = store.verify(path, Manifest.read(path), hashes=True)
        assert problem is None, problem
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        return size / (time.perf_counter() - start) / 2**30


def work(task: Mapping[str, Any]) -> dict[str, Any]:
    """One process."""
    dist.ensure_initialized()
    bench = Bench(task["engine"], task["millions"], Path(task["folder"]))
    result = {"times": bench.measure(task["rounds"]), "bytes": bench.size, "verify_gib_per_s": bench.verify()}
    bench.writer.close()
    dist.barrier()
    return result


def row_of(side: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    times = ranks[0]["times"]

    def ratio(name: str, peer: str) -> dict[str, float]:
        return interval([a / b for a, b in zip(times[name], times[peer], strict=True)])

    ratios = {
        "blocking": ratio("blocking", "plain"),
        "wait": ratio("wait", "copy"),
        "added": ratio("added", "blocking"),
    }
    return {
        "side": side,
        "bytes": sum(rank["bytes"] for rank in ranks),
        "seconds": {name: statistics.median(values) for name, values in times.items()},
        "times": times,
        "ratios": ratios,
        "verify_gib_per_s": ranks[0]["verify_gib_per_s"],
        "accepted": all(ratios[name]["median"] <= limit for name, limit in LIMITS.items()),
    }


def line(row: dict[str, Any]) -> str:
    ratios = "  ".join(
        f"{name} {one['median']:.2f} [{one['low']:.2f}, {one['high']:.2f}]" for name, one in row["ratios"].items()
    )
    seconds = "  ".join(f"{name} {value:.2f}" for name, value in row["seconds"].items())
    return f"{row['side']:9} {row['bytes'] / 2**20:6.0f} MiB  ratios: {ratios}\n{'':21}seconds: {seconds}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=134, help="parameters")
    parser.add_argument("--rounds", type=int, default=6, help="an even number: turns alternate their order")
    parser.add_argument("--sides", nargs="+", default=["single@1", "zero2@2", "zero3@2", "fsdp@2"])
    parser.add_argument("--folder", type=Path, help="output folder; default: a temporary folder")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        task = json.loads(arguments.worker)
        finish(task, work(task))
    rows = []
    for side in arguments.sides:
        engine, _, world = side.partition("@")
        with tempfile.TemporaryDirectory(prefix="saving-", dir=arguments.folder) as folder:
            task = {"engine": engine, "millions": arguments.millions, "rounds": arguments.rounds, "folder": folder}
            rows.append(row_of(side, launch(__file__, task, world=int(world), name=side)))
        print(line(rows[-1]), flush=True)
    accepted = all(row["accepted"] for row in rows)
    record = {"limits": LIMITS, "accepted": accepted, "runs": rows}
    print("result:", write_result("saving", record, folder=arguments.results))
    sys.exit(0 if accepted else 1)


if __name__ == "__main__":
    main()
