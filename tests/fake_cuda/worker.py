"""Trains a case on the pretended device: ``python -m tests.fake_cuda.worker CASE OUT LIBRARY``.

Out: ``OUT/<case>.json``: the waits and collectives of each phase of the run, and the device and dtype of everything
that it holds. Without ``LIBRARY``: the ordinary run whose checkpoint a ``resume`` case starts from.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td
from torch import Tensor
from torch.distributed import device_mesh, fsdp
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import flex_attention
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.fake_cuda import cases, device
from tests.fake_cuda.device import replace
from tests.fake_cuda.recorder import Recorder
from unigen_ds.checkpoint import saver
from unigen_ds.hooks.evaluate.ema import ema_of
from unigen_ds.runner.loop.runner import Runner
from unigen_ds.system import dist

Found = dict[str, Any]


def run_case(case: cases.Case, library: Path, out: Path) -> Found:
    """Changes this process for good."""
    resume = {"resume": str(next((out / f"{case.name}-cpu").glob("*.pth")))} if case.kind == "resume" else {}
    if case.world > 1:
        os.environ.update(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(case.world), LOCAL_WORLD_SIZE=str(case.world),
            MASTER_PORT=str(dist.free_port()),
        )  # fmt: skip
    device.install(library)
    recorder = Recorder()
    facts: Found = {"groups": 0, "whole_parameters": []}
    with contextlib.ExitStack() as stack:
        for replacement in (fake_processes, sharding, flex_stand_in, saving_ends_here):
            stack.enter_context(replacement(facts))
        stack.enter_context(phases(recorder))
        stack.enter_context(recorder)
        runner = Runner.from_cfg(cases.config(case, out / case.name, out / "data", **resume), max_updates=cases.UPDATES)
        recorder.phase = "restore"
        facts["restored"] = runner.progress.updates
        with replace(runner.backend, "step", functools.partial(step, runner, recorder, runner.backend.step)):
            runner.train()
            facts["tensors"] = tensors(runner)
            facts["stale"] = stale_masters(runner)
    facts["waits"] = [[*key, number] for key, number in sorted(recorder.waits.items())]
    facts["collectives"] = [[*key, number] for key, number in sorted(recorder.collectives.items())]
    facts["updates"] = runner.progress.updates
    facts["fused"] = bool(runner.backend._optimizer.defaults.get("fused"))  # type: ignore[attr-defined]
    return facts


# ---- what is replaced -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def fake_processes(facts: Found) -> Iterator[None]:
    """Process groups of torch's "fake" kind: this process is rank 0, the others are pretended."""

    def init_process_group(backend: str, **options: Any) -> None:
        facts["init_process_group"] = {"backend": backend, **{k: str(options.get(k)) for k in ("device_id", "timeout")}}
        real("fake", store=FakeStore(), rank=0, world_size=int(os.environ["WORLD_SIZE"]))

    def new_group(*arguments: Any, **options: Any) -> Any:
        facts["groups"] += 1
        facts["group_timeout"] = str(options.get("timeout"))
        return new(*arguments, **options)

    with (
        replace(td, "init_process_group", init_process_group) as real,
        replace(td, "new_group", new_group) as new,
        replace(device_mesh, "new_group", new_group),
    ):
        yield


@contextlib.contextmanager
def sharding(facts: Found) -> Iterator[None]:
    """Note how many whole parameters are on the device when the next unit is sharded."""

    def shard(module: Any, **settings: Any) -> Any:
        whole = [p for p in module.parameters() if not isinstance(p, DTensor) and p.device.type == "cuda"]
        facts["whole_parameters"].append(len(whole))
        return real(module, **settings)

    with replace(fsdp, "fully_shard", shard) as real:
        yield


