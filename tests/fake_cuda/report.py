"""What a case reports: the phases of a run, and the device and dtype of everything that it holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor

from tests.fake_cuda.device import replaced
from tests.fake_cuda.recorder import Recorder
from unigen_ds.checkpoint import saver
from unigen_ds.hooks.evaluate.ema import ema_of
from unigen_ds.runner.loop.runner import Runner


def described(tensor: Tensor) -> str:
    """``cuda float32``, of the local part of a DTensor; ``pinned`` where it is page-locked."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    pinned = local.device.type == "cpu" and local.numel() > 0 and local.is_pinned()
    return f"{local.device.type} {str(local.dtype).removeprefix('torch.')}" + " pinned" * pinned


@contextlib.contextmanager
def phases(recorder: Recorder, found: dict[str, Any]) -> Iterator[None]:
    """Name what the loop is doing: ``update 2, micro-batch 1``, ``update 2, step``, ``update 2, hooks``."""
    call = Runner._call

    def called(self: Runner, point: str, *arguments: Any) -> None:
        number = self.progress.updates + (0 if point == "after_update" else 1)
        if point == "before_train_iter":
            recorder.phase = f"update {number}, micro-batch {arguments[0]}"
        elif point in ("before_update", "after_update"):
            recorder.phase = f"update {number}, hooks"
        elif point in ("after_train", "after_run"):
            recorder.phase = "end"
        call(self, point, *arguments)
        if point == "before_train_iter":
            recorder.phase = f"update {number}, micro-batch {arguments[0]}"

    with replaced(Runner, "_call", called):
        yield


@contextlib.contextmanager
def sharding(found: dict[str, Any]) -> Iterator[None]:
    """Note how many whole parameters are on the device when the next unit is sharded."""

    def shard(module: Any, **settings: Any) -> Any:
        whole = [p for p in module.parameters() if not isinstance(p, DTensor) and p.device.type == "cuda"]
        found["whole_parameters"].append(len(whole))
        return real(module, **settings)

    with replaced(fsdp, "fully_shard", shard) as real:
        yield


@contextlib.contextmanager
def steps(runner: Runner) -> Iterator[None]:
    """Mark the optimizer step as a phase."""
    step = runner.backend.step

    def stepped() -> Any:
        recorder = next(mode for mode in _modes() if isinstance(mode, Recorder))
        recorder.phase = f"update {runner.progress.updates + 1}, step"
        return step()

    with replaced(runner.backend, "step", stepped):
        yield


def _modes() -> list[Any]:
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return _get_current_dispatch_mode_stack()


@contextlib.contextmanager
def saving_ends_here(found: dict[str, Any]) -> Iterator[None]:
    """Saving ends where the shards are handed over to be written: no file gets a value of the pretended device."""

    def save(work_dir: Any, name: str, *, backend: Any, hook_shards: Any, **_: Any) -> Any:
        found["saved"] = {
            "masters": sorted({described(shard.data) for shard in backend.master_shards()}),
            "hooks": {key: sorted({described(s.data) for s in shards}) for key, shards in hook_shards.items()},
        }
        return work_dir / name

    with replaced(saver, "save", save):
        yield


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
        "parameters": {name: described(p) for name, p in backend.model.named_parameters()},
        "trainable": {name: "" for name, p in backend.model.named_parameters() if p.requires_grad},
        "masters": {shard.name: described(shard.data) for shard in backend.master_shards()},
        "moments": {f"{k}|{n}": described(t) for (k, n), t in state.items() if k != "step"},
        "steps": {n: described(t) for (k, n), t in state.items() if k == "step"},
        "ema": {shard.name: described(shard.data) for shard in ema.average.shards} if ema else {},
        "buffers": {name: described(b) for name, b in backend.model.named_buffers()},
        "other": {
            f"{name}.{key}": described(value)
            for name, module in backend.model.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, torch.Tensor)
        },
    }


def stale_masters(runner: Runner) -> int | None:
    """Masters whose memory is no longer that which ``master_data`` collected at the start; None on the device, where
    tensors have no address.
    """
    collected, now = runner.backend.master_data(), [shard.data for shard in runner.backend.master_shards()]
    if any(tensor.device.type == "cuda" for tensor in now):
        return None
    return sum(a.data_ptr() != b.data_ptr() for a, b in zip(collected, now, strict=True))
