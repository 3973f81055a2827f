"""Starting from published weights: the peak memory of a rank while its shards are filled.

In: BAGEL's directory of a model of 600 M parameters with random weights in bf16, written once. Out: a table, and
``results/published_load_<date>.json``. Accepted if under FSDP and ZeRO-3, on two and on four processes, the peak of a
rank's anonymous memory is at most 1.15 times the bytes of the tensors that it keeps, and all ranks together have the
values of the files. The peer is the usual method: every rank builds the whole model with its weights, then the engine
shards it.

Memory is the largest ``RssAnon``, sampled every 5 ms, minus that before the model was built. The kept tensors are
counted at the end: parameters, and for ZeRO-3 also masters, gradients and moments, which DeepSpeed allocates at once.
Mapped pages of the files do not count, because the kernel can drop them at any time.

    python benchmarks/published_load.py [--folder /tmp/somewhere]    # 2 GB of disk, 16 GB of memory
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import json

import torch
from shared.processes import Memory, finish, launch
from shared.record import RESULTS, write_result
from torch import Tensor

from unigen_ds.backends.base import Backend
from unigen_ds.core.progress import Geometry
from unigen_ds.families.bagel.model import UnifiedModel
from unigen_ds.families.bagel.published import BagelDirectory
from unigen_ds.optim.optimizer import OptimizerConfig, ParamGroup
from unigen_ds.system import dist

LIMIT = 1.15
ENGINES, WORLDS, WAYS = ("fsdp", "zero3"), (2, 4), ("streamed", "whole")
SIZES: dict[str, Any] = {
    "llm": {
        "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 15,
        "num_attention_heads": 16, "num_key_value_heads": 8,
    },
    "vit": {
        "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 6,
        "image_size": 224, "patch_size": 14, "num_channels": 3,
    },
    "vae": {"type": "FluxAutoencoder", "base_channels": 32, "channel_multipliers": [1, 2], "num_blocks": 1},
}  # fmt: skip


def make_engine(engine: str) -> Backend:
    if engine == "fsdp":
        from unigen_ds.backends.fsdp.fsdp import FSDPBackend

        return FSDPBackend()
    from unigen_ds.backends.deepspeed.deepspeed import DeepSpeedBackend

    return DeepSpeedBackend(config="zero3")


def warm_up(engine: str) -> None:
    """Memory that every process needs once, above all for imports: a tiny model is sharded and released."""
    tiny = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = UnifiedModel(
        llm={**SIZES["llm"], **tiny, "vocab_size": 32, "num_key_value_heads": 2},
        vit={**SIZES["vit"], **tiny},
        vae=SIZES["vae"],
    )
    backend = prepare(engine, model)
    backend.close()


def prepare(engine: str, model: UnifiedModel) -> Backend:
    backend = make_engine(engine)
    names = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    backend.check(geometry=Geometry(1, 1, dist.env_world_size()), optimizer_cfg=OptimizerConfig())
    group = ParamGroup("all", 1e-4, 0.0, names)
    backend.prepare(model, [group])
    return backend


def measure(engine: str, way: str, folder: Path) -> dict[str, Any]:
    """One rank."""
    warm_up(engine)
    before = live_bytes()
    with Memory() as memory:
        dist.barrier()
        start = time.perf_counter()
        if way == "whole":
            backend = prepare(engine, UnifiedModel(pretrained=str(folder)))
        else:
            with torch.device("meta"):
                model = UnifiedModel(pretrained=str(folder))
            weights = model.initial_weights(seed=0)
            backend = prepare(engine, model)
            backend.load_tensors(weights, weights_only=True)
        dist.barrier()
        seconds = time.perf_counter() - start
    sharded: Any = backend
    shards = [*sharded.master_shards(), *sharded.frozen_shards()]
    total = sum(float(s.data.detach().abs().sum(dtype=torch.float64)) for s in shards if s.primary)
    return {
        "seconds": seconds,
        "peak": memory.highest - memory.before,
        "kept": Memory.settle() - memory.before,
        "tensors": live_bytes() - before,
        "shard": 4 * sum(s.data.numel() for s in shards),
        "sum": dist.sum_floats([total])[0],
    }


def live_bytes() -> int:
    """Bytes of the storages of all tensors that Python can reach; each storage is counted once."""
    gc.collect()
    sizes: dict[int, int] = {}
    for thing in gc.get_objects():
        if isinstance(thing, Tensor) and thing.device.type == "cpu" and thing.layout is torch.strided:
            local = getattr(thing, "_local_tensor", thing)
            sizes[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(sizes.values())


def write_model(folder: Path) -> tuple[int, float]:
    """Write the directory; the number of its parameters and the sum of their absolute values."""
    torch.manual_seed(0)
    model = UnifiedModel(**SIZES)
    BagelDirectory().write(model, None, folder, source=None, dtype=torch.bfloat16, max_shard_size="")
    sizes = [p.detach().bfloat16().abs().sum(dtype=torch.float64) for p in model.parameters()]
    return sum(p.numel() for p in model.parameters()), float(torch.stack(sizes).sum())


def run(folder: Path) -> dict[str, Any]:
    load_before = os.getloadavg()
    directory = folder / "published"
    numel, expected = write_model(directory)
    gc.collect()
    rows: dict[str, Any] = {}
    for engine in ENGINES:
        for world in WORLDS:
            for way in WAYS:
                name = f"{engine}@{world} {way}"
                ranks = launch(
                    __file__, {"engine": engine, "way": way, "folder": str(directory)}, world=world, name=name
                )
                fullest = max(ranks, key=lambda rank: rank["peak"] / rank["tensors"])
                ratio = fullest["peak"] / fullest["tensors"]
                complete = abs(fullest["sum"] - expected) <= 1e-6 * expected
                rows[name] = {**fullest, "ratio": ratio, "complete": complete, "ranks": ranks}
                print(f"{name}: {ratio:.2f}", flush=True)
    accepted = all(rows[n]["ratio"] <= LIMIT and rows[n]["complete"] for n in rows if n.endswith("streamed"))
    return {
        "limit": LIMIT, "accepted": accepted, "parameters": numel, "rows": rows, "load_before": load_before,
        "load_after": os.getloadavg(),
    }  # fmt: skip


def show(record: Mapping[str, Any]) -> None:
    mib = 2**20
    print(f"{record['parameters'] / 1e6:.0f} M parameters, {record['parameters'] * 4 / mib:.0f} MiB in fp32")
    print(f"{'':18}{'peak MiB':>10}{'tensors MiB':>13}{'ratio':>8}{'shard MiB':>11}{'s':>8}  complete")
    for name, r in record["rows"].items():
        figures = f"{r['peak'] / mib:10.0f}{r['tensors'] / mib:13.0f}{r['ratio']:8.2f}{r['shard'] / mib:11.0f}"
        print(f"{name:18}{figures}{r['seconds']:8.1f}  {r['complete']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="temporary folder for the model of the run")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        task = json.loads(arguments.worker)
        torch.set_num_threads(1)
        finish(task, measure(task["engine"], task["way"], Path(task["folder"])))
    folder = Path(tempfile.mkdtemp(prefix="published-load-", dir=arguments.folder))
    try:
        record = run(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(record)
    print(f"Written: {os.path.relpath(write_result('published_load', record, folder=arguments.out))}")
    return 0 if record["accepted"] else 1


if __name__ == "__main__":
    sys.exit(main())