class Attention(torch.autograd.Function):
    """Of the shapes of the compiled attention."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        assert all(x.dtype == grad.dtype and x.device == grad.device for x in ctx.saved_tensors)
        return tuple(map(torch.empty_like, ctx.saved_tensors))


@contextlib.contextmanager
def flex_stand_in(facts: Found) -> Iterator[None]:
    """``torch.compile`` cannot finish for "cuda": the compiled attention checks its arguments and has their shapes."""

    def attend(q: Any, k: Any, v: Any, *, block_mask: Any, enable_gqa: bool) -> Any:
        assert enable_gqa and q.shape[1] % k.shape[1] == 0 and q.dtype == k.dtype == v.dtype
        assert q.shape[-2] == block_mask.shape[-1] and q.shape[-1] >= 16
        parts = [getattr(block_mask, name) for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks",
                 "full_kv_indices", "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")]  # fmt: skip
        assert all(part.dtype == torch.int32 and part.device == q.device for part in parts)
        place = torch.zeros(1, dtype=torch.int32, device=q.device)
        mask = block_mask.mask_mod(place, place, place, place)
        assert mask.dtype == torch.bool and mask.device == q.device == k.device == v.device
        facts["attention_calls"] = facts.get("attention_calls", 0) + 1
        return Attention.apply(q, k, v)

    def compile_(function: Any, **options: Any) -> Any:
        return functools.wraps(function)(attend) if function is flex_attention else real(function, **options)

    with replace(torch, "compile", compile_) as real:
        yield


@contextlib.contextmanager
def saving_ends_here(facts: Found) -> Iterator[None]:
    """Saving ends where the shards are handed over to be written: no file gets a value of the pretended device."""

    def save(work_dir: Any, name: str, *, backend: Any, hook_shards: Any, **_: Any) -> Any:
        facts["saved"] = {
            "masters": sorted({describe(shard.data) for shard in backend.master_shards()}),
            "hooks": {key: sorted({describe(s.data) for s in shards}) for key, shards in hook_shards.items()},
        }
        return work_dir / name

    with replace(saver, "save", save):
        yield


@contextlib.contextmanager
def phases(recorder: Recorder) -> Iterator[None]:
    """Name what the loop is doing: ``update 2, micro-batch 1``, ``update 2, hooks``."""

    def call(self: Runner, point: str, *arguments: Any) -> None:
        number = self.progress.updates + (0 if point == "after_update" else 1)
        if point in ("before_update", "after_update"):
            recorder.phase = f"update {number}, hooks"
        elif point in ("after_train", "after_run"):
            recorder.phase = "end"
        elif point == "before_train_iter":
            recorder.phase = f"update {number}, micro-batch {arguments[0]}"
        real(self, point, *arguments)

    with replace(Runner, "_call", call) as real:
        yield


def step(runner: Runner, recorder: Recorder, real: Any) -> Any:
    """The optimizer's step is a phase: ``update 2, step``."""
    recorder.phase = f"update {runner.progress.updates + 1}, step"
    return real()


# ---- what a run holds -----------------------------------------------------------------------------------------------


def describe(tensor: Tensor) -> str:
    """``cuda float32``, of the local part of a DTensor; ``pinned`` where it is page-locked."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    pinned = local.device.type == "cpu" and local.numel() > 0 and local.is_pinned()
    return f"{local.device.type} {str(local.dtype).removeprefix('torch.')}" + " pinned" * pinned


def tensors(runner: Runner) -> dict[str, dict[str, str]]:
    """Device and dtype of every parameter, master, moment, step, average and buffer, by name."""
    backend: Any = runner.backend
    state = {
        (kind, name): value
        for name in backend._trainable
        for kind, value in backend._optimizer.state[backend._masters[name]].items()
    }
    ema = ema_of(runner)
    return {
        "parameters": {name: describe(p) for name, p in backend.model.named_parameters()},
        "trainable": {name: "" for name, p in backend.model.named_parameters() if p.requires_grad},
        "masters": {shard.name: describe(shard.data) for shard in backend.master_shards()},
        "moments": {f"{k}|{n}": describe(t) for (k, n), t in state.items() if k != "step"},
        "steps": {n: describe(t) for (k, n), t in state.items() if k == "step"},
        "ema": {shard.name: describe(shard.data) for shard in ema.average.shards} if ema else {},
        "buffers": {name: describe(b) for name, b in backend.model.named_buffers()},
        "other": {
            f"{name}.{key}": describe(value)
            for name, module in backend.model.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, Tensor)
        },
    }


def stale_masters(runner: Runner) -> int | None:
    """Masters whose memory is no longer that which ``master_data`` collected at the start; None on the device, where
    tensors have no address.
    """
    start, now = runner.backend.master_data(), [shard.data for shard in runner.backend.master_shards()]
    if any(tensor.device.type == "cuda" for tensor in now):
        return None
    return sum(a.data_ptr() != b.data_ptr() for a, b in zip(start, now, strict=True))


def main() -> None:
    torch.set_num_threads(1)
    name, out, *library = sys.argv[1:]
    case = cases.CASES[name]
    if library:
        (Path(out) / f"{name}.json").write_text(json.dumps(run_case(case, Path(library[0]), Path(out))))
    else:
        settings = cases.config(case, Path(out) / f"{name}-cpu", Path(out) / "data", on_cpu=True)
        Runner.from_cfg(settings, max_updates=cases.RESUMED_AT).train()


if __name__ == "__main__":
    main()
