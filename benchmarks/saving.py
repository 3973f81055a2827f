"""Time of a checkpoint: a whole save, and its verification, compared with the disk itself.

In: nothing. Out: a table, and ``results/saving_<date>.json``. Accepted if a save (``checkpoint/saver.py``: collect the
files, write with hashes, flush, manifest, rename) needs at most 1.5 times as long as writing the same bytes into the
same number of plain files, one after the other, each with one fsync; both run in the same process, in turns, so that
other work of the machine affects both equally. Without a limit: the time to hash every file (``store.verify``), and to
read them.

The engines are ``single`` (safetensors), ``fsdp:FULL_SHARD`` (DCP) and ``deepspeed:zero2`` (its own files), one process
each, with moments and an average of the weights: 16 bytes per parameter.

    python benchmarks/saving.py [--millions 48] [--rounds 7] [--engines single fsdp deepspeed] [--folder DIR]

Exit status: 1 if the limit is exceeded, otherwise 0.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from shared.record import RESULTS, interval, write_result
from torch import nn

from unigen_ds.backends.base import Backend
from unigen_ds.checkpoint import saver, store
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.core.progress import Geometry, Progress, Ruler
from unigen_ds.core.shards import EMA
from unigen_ds.optim.averaging import ShardEMA
from unigen_ds.optim.optimizer import OptimizerConfig, ParamGroup
from unigen_ds.system import dist

LIMIT, WIDTH = 1.5, 1024
GEOMETRY = Geometry(1)


class Layers(nn.Module):
    """Square matrices."""

    def __init__(self, millions: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(max(1, millions * 10**6 // WIDTH**2)))

    def shard_units(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def make_backend(engine: str, millions: int) -> Backend:
    """After one update, so that the moments exist."""
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

        backend = DeepSpeedBackend(config="zero2")
    backend.check(geometry=GEOMETRY, optimizer_cfg=OptimizerConfig())
    model = Layers(millions)
    groups = [ParamGroup("default", 1e-3, 0.0, tuple(name for name, _ in model.named_parameters()))]
    backend.prepare(model, groups, OptimizerConfig(), geometry=GEOMETRY)
    with backend.accumulate(last=True):
        backend.backward(backend.model(torch.randn(2, WIDTH)))
    backend.step()
    return backend


def save(work_dir: Path, backend: Backend, average: ShardEMA) -> Path:
    manifest = Manifest(
        commit=0,
        parent=None,
        progress=Progress(),
        geometry=GEOMETRY,
        ruler=Ruler(GEOMETRY, sequences_per_epoch=1),
        topology=backend.topology(),
        schedule={},
        loader={},
        parameters=[],
        config={},
    )
    states: dict[str, Any] = {}
    shards = {EMA: average.shards}
    return saver.save(
        work_dir, "a.pth", backend=backend, manifest=manifest, hook_states=states, hook_shards=shards, config_text=""
    )


def write_plainly(folder: Path, contents: dict[str, bytes]) -> None:
    """Write the same bytes, as fast as one thread can."""
    folder.mkdir()
    for name, content in contents.items():
        descriptor = os.open(folder / name.replace("/", "_"), os.O_WRONLY | os.O_CREAT)
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
        os.close(descriptor)


def seconds(action: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def measure(engine: str, millions: int, rounds: int, folder: Path) -> dict[str, Any]:
    backend = make_backend(engine, millions)
    average = ShardEMA(backend.master_shards(), momentum=0.1)
    work_dir, plain = folder / engine, folder / "plain"
    work_dir.mkdir()
    path = save(work_dir, backend, average)
    contents = {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()}
    ours, disk, verified, read = [], [], [], []
    for round_number in range(rounds):
        shutil.rmtree(path, ignore_errors=True)
        shutil.rmtree(plain, ignore_errors=True)
        os.sync()  # pending writes of the last round must not be measured in this one
        turns = [(ours, lambda: save(work_dir, backend, average)), (disk, lambda: write_plainly(plain, contents))]
        for times, action in turns if round_number % 2 else reversed(turns):
            times.append(seconds(action))
        verified.append(seconds(lambda: store.verify(path, Manifest.read(path), hashes=True)))
        read.append(seconds(lambda: [p.read_bytes() for p in plain.iterdir()]))
    problem = store.verify(path, Manifest.read(path), hashes=True)
    assert problem is None, problem
    backend.close()
    shutil.rmtree(work_dir)
    shutil.rmtree(plain)
    ratio = interval([a / b for a, b in zip(ours, disk, strict=True)])
    size = sum(map(len, contents.values()))
    return {
        "engine": engine,
        "bytes": size,
        "files": len(contents),
        "save_s": ours,
        "plain_write_and_fsync_s": disk,
        "ratio": ratio,
        "verify_s": verified,
        "verify_gib_per_s": size / statistics.median(verified) / 2**30,
        "read_s": read,
        "accepted": ratio["median"] <= LIMIT,
    }


def line(row: dict[str, Any]) -> str:
    ratio, save_s, plain_s = row["ratio"], statistics.median(row["save_s"]), row["plain_write_and_fsync_s"]
    return (
        f"{row['engine']:10} {row['bytes'] / 2**20:7.0f} MiB  save {save_s:6.2f} s  plain write and fsync"
        f" {statistics.median(plain_s):6.2f} s  ratio {ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"
        f"  verify {row['verify_gib_per_s']:.2f} GiB/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=48, help="parameters")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--engines", nargs="+", default=["single", "fsdp", "deepspeed"])
    parser.add_argument("--folder", type=Path, help="output folder; default: a temporary folder")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    dist.ensure_initialized()
    folder = Path(tempfile.mkdtemp(prefix="saving-", dir=arguments.folder))
    rows = []
    try:
        for engine in arguments.engines:
            rows.append(measure(engine, arguments.millions, arguments.rounds, folder))
            print(line(rows[-1]), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    accepted = all(row["accepted"] for row in rows)
    print(
        "result:",
        write_result("saving", {"limit": LIMIT, "accepted": accepted, "runs": rows}, folder=arguments.results),
    )
    sys.stdout.flush()
    os._exit(0 if accepted else 1)  # DeepSpeed's threads sometimes abort an ordinary exit


if __name__ == "__main__":
    main()
