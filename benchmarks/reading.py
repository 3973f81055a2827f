"""Time to read a checkpoint as the number of its tensors grows: our readers compared with ``torch.load``.

In: nothing. Out: a table, and ``results/reading_<date>.json``. Accepted if each method of reading safetensors needs at
most 1.5 times as long as ``torch.load`` of the same tensors, at every size, and this ratio grows at most by the factor
4 between 500 and 5,000 tensors (for a quadratic reader it is 10, because ``torch.load`` is linear).

Three methods read safetensors: a checkpoint's weights into the ``single`` engine (``Backend.load_tensors``), its EMA
into the shards of the hook (``ShardEMA.load``), and a published file by rows (``stored_tensors``). Two others have no
limit: the DCP layout of FSDP, and DeepSpeed's files. Ours always includes opening the files and copying the values to
the tensors of the model. ``torch.load`` is measured alone, for the limit, and followed by ``load_state_dict``.
All methods run in turns in one process on files in the page cache, so that other work affects all of them equally.

    python benchmarks/reading.py [--tensors 50 500 1500 5000] [--width 64] [--rounds 5]

Exit status: 1 if a limit is exceeded, otherwise 0.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from shared.record import RESULTS, interval, write_result
from torch import nn

from unigen_ds.backends.single import SingleBackend
from unigen_ds.checkpoint.layouts.dcp import DCPReader
from unigen_ds.checkpoint.layouts.deepspeed import DeepSpeedReader
from unigen_ds.checkpoint.layouts.safetensors import SafetensorsReader
from unigen_ds.core.progress import Geometry
from unigen_ds.core.shards import EMA, MASTER, shard_key
from unigen_ds.hooks.evaluate.ema import ShardEMA
from unigen_ds.models.weights import stored_tensors
from unigen_ds.optim.optimizer import OptimizerConfig, ParamGroup

LIMIT, GROWTH = 1.5, 4.0
REFERENCE, WHOLE = "torch.load", "torch.load + load_state_dict"
LIMITED = ("weights", "ema", "published")
FREE = ("dcp", "deepspeed")


class Many(nn.Module):
    """``count`` square matrices, with names as long as those of a real model."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))


def make_backend(model: nn.Module) -> SingleBackend:
    backend = SingleBackend()
    names = tuple(name for name, _ in model.named_parameters())
    backend.check(geometry=Geometry(1), optimizer_cfg=OptimizerConfig())
    backend.prepare(model, [ParamGroup("default", 0.1, 0.0, names)])
    return backend


def write(folder: Path, state: Mapping[str, torch.Tensor]) -> None:
    """The same tensors in every format."""
    torch.save(dict(state), folder / "state.pt")
    for name in ("weights", "ema", "deepspeed"):
        (folder / name).mkdir()
    save_file(dict(state), folder / "weights" / "model.safetensors")
    shards = {shard_key(EMA, name, 0): tensor.reshape(-1) for name, tensor in state.items()}
    save_file(shards, folder / "ema" / "rank00000.safetensors")
    dcp.save({f"{MASTER}|{name}": tensor for name, tensor in state.items()}, checkpoint_id=folder / "dcp")
    header = {"module": dict(state), "buffer_names": [], "param_shapes": None}  # DeepSpeed without ZeRO
    torch.save(header, folder / "deepspeed" / "mp_rank_00_model_states.pt")


def ways(folder: Path, backend: SingleBackend, state: Mapping[str, torch.Tensor]) -> dict[str, Callable[[], Any]]:
    average = ShardEMA(backend.master_shards(), momentum=0.1)
    parameters = dict(backend.model.named_parameters())

    def read_published() -> None:
        tensors = stored_tensors(folder / "weights" / "model.safetensors")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.view(-1).copy_(tensors[name].flat(0, parameter.numel()))

    def load(reader: Any) -> None:
        backend.load_tensors(reader, weights_only=True)

    return {
        REFERENCE: lambda: torch.load(folder / "state.pt", weights_only=True),
        WHOLE: lambda: backend.model.load_state_dict(torch.load(folder / "state.pt", weights_only=True)),
        "weights": lambda: load(SafetensorsReader(folder / "weights", parameters=state)),
        "ema": lambda: average.load(SafetensorsReader(folder / "ema")),
        "published": read_published,
        "dcp": lambda: load(DCPReader(folder / "dcp")),
        "deepspeed": lambda: load(DeepSpeedReader(folder / "deepspeed")),
    }


def measure(count: int, *, width: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Many(count, width)
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    backend = make_backend(model)
    with tempfile.TemporaryDirectory(prefix="reading-") as path:
        folder = Path(path)
        write(folder, state)
        times_by_way: dict[str, list[float]] = {}
        for turn in range(rounds + 1):
            for name, read in ways(folder, backend, state).items():
                start = time.perf_counter()
                read()
                seconds = time.perf_counter() - start
                if turn:  # the first only fills the page cache
                    times_by_way.setdefault(name, []).append(seconds)
    ratios = {
        name: interval([a / b for a, b in zip(times, times_by_way[REFERENCE], strict=True)])
        for name, times in times_by_way.items()
    }
    return {"tensors": count, "seconds": {k: sorted(v)[len(v) // 2] for k, v in times_by_way.items()}, "ratio": ratios}


def verdict(results: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Each limit, and whether it is met."""
    checks = {}
    for name in LIMITED:
        checks[f"{name} <= {LIMIT}"] = all(r["ratio"][name]["median"] <= LIMIT for r in results)
    by_size = {r["tensors"]: r["ratio"] for r in results}
    if {500, 5000} <= set(by_size):
        for name in (*LIMITED, *FREE):
            growth = by_size[5000][name]["median"] / by_size[500][name]["median"]
            checks[f"{name} is linear"] = growth <= GROWTH
    return checks


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tensors", type=int, nargs="+", default=[50, 500, 1500, 5000])
    p.add_argument("--width", type=int, default=64, help="of the square matrices; default: 64 (16 KiB each)")
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    arguments = p.parse_args()
    results = []
    for count in arguments.tensors:
        results.append(measure(count, width=arguments.width, rounds=arguments.rounds))
        seconds, ratio = results[-1]["seconds"], results[-1]["ratio"]
        print(f"{count:,} tensors; torch.load {seconds[REFERENCE]:.3f} s")
        for name in (WHOLE, *LIMITED, *FREE):
            print(f"  {name:28} {seconds[name]:7.3f} s  {ratio[name]['median']:5.2f} times torch.load")
    checks = verdict(results)
    for limit, ok in checks.items():
        print(f"{limit:24} {'met' if ok else 'NOT MET'}")
    record = {"limits": {"ratio": LIMIT, "growth": GROWTH}, "width": arguments.width, "verdict": checks}
    path = write_result("reading", {**record, "results": results}, folder=arguments.out)
    print(f"Written: {os.path.relpath(path)}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
