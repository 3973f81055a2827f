"""Time and memory of loading a checkpoint into another engine, compared with each engine's loading of its own.

In: a language model of 300 M parameters in bf16 (masters and Adam moments in fp32: 3.6 GB), saved once under ZeRO-2 on
two processes, and once by each engine that is compared. Out: a table, and ``results/elastic_load_<date>.json``.
Accepted if ``Backend.load_tensors`` of the ZeRO-2 checkpoint into FSDP on one process, ZeRO-3 on two, and ``single``
needs at most 1.2 times as long as ZeRO-2 on two processes needs to load it, and the anonymous memory of every rank
grows by at most its shard and one tensor.

The engines' own methods: ``engine.load_checkpoint`` of DeepSpeed, ``torch.distributed.checkpoint.load`` in place for
FSDP, ``torch.load`` and ``load_state_dict`` for one plain process. DeepSpeed's method for another topology is also
measured: ``ds_to_universal``, then loading its output. Every load runs in new processes; the files are read once
before, so that all come from the page cache; all methods run in turns, ``--rounds`` times.

Time is that of the load only, between two barriers. Memory is the largest ``RssAnon`` minus that before the load,
sampled every 5 ms: mapped pages of the files do not count, because the kernel can drop them at any time. The shard is
the memory that the load must allocate: both moments of the rank's elements. Every rank computes the sum of its loaded
values, so that an incomplete load is detected.

    python benchmarks/elastic_load.py [--rounds 3] [--folder /tmp/somewhere]    # 20 GB of disk, 10 GB of memory
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from shared.processes import Memory, finish, launch
from shared.record import RESULTS, interval, write_result
from torch import Tensor, nn
from torch.nn import functional as F

from unigen_ds.core.progress import Geometry
from unigen_ds.optim.optimizer import OptimizerConfig, ParamGroup
from unigen_ds.system import dist
from unigen_ds.system.outputs import write_output

LIMIT = 1.2
WIDTH, LAYERS, VOCAB, TOKENS = 1024, 22, 32000, 16


@dataclass(frozen=True)
class Load:
    """One way to load. ``how``: ``ours``, ``own`` (the engine's) or ``universal``; ``source``: the saver."""

    how: str
    engine: str
    world: int
    source: str = "zero2"

    @property
    def name(self) -> str:
        return f"{self.engine}@{self.world} {self.how}"


REFERENCE = Load("own", "zero2", 2)
SAME = Load("ours", "zero2", 2)
ELSEWHERE = [Load("ours", "fsdp", 1), Load("ours", "zero3", 2), Load("ours", "single", 1)]
OWN = [Load("own", "fsdp", 1, "fsdp"), Load("own", "zero3", 2, "zero3"), Load("own", "single", 1, "single")]
UNIVERSAL = Load("universal", "zero2", 1, "universal")
SAVERS = {"zero2": 2, "zero3": 2, "fsdp": 1, "single": 1}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.attention_norm(x)).unflatten(-1, (3, 16, WIDTH // 16)).movedim(-3, 0).transpose(-3, -2)
        attention = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(attention.transpose(-3, -2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class LanguageModel(nn.Module):
    """310 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)

    def shard_units(self) -> list[nn.Module]:
        return list(self.blocks)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.norm(self.blocks(self.embedding(ids))) @ self.embedding.weight.T
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def make_backend(engine: str, world: int, *, universal: bool = False) -> Any:
    """The engine, prepared with the model."""
    torch.manual_seed(0)
    model = LanguageModel()
    if engine == "single":
        from unigen_ds.backends.single import SingleBackend as Backend

        backend: Any = Backend()
    elif engine == "fsdp":
        from unigen_ds.backends.fsdp.fsdp import FSDPBackend

        backend = FSDPBackend()
    else:
        from unigen_ds.backends.deepspeed.deepspeed import DeepSpeedBackend

        extra = {"checkpoint": {"load_universal": True}} if universal else {}
        backend = DeepSpeedBackend(config={"zero_optimization": {"stage": int(engine[-1])}, **extra})
    group = ParamGroup("all", 1e-4, 0.0, tuple(name for name, _ in model.named_parameters()))
    settings = OptimizerConfig(precision="bf16", max_norm=1.0)
    backend.check(geometry=Geometry(batch_size=1, dp_size=world), optimizer_cfg=settings)
    backend.prepare(model, [group])
    return backend


def write_state(backend: Any, folder: Path) -> None:
    """The engine's own files only, without the rest of a checkpoint. Collective."""
    state = backend.state_files()
    folder.mkdir(exist_ok=True)
    results = [write_output(folder, file)[2] for file in state.files]
    all_results = dist.gather_to_main([result for result in results if result is not None])
    for file in state.index(all_results) if all_results is not None else ():
        write_output(folder, file)
    dist.barrier()


def save(engine: str, world: int, folder: Path) -> dict[str, Any]:
    """One real update, then the engine's own files; for ``single`` also the file that plain PyTorch would write."""
    backend = make_backend(engine, world)
    with backend.accumulate(last=True):
        backend.backward(backend.model(torch.arange(TOKENS).view(1, -1)) / world)
    backend.step()
    write_state(backend, folder)
    if engine == "single":
        (folder / "model.safetensors").unlink()
        (folder / "optimizer.safetensors").unlink()
        torch.save({"model": backend._masters, "optimizer": backend._optimizer.state_dict()}, folder / "state.pt")
    return sums_of(backend)


def ours(backend: Any, folder: Path) -> None:
    from unigen_ds.checkpoint.layouts.deepspeed import DeepSpeedReader

    backend.load_tensors(DeepSpeedReader(folder))


def own(backend: Any, folder: Path) -> None:
    """As in the engine's documentation."""
    if hasattr(backend, "stage"):
        tag = "universal" if (folder / "universal").is_dir() else "."
        backend.model.load_checkpoint(str(folder), tag=tag)
    elif (folder / "state.pt").is_file():
        state = torch.load(folder / "state.pt", weights_only=True)
        with torch.no_grad():
            for name, value in state["model"].items():
                backend._masters[name].copy_(value)
        backend._optimizer.load_state_dict(state["optimizer"])
        backend.refresh_copies()
    else:
        from torch.distributed.checkpoint.state_dict_loader import load

        state = {f"master|{name}": p.detach() for name, p in backend._masters.items()}
        for kind in ("exp_avg", "exp_avg_sq"):
            tensors = {name: backend._optimizer.state[backend._masters[name]][kind] for name in backend.kept_for(kind)}
            state |= {f"{kind}|{name}": t for name, t in tensors.items()}
        load(state, checkpoint_id=folder)


def sums_of(backend: Any) -> dict[str, float]:
    """Sums of the absolute values of masters and moments over all ranks."""
    parts = [backend.master_shards(), backend.moments("exp_avg"), backend.moments("exp_avg_sq")]
    sums = [sum(float(s.data.detach().abs().sum(dtype=torch.float64)) for s in shards) for shards in parts]
    return dict(zip(("master", "exp_avg", "exp_avg_sq"), dist.sum_floats(sums), strict=True))


def measure(load: Load, folder: Path) -> dict[str, Any]:
    """One rank of one load."""
    backend = make_backend(load.engine, load.world, universal=load.how == "universal")
    action: Callable[[Any, Path], None] = ours if load.how == "ours" else own
    with Memory() as memory:
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        action(backend, folder)
        dist.barrier()
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    masters = backend.master_shards()
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "grown": memory.highest - memory.before,
        "kept": Memory.now() - memory.before,
        "shard": 8 * sum(shard.data.numel() for shard in masters),
        "tensor": 4 * max(shard.numel for shard in masters),
        "sums": sums_of(backend),
    }


def worker(task: Mapping[str, Any]) -> None:
    """A process that ``launch`` started."""
    torch.set_num_threads(1)
    folder, load = Path(task["folder"]), Load(**task["load"])
    finish(task, save(load.engine, load.world, folder) if task["save"] else measure(load, folder))


def start(load: Load, folder: Path, *, save: bool = False) -> list[dict[str, Any]]:
    """New processes; the result of every rank."""
    task = {"folder": str(folder), "load": asdict(load), "save": save}
    return launch(__file__, task, world=load.world, name=load.name)


def convert(folder: Path, out: Path) -> float:
    """DeepSpeed's conversion to its universal format. Seconds."""
    code = "import sys, torch; torch.set_num_threads(1); from deepspeed.checkpoint.ds_to_universal import main,"
    code += " parse_arguments; main(parse_arguments())"
    command = [sys.executable, "-c", code, "--input_folder", str(folder), "--output_folder", str(out)]
    start = time.perf_counter()
    process = subprocess.run([*command, "--inject_missing_state"], capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(f"ds_to_universal failed:\n{process.stdout[-2000:]}{process.stderr[-2000:]}")
    return time.perf_counter() - start


def warm(folder: Path) -> None:
    """Bring the files into the page cache."""
    for path in (p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb", buffering=0) as stream:
            while stream.read(1 << 24):
                pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="temporary folder for the checkpoints of the run")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(json.loads(arguments.worker))
    folder = Path(tempfile.mkdtemp(prefix="elastic-load-", dir=arguments.folder))
    try:
        record = run(folder, rounds=arguments.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(record)
    print(f"Written: {os.path.relpath(write_result('elastic_load', record, folder=arguments.out))}")
    return 0 if record["accepted"] else 1


def run(folder: Path, *, rounds: int) -> dict[str, Any]:
    """Save, convert, then load in turns."""
    load_before, sums = os.getloadavg(), {}
    for engine, world in SAVERS.items():
        (folder / engine).mkdir()
        sums[engine] = start(Load("save", engine, world), folder / engine, save=True)[0]
        print(f"saved by {engine}@{world}", flush=True)
    universal = folder / "universal"
    conversion = convert(folder / "zero2", universal / "universal")
    sums["universal"] = sums["zero2"]
    loads = [REFERENCE, SAME, *ELSEWHERE, *OWN, UNIVERSAL]
    results: dict[str, list[list[dict[str, Any]]]] = {load.name: [] for load in loads}
    for number in range(rounds):
        for load in loads if number % 2 == 0 else reversed(loads):
            warm(folder / load.source)
            results[load.name].append(start(load, folder / load.source))
            print(f"round {number + 1}: {load.name} {results[load.name][-1][0]['seconds']:.2f} s", flush=True)
    rows = {load.name: row(load, results, sums[load.source]) for load in loads}
    return {
        "limit": LIMIT,
        "accepted": all(rows[load.name]["good"] for load in ELSEWHERE),
        "parameters": sum(p.numel() for p in LanguageModel().parameters()),
        "conversion_seconds": conversion,
        "rows": rows,
        "load_before": load_before,
        "load_after": os.getloadavg(),
        "results": results,
    }


def row(load: Load, results: Mapping[str, Sequence[Any]], sums: Mapping[str, float]) -> dict[str, Any]:
    """Medians, ratios by round, and the rank with the largest memory. An incomplete load is never accepted."""

    def seconds(name: str) -> list[float]:
        return [ranks[0]["seconds"] for ranks in results[name]]

    mine, ranks = results[load.name], [rank for ranks in results[load.name] for rank in ranks]
    fullest = max(ranks, key=lambda r: r["grown"] - r["shard"])
    complete = all(abs(r["sums"][kind] - value) <= 1e-6 * value for r in ranks for kind, value in sums.items())
    pairs = {"ratio": REFERENCE.name, "own_ratio": f"{load.engine}@{load.world} own"}
    figures: dict[str, Any] = {
        key: interval([a / b for a, b in zip(seconds(load.name), seconds(other), strict=True)])
        for key, other in pairs.items()
        if other in results
    }
    figures |= {
        "seconds": sorted(seconds(load.name))[len(mine) // 2],
        **{key: fullest[key] for key in ("grown", "kept", "shard", "tensor")},
        "complete": complete,
    }
    fits = fullest["grown"] <= fullest["shard"] + fullest["tensor"]
    return {**figures, "good": complete and fits and figures["ratio"]["median"] <= LIMIT}


def show(record: Mapping[str, Any]) -> None:
    mib = 2**20
    print(f"{'load':20}{'s':>7}{'/ zero2@2 own':>15}{'/ own':>8}{'anon MiB':>10}{'shard + tensor':>16}  complete")
    for name, r in record["rows"].items():
        own = f"{r['own_ratio']['median']:.2f}" if "own_ratio" in r else ""
        limit = f"{r['shard'] / mib:.0f} + {r['tensor'] / mib:.0f}"
        growth = f"{r['grown'] / mib:.0f}"
        figures = f"{r['seconds']:7.2f}{r['ratio']['median']:15.2f}{own:>8}{growth:>10}{limit:>16}"
        print(f"{name:20}{figures}  {r['complete']}")
    print(f"ds_to_universal before the universal load: {record['conversion_seconds']:.1f} s")


if __name__ == "__main__":
    sys.exit(main())
