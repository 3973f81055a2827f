"""Checkpoints written by plain DeepSpeed, without this project: ``python -m tests.checkpoint.plain_deepspeed OUT``.

Two forked processes over gloo train a small model with all cases that are difficult to merge: odd sizes, tied weights,
a frozen module, two groups, buffers. ``OUT/<case>/`` is the directory of a user; ``OUT/<case>.safetensors``
has the weights of the engine. The case ``mmengine`` has the structure and the content of mmengine's strategy.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

STEPS, MICRO, ACCUMULATE = 3, 2, 2
ZERO3 = {"stage": 3, "stage3_param_persistence_threshold": 0}
CASES: dict[str, dict[str, Any]] = {
    "zero0": {},
    "zero1-bf16": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    "zero2": {"zero_optimization": {"stage": 2}},
    "zero2-bf16": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
    "zero2-offload": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    "zero3": {"zero_optimization": ZERO3},
    "zero3-bf16": {"zero_optimization": ZERO3, "bf16": {"enabled": True}},
    "mmengine": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
}
ZERO = [name for name in CASES if name != "zero0"]


class AwkwardModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(37, 13)
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.block = nn.Sequential(nn.Linear(13, 31), nn.GELU(), nn.Linear(31, 13))
        self.norm = nn.LayerNorm(13)
        self.head = nn.Linear(13, 37, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("gain", torch.tensor([0.5, 1.5, 2.5]))
        self.register_buffer("calls", torch.arange(5))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.emb(ids)
        hidden = hidden + self.block(self.norm(self.frozen(hidden))) * self.gain[1].to(hidden.dtype)
        return self.head(hidden).float().square().mean()

    def groups(self) -> list[dict[str, Any]]:
        parameters = {name: p for name, p in self.named_parameters() if p.requires_grad}
        return [
            {"params": [p for name, p in parameters.items() if "norm" not in name], "lr": 1e-2},
            {"params": [p for name, p in parameters.items() if "norm" in name], "lr": 1e-3, "weight_decay": 0.0},
        ]


def mmengine_state() -> dict[str, Any]:
    """The client state that ``mmengine``'s runner and strategy pass to DeepSpeed, with its own classes and numpy's."""
    import numpy as np
    from mmengine.config import ConfigDict
    from mmengine.logging import MessageHub

    hub = MessageHub("plain")
    for value in (2.5, 2.25):
        hub.update_scalar("train/loss", value)
    hub.update_info("iter", STEPS * ACCUMULATE)
    hub.update_info("last_step", np.int64(3))
    meta = {"cfg": "max_epochs = 4\n", "seed": 7, "epoch": 1, "iter": STEPS * ACCUMULATE, "experiment_name": "plain",
            "mmengine": "0.10.7", "dataset_meta": ConfigDict(classes=("a", "b"))}  # fmt: skip
    return {"meta": meta, "message_hub": hub.state_dict(), "param_schedulers": [{"last_step": 3, "base_values": [0.1]}]}


def train(case: str, out: Path) -> None:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATE,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **CASES[case],
    }
    torch.manual_seed(0)
    model = AwkwardModel()
    optimizer = torch.optim.AdamW(model.groups(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(STEPS * ACCUMULATE):
        loss = engine(torch.randint(37, (MICRO, 5), generator=generator))
        engine.backward(loss)
        engine.step()
    if case == "mmengine":
        engine.save_checkpoint(str(out / case), tag="iter_6.pth", client_state=mmengine_state(), save_latest=False)
    else:
        engine.save_checkpoint(str(out / case), client_state={"note": "mine"})
    if CASES[case].get("zero_optimization"):
        whole = _masters(engine)
        if torch.distributed.get_rank() == 0:
            save_file(whole, out / f"{case}.safetensors")
    torch.distributed.barrier()
    engine.destroy()


def _masters(engine: Any) -> dict[str, torch.Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    masters = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            masters[name] = safe_get_full_fp32_param(parameter).detach().clone().contiguous()
    return masters


def run(out: Path) -> None:
    from unigen_ds.system.dist import free_port

    port, children = free_port(), []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            _process(rank, port, out)
        children.append(child)
    for child in children:
        _, status = os.waitpid(child, 0)
        if status:
            logs = "\n".join(path.read_text()[-4000:] for path in sorted(out.glob("*.log")))
            raise RuntimeError(f"plain DeepSpeed ended with {status}\n{logs}")


def _process(rank: int, port: int, out: Path) -> None:
    status = 1
    try:
        log = os.open(out / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", OMP_NUM_THREADS="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
        torch.set_num_threads(1)
        import deepspeed

        from unigen_ds.backends.deepspeed.deepspeed import leave_out_operator

        leave_out_operator()
        deepspeed.init_distributed(dist_backend="gloo")
        for case in CASES:
            train(case, out)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


_OUT = Path(tempfile.mkdtemp(prefix="plain-deepspeed-"))
"""Made when the tests are collected: of all processes that run them (``tests/support/lanes.py``)."""
_OWNER = os.getpid()


@cache
def checkpoints() -> Path:
    """The folder of all cases, written once per test session."""
    from tests.support.processes import ENVIRONMENT, ROOT, run

    with (_OUT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (_OUT / "done").exists():
            command = [sys.executable, "-m", "tests.checkpoint.plain_deepspeed", str(_OUT)]
            process = run(command, cwd=ROOT, text=True, timeout=600, env=ENVIRONMENT)
            assert process.returncode == 0, process.stderr[-8000:]
            (_OUT / "done").touch()
    return _OUT


@atexit.register
def _remove() -> None:
    if os.getpid() == _OWNER:
        shutil.rmtree(_OUT, ignore_errors=True)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
