"""Runs all cases, each in a process of its own: ``python -m tests.fake_cuda.worker LIBRARY OUT [CASE ...]``.

Imports are done once, then every case is forked: two at a time. Out: ``OUT/<case>.json`` (what the case found, or
``{"error": traceback}``) and ``OUT/<case>.log``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

AT_ONCE = 2
PRELOADED = (
    "unigen_ds.runner", "torch._dynamo", "torch._inductor", "torch.distributed.checkpoint",
    "torch.testing._internal.distributed.fake_pg", "torch.nn.attention.flex_attention",
    "transformers.models.llama.modeling_llama", "transformers.tokenization_utils_tokenizers",
)  # fmt: skip
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
for _name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(_name, None)


def run_case(case: Any, library: Path, out: Path) -> dict[str, Any]:
    """Train a case on the pretended device. Changes this process for good."""
    from tests.fake_cuda import cases, device, report
    from tests.fake_cuda.recorder import Recorder
    from unigen_ds.runner import Runner
    from unigen_ds.system import dist
    from unigen_ds.system.journals import read_lines

    if case.world > 1:
        os.environ.update(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(case.world), LOCAL_WORLD_SIZE=str(case.world),
            MASTER_PORT=str(dist.free_port()),
        )  # fmt: skip
    device.install(library)
    recorder = Recorder()
    found: dict[str, Any] = {"groups": 0, "whole_parameters": []}
    resume = {"resume": str(out / f"{case.name}-cpu" / "last")} if case.kind == "resume" else {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_processes(found))
        stack.enter_context(report.sharding(found))
        stack.enter_context(flex_stand_in(found))
        stack.enter_context(report.saving_ends_here(found))
        stack.enter_context(report.phases(recorder, found))
        stack.enter_context(recorder)
        config = cases.config(case, out / case.name, out / "data", **resume)
        runner = Runner.from_cfg(config, max_updates=cases.UPDATES)
        recorder.phase = "restore"
        found["restored"] = runner.progress.updates
        with report.steps(runner):
            runner.train()
            found["tensors"] = report.tensors(runner)
            found["stale"] = report.stale_masters(runner)
    found["waits"] = [[*key, number] for key, number in sorted(recorder.waits.items())]
    found["collectives"] = [[*key, number] for key, number in sorted(recorder.collectives.items())]
    found["updates"] = runner.progress.updates
    found["fused"] = bool(runner.backend._optimizer.defaults.get("fused"))  # type: ignore[attr-defined]
    found["lines"] = [line for line in read_lines(out / case.name / "metrics.jsonl") if "loss" in line]
    found["log"] = (out / case.name / "train.log").read_text()
    return found


@contextlib.contextmanager
def fake_processes(found: dict[str, Any]) -> Iterator[None]:
    """Process groups of torch's "fake" kind: this process is rank 0, the others are pretended."""
    import torch.distributed as td
    from torch.distributed import device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tests.fake_cuda.device import replaced

    def init_process_group(backend: str, **options: Any) -> None:
        found["init_process_group"] = {"backend": backend, **{k: str(options.get(k)) for k in ("device_id", "timeout")}}
        real("fake", store=FakeStore(), rank=0, world_size=int(os.environ["WORLD_SIZE"]))

    def new_group(*arguments: Any, **options: Any) -> Any:
        found["groups"] += 1
        found["group_timeout"] = str(options.get("timeout"))
        return new(*arguments, **options)

    with (
        replaced(td, "init_process_group", init_process_group) as real,
        replaced(td, "new_group", new_group) as new,
        replaced(device_mesh, "new_group", new_group),
    ):
        yield


@contextlib.contextmanager
def flex_stand_in(found: dict[str, Any]) -> Iterator[None]:
    """``torch.compile`` cannot finish for "cuda": the compiled attention checks its arguments and has their shapes."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    from tests.fake_cuda.device import replaced

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            ctx.save_for_backward(q, k, v)
            return torch.empty_like(q)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            assert all(x.dtype == grad.dtype and x.device == grad.device for x in ctx.saved_tensors)
            return tuple(map(torch.empty_like, ctx.saved_tensors))

    def attend(q: Any, k: Any, v: Any, *, block_mask: Any, enable_gqa: bool) -> Any:
        assert enable_gqa and q.shape[1] % k.shape[1] == 0 and q.dtype == k.dtype == v.dtype
        assert q.shape[-2] == block_mask.shape[-1] and q.shape[-1] >= 16
        parts = [getattr(block_mask, name) for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks",
                 "full_kv_indices", "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")]  # fmt: skip
        assert all(part.dtype == torch.int32 and part.device == q.device for part in parts)
        place = torch.zeros(1, dtype=torch.int32, device=q.device)
        mask = block_mask.mask_mod(place, place, place, place)
        assert mask.dtype == torch.bool and mask.device == q.device == k.device == v.device
        found["attention_calls"] = found.get("attention_calls", 0) + 1
        return Attention.apply(q, k, v)

    def compile_(function: Any, **options: Any) -> Any:
        return functools.wraps(function)(attend) if function is flex_attention else real(function, **options)

    with replaced(torch, "compile", compile_) as real:
        yield


def cpu_run(case: Any, out: Path) -> None:
    """The ordinary run whose checkpoint a ``resume`` case starts from."""
    from tests.fake_cuda import cases
    from unigen_ds.runner import Runner

    folder = out / f"{case.name}-cpu"
    Runner.from_cfg(cases.config(case, folder, out / "data", on_cpu=True), max_updates=cases.RESUMED_AT).train()
    name = (folder / "last_checkpoint").read_text().strip()
    (folder / "last").symlink_to(folder / name)


def _child(name: str, job: Any, out: Path) -> int:
    """Fork: the child runs ``job`` and writes what it returns."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    log = os.open(out / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        start = time.monotonic()
        found = job() or {}
        found["seconds"] = round(time.monotonic() - start, 1)
    except BaseException:
        found = {"error": traceback.format_exc()}
    (out / f"{name}.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    import torch

    from tests.fake_cuda import cases

    torch.set_num_threads(1)
    library, out, wanted = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    cases.write_data(out / "data")
    chosen = [case for case in cases.CASES if not wanted or case.name in wanted]
    jobs: list[tuple[str, Any]] = [
        (f"{case.name}-cpu", functools.partial(cpu_run, case, out)) for case in chosen if case.kind == "resume"
    ]
    jobs += [(case.name, functools.partial(run_case, case, library, out)) for case in chosen]
    running: dict[int, str] = {}
    done: set[str] = set()
    while jobs or running:
        ready = [job for job in jobs if not job[0].endswith("-resume") or f"{job[0]}-cpu" in done]
        if ready and len(running) < AT_ONCE:
            jobs.remove(ready[0])
            running[_child(*ready[0], out)] = ready[0][0]
        else:
            done.add(running.pop(os.wait()[0]))


if __name__ == "__main__":
    main()
