"""What a checkpoint of 1,024 ranks costs one rank: the index that rank 0 writes, and what any rank does to open it.

In: nothing. Out: a table, and ``results/many_ranks_<date>.json``. The plan is that of a decoder of 500 parameters under
FSDP with AdamW, 7 B in all. Rank 0 and the one in the
middle write their real files; of every other the size is known from these (a hole
in the file system). Accepted if rank 0 receives at most 10 MB and commits within 2 s, if a rank opens the checkpoint
and reads its part within 5 s, and if a list of 1,000 checkpoints needs at most 1 s of CPU time. Shown beside: what
``pickle`` needs for the same ``.metadata``, object by object, and to read it, as PyTorch does.

Before that, 2 and 4 real processes save a model of odd shapes: their ``.metadata`` must equal one that is made from
what each of them reports of each of its tensors, and PyTorch's own reader must return the tensors.

    python benchmarks/many_ranks.py [--ranks 1024] [--rounds 5]

Exit status: 1 if a limit is exceeded, otherwise 0.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from shared.processes import finish, launch
from shared.record import RESULTS, ROOT, write_result
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from unigen_ds.backends.fsdp.fsdp import TensorTable, _write, shard_parts
from unigen_ds.backends.torch_optimizer import local_part
from unigen_ds.checkpoint.layouts.dcp import DCPReader
from unigen_ds.checkpoint.manifest import FileEntry, Manifest
from unigen_ds.checkpoint.saver import Save
from unigen_ds.core.json_values import STAMP
from unigen_ds.core.progress import Geometry, Progress, Ruler
from unigen_ds.system import dist
from unigen_ds.system.outputs import Output, StateFiles, write_output

LIMITS = {"gathered_mb": 10.0, "commit_s": 2.0, "load_s": 5.0, "list_cpu_s": 1.0}
HIDDEN, WIDE, WORDS, LAYERS = 4096, 11008, 32000, 55
KINDS = ("master", "exp_avg", "exp_avg_sq")


def data_file(rank: int) -> str:
    return f"__{rank}_0.distcp"


def plan() -> dict[str, tuple[int, ...]]:
    """Parameters of a decoder."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (WORDS, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (WIDE, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"{prefix}mlp.down_proj.weight": (HIDDEN, WIDE)}
        shapes |= {f"{prefix}{name}.weight": (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")}
    return shapes | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (WORDS, HIDDEN)}


def table_of(num_ranks: int) -> TensorTable:
    def tensor(*shape: int, ranks: range, dtype: torch.dtype = torch.float32) -> tuple[torch.Size, torch.dtype, range]:
        return torch.Size(shape), dtype, ranks

    tensors = {f"{STAMP}|{r}": tensor(8, ranks=range(r, r + 1), dtype=torch.uint8) for r in range(num_ranks)}
    tensors |= {f"{kind}|{n}": tensor(*s, ranks=range(num_ranks)) for kind in KINDS for n, s in plan().items()}
    return TensorTable(tensors | {f"step|{name}": tensor(1, ranks=range(1)) for name in plan()})


def parts(table: TensorTable, rank: int) -> list[tuple[str, torch.Size, torch.Size, torch.dtype]]:
    """Key, offset, size and dtype of all that a rank writes."""
    result = []
    for key in table.keys(rank):
        shape, dtype, ranks = table.tensors[key]
        offsets, sizes = shard_of(tuple(shape), len(ranks), rank - ranks.start)
        result.append((key, offsets, sizes, dtype))
    return result


@cache
def shard_of(shape: tuple[int, ...], num_ranks: int, shard: int) -> tuple[torch.Size, torch.Size]:
    return list(shard_parts(shape, num_ranks))[shard]


def manifest_of(files: Sequence[FileEntry] = (), *, commit: int = 0) -> Manifest:
    geometry = Geometry(4)
    rows = [{"name": name, "shape": list(shape), "dtype": "float32", "trainable": True, "group": "default", "tied": []}
            for name, shape in plan().items()]  # fmt: skip
    progress = Progress(sequences=4 * commit, updates=commit)
    return Manifest(
        commit=commit, parent=None, progress=progress, geometry=geometry, ruler=Ruler(geometry, 100), topology={},
        schedule={}, loader={}, parameters=rows, files=list(files), config={}, layout="dcp",
    )  # fmt: skip


def seconds(action: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    result = action()
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    return result, {"wall": wall, "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def save(task: Mapping[str, Any]) -> dict[str, Any]:
    """What rank 0 receives and does once every rank has written."""
    folder, num_ranks = Path(task["folder"]), task["ranks"]
    table = table_of(num_ranks)
    reports: dict[Any, Any] = {}
    results, entries = [], []
    for rank in range(num_ranks):
        own = parts(table, rank)
        archives = tuple((tuple(size), dtype) for *_, size, dtype in own)
        if archives not in reports or rank == num_ranks // 2:
            tensors = [torch.zeros(size, dtype=dtype) for *_, size, dtype in own]
            output = Output(data_file(rank), 0, partial(_write, data_file(rank), tensors))
            _, digest, reports[archives] = write_output(folder, output)
        else:
            with open(folder / data_file(rank), "wb") as stream:
                stream.truncate(reports[archives][1])
        results.append([(data_file(rank), *reports[archives][1:])])
        entries += [FileEntry(f"{name}/rank{rank:05d}.safetensors", 10**8, digest) for name in ("rng", "ema")]
        entries.append(FileEntry(data_file(rank), reports[archives][1], digest))
    gathered = [pickle.dumps((entries[3 * rank : 3 * rank + 3], one, [])) for rank, one in enumerate(results)]
    attempt = Save(folder, "iter_1.pth", manifest_of(entries), "sharded")
    attempt.collect(lambda: StateFiles("dcp", [], lambda _: table.index(results)))
    attempt.announce(lambda: None)
    attempt.write([])
    _, unpickled = seconds(lambda: [pickle.loads(one) for one in gathered])
    path, commit = seconds(attempt.commit)
    content = (path / ".metadata").read_bytes()
    outcome = {
        "gathered_mb": sum(map(len, gathered)) / 1e6, "commit": commit, "unpickled": unpickled,
        "positions": sum(len(ranks) for *_, ranks in table.tensors.values()), "metadata_mb": len(content) / 1e6,
    }  # fmt: skip
    if task["peer"]:
        metadata, outcome["torch_reads"] = seconds(lambda: pickle.loads(content))
        _, outcome["torch_pickles"] = seconds(lambda: pickle.dumps(metadata))
    os.replace(path / ".metadata", folder / ".metadata")
    return outcome


def load(task: Mapping[str, Any]) -> dict[str, Any]:
    """What the rank in the middle does: open, look at the stamp of its file, read its rows and the step counts."""
    rank = task["ranks"] // 2

    def open_and_read() -> int:
        reader = DCPReader(Path(task["folder"]))
        assert reader.stamps[data_file(rank)]() == "\0" * 8
        nbytes = 0
        for name, shape in plan().items():
            offsets, sizes = shard_of(shape, task["ranks"], rank)
            start = offsets[0] * math.prod(shape[1:])
            parts = [reader.read(kind, name, start, start + math.prod(sizes)) for kind in KINDS]
            nbytes += sum(part.nbytes for part in parts) + reader.read("step", name, 0, 1).nbytes
        return nbytes

    nbytes, times = seconds(open_and_read)
    return {
        "load": times,
        "megabytes": nbytes / 1e6,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def real(task: Mapping[str, Any]) -> dict[str, Any]:
    """A save by real processes, and the same index from what each one reports of each of its tensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.ensure_initialized()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.LayerNorm(13), torch.nn.Linear(13, 3, bias=False))
    whole = {f"master|{name}": p.detach().clone() for name, p in model.named_parameters()}
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.world_size(),)))
    state = {f"master|{name}": p for name, p in model.named_parameters()} | {"buffer|calls": torch.tensor(5)}
    stamp = torch.tensor(list(b"update 1"), dtype=torch.uint8)
    table = TensorTable.of(state, num_shard=dist.world_size(), stamp=stamp)
    own = [local_part(state.get(key, stamp)).detach() for key in table.keys(dist.rank())]
    name = data_file(dist.rank())
    folder, ranges = Path(task["folder"]), []
    *_, report = write_output(folder, Output(name, 0, partial(_write, name, own)))
    stream = io.BytesIO((folder / name).read_bytes())
    for tensor in own:
        begin, copy = sum(length for _, length in ranges), io.BytesIO()
        torch.save(tensor.clone(), copy)
        ranges.append((begin, len(copy.getvalue())))
        stream.seek(begin)
        assert torch.equal(torch.load(io.BytesIO(stream.read(ranges[-1][1]))), tensor)
    everything = dist.gather_to_main((report, ranges))
    if everything is None:
        return {}
    for index in table.index([[report] for report, _ in everything]):
        write_output(folder, index)
    positions = {}
    for rank, (_, ranges) in enumerate(everything):
        for (key, offsets, *_), position in zip(parts(table, rank), ranges, strict=True):
            positions[dcp.MetadataIndex(key, offsets)] = _StorageInfo(data_file(rank), *position)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    dcp_to_torch_save(str(folder), str(folder / "whole.pt"))
    theirs = torch.load(folder / "whole.pt")
    equal = all(torch.equal(theirs[name], tensor) for name, tensor in whole.items())
    return {"equal_index": metadata.storage_data == positions, "equal_tensors": equal, "positions": len(positions)}


def list_seconds(folder: Path) -> dict[str, float]:
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    text = subprocess.check_output([sys.executable, ROOT / "tools" / "checkpoints.py", "list", folder], text=True)
    assert len(text.splitlines()) == 1001, text
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"wall": wall, "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def write_checkpoints(folder: Path) -> None:
    """1,000 checkpoints of the same plan, 8 ranks, whose files are holes."""
    names = [f"{name}/rank{rank:05d}.safetensors" for name in ("rng", "ema") for rank in range(8)]
    names += [data_file(rank) for rank in range(8)]
    for commit in range(1, 1001):
        path = folder / f"iter_{commit}.pth"
        for name in ("rng", "ema"):
            (path / name).mkdir(parents=True)
        for name in names:
            with open(path / name, "wb") as stream:
                stream.truncate(1000)
        entries = [FileEntry(name, 1000, "xxh3_128:" + 32 * "0") for name in names]
        (path / "manifest.json").write_text(manifest_of(entries, commit=commit).to_json())


STEPS = {"save": save, "load": load, "real": real}


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ranks", type=int, default=1024)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    p.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = p.parse_args()
    if arguments.worker:
        task = json.loads(arguments.worker)
        finish(task, STEPS[task["step"]](task))
    record: dict[str, Any] = {"ranks": arguments.ranks, "parameters": len(plan()), "limits": LIMITS, "real": {}}
    for world in (2, 4):
        with tempfile.TemporaryDirectory(prefix="many_ranks-") as folder:
            task = {"step": "real", "folder": folder}
            record["real"][str(world)] = launch(__file__, task, world=world, name=f"{world} ranks")[0]
    rounds: dict[str, list[Any]] = {"save": [], "load": [], "list": []}
    with tempfile.TemporaryDirectory(prefix="many_ranks-") as checkpoints:
        write_checkpoints(Path(checkpoints))
        for number in range(arguments.rounds):
            with tempfile.TemporaryDirectory(prefix="many_ranks-") as folder:
                for step in ("save", "load"):
                    task = {"step": step, "folder": folder, "ranks": arguments.ranks, "peer": number == 0}
                    rounds[step] += launch(__file__, task, world=1, name=step)
            rounds["list"].append(list_seconds(Path(checkpoints)))
            print({step: each[-1] for step, each in rounds.items()}, flush=True)
    values = {
        "gathered_mb": rounds["save"][0]["gathered_mb"],
        "commit_s": float(np.median([each["unpickled"]["wall"] + each["commit"]["wall"] for each in rounds["save"]])),
        "load_s": float(np.median([each["load"]["wall"] for each in rounds["load"]])),
        "list_cpu_s": float(np.median([each["cpu"] for each in rounds["list"]])),
    }
    checks = {f"{name} <= {LIMITS[name]}": value <= LIMITS[name] for name, value in values.items()}
    checks |= {f"{n} ranks": one["equal_index"] and one["equal_tensors"] for n, one in record["real"].items()}
    for name, value in values.items():
        print(f"{name:12} {value:8.2f}  at most {LIMITS[name]}")
    print("\n".join(f"{text:24} {'met' if ok else 'NOT MET'}" for text, ok in checks.items()))
    path = write_result(
        "many_ranks", {**record, "verdict": checks, "values": values, "rounds": rounds}, folder=arguments.out
    )
    print(f"Written: {os.path.relpath(path)}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
