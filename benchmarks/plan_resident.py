"""Planned against resident memory: three updates of a decoder with more than 1 GB of state on each process, on the CPU.

    python benchmarks/plan_resident.py [ENGINE ...]      # single zero2 FULL_SHARD

Each process measures the largest ``RssAnon``, read every 5 ms, minus that just before its model is built, when freed
memory has been returned to the system. The plan is the highest sum of bytes of ``unigen_ds/checks/memory`` while
loading and training. ``MALLOC_MMAP_THRESHOLD_`` is 64 KiB, so that a freed tensor leaves the process at once: by
default glibc raises the limit to 32 MiB, and tensors below it are freed into gaps of its heap. Bound: 10 %. Results:
``results/``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from shared.processes import Memory, finish, launch
from shared.record import write_result

from tests.end_to_end.engines.jobs import cases
from tests.end_to_end.engines.jobs.users import write_mixed
from tests.tiny import tiny_config
from unigen_ds.checks.memory.planned import plan_memory
from unigen_ds.runner import Runner
from unigen_ds.runner.start import parts
from unigen_ds.system import dist

LIMIT = 0.10
RUNS = {"single": (1, 6), "zero2": (2, 7), "FULL_SHARD": (2, 12)}
"""Processes and layers: state of 1.1 to 1.2 GB on each process."""
SIZES = {"model_type": "llama", "vocab_size": 61, "hidden_size": 1024, "intermediate_size": 4096,
         "num_attention_heads": 8, "num_key_value_heads": 4}  # fmt: skip
BUCKETS = {"reduce_bucket_size": 5_000_000, "allgather_bucket_size": 5_000_000}


def config(engine: str, folder: Path) -> Any:
    world, layers = RUNS[engine]
    options = cases.config(engine, world, geometry=(1, 2), custom_hooks=[], processor=None)
    options["model"] = {"type": "DecoderLM", "llm": {**SIZES, "num_hidden_layers": layers}}
    options["backend"] = cases.with_buckets(cases.ALL[engine], BUCKETS)
    source = {"type": "UnifiedGenerationDataset", "data_path": str(folder / "text.jsonl")}
    return tiny_config(folder / engine, folder, train_dataloader__dataset=source, train_cfg__max_epochs=1, **options)


def measure(engine: str, folder: Path) -> dict[str, int]:
    """A worker: three updates."""
    memory, build = Memory(), parts.build.build_model

    def measured_from_here(*args: Any, **kwargs: Any) -> Any:
        memory.__enter__()
        return build(*args, **kwargs)

    with mock.patch.object(parts, "build_model", measured_from_here):
        Runner.from_cfg(config(engine, folder), max_updates=3).train()
    memory.__exit__()
    dist.barrier()
    return {"before": memory.before, "highest": memory.highest}


def compare(engine: str, folder: Path) -> dict[str, Any]:
    world, _ = RUNS[engine]
    ranks = launch(__file__, {"engine": engine, "folder": str(folder)}, world=world, name=engine)
    (plan,) = plan_memory(config(engine, folder), world_size=world, alternatives=False).plans
    if plan.memory is None:
        raise SystemExit(f"{engine} could not be planned: {plan.problem}")
    most = max(rank["highest"] - rank["before"] for rank in ranks)
    bytes_planned = max(plan.memory.built, plan.memory.peak["load"], plan.memory.peak["step"])
    row = {"engine": engine, "processes": world, "held": plan.memory.held, "planned": bytes_planned, "resident": most,
           "off": bytes_planned / most - 1, "ranks": ranks}  # fmt: skip
    print(json.dumps(row), flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("engines", nargs="*", help="those of: " + " ".join(RUNS))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        task = json.loads(arguments.worker)
        torch.set_num_threads(1)
        finish(task, measure(task["engine"], Path(task["folder"])))
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # of the workers
    with tempfile.TemporaryDirectory(prefix="plan-resident-") as name:
        folder = Path(name)
        texts = write_mixed(folder).read_text(encoding="utf-8").splitlines()
        longest = max((line for line in texts if "image" not in line), key=len)
        (folder / "text.jsonl").write_text(f"{longest}\n" * 24, encoding="utf-8")
        rows = [compare(engine, folder) for engine in arguments.engines or RUNS]
    record = {"limit": LIMIT, "malloc_mmap_threshold": 65536, "runs": rows}
    record["accepted"] = all(abs(row["off"]) <= LIMIT for row in rows)
    print(f"Written: {os.path.relpath(write_result('plan_resident', record))}")
    return 0 if record["accepted"] else 1


if __name__ == "__main__":
    sys.exit(main())
