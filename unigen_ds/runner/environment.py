"""``env`` of a config: settings of the process and of torch that hold for everything a run does."""

from __future__ import annotations

import os
from typing import Literal

import torch
from pydantic import Field

from unigen_ds.core.log import logger
from unigen_ds.core.settings import Section
from unigen_ds.core.values import Number

_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


class Environment(Section):
    """Settings of the process and of torch. None: not changed."""

    dist_timeout_s: Number = Field(default=1800.0, gt=0, description="seconds that a collective may wait")
    num_threads: int | None = Field(
        default=None, ge=1, description="threads of the main process (`torch.set_num_threads`)"
    )
    matmul_precision: Literal["highest", "high", "medium"] | None = Field(
        default=None,
        description="`highest`, `high` (TF32) or `medium`: `torch.set_float32_matmul_precision`, and TF32 of cuDNN"
        " unless `highest`. None: as torch has it, `highest`",
    )
    deterministic: bool | None = Field(
        default=None,
        description="`True`: deterministic algorithms alone; an operation that has none raises. None: as torch has it,"
        " False",
    )
    cuda_allocator: str | None = Field(
        default=None,
        description="settings of torch's CUDA allocator, as `PYTORCH_CUDA_ALLOC_CONF` has them:"
        " `expandable_segments:True`. A value in the environment is used instead, with a warning",
    )
    peak_tflops: Number | None = Field(
        default=None,
        gt=0,
        description="10^12 dense operations a second that one device can do in the run's precision; for `mfu` in"
        " `metrics.jsonl`. Well-known GPUs are known by name, in bf16; for others `mfu` needs this",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="of the console and of `train.log`: lines below it are left out"
    )


def apply_environment(env: Environment) -> None:
    """Set what is given. Called before the model is built and before CUDA is used."""
    if env.num_threads is not None:
        torch.set_num_threads(env.num_threads)
    if env.matmul_precision is not None:
        torch.set_float32_matmul_precision(env.matmul_precision)
        torch.backends.cudnn.allow_tf32 = env.matmul_precision != "highest"
    if env.deterministic is not None:
        if env.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with this
            torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(env.deterministic)
    if env.cuda_allocator is not None:
        _set_allocator(env.cuda_allocator)


def _set_allocator(wanted: str) -> None:
    """torch reads the variable when it first uses CUDA."""
    found = os.environ.setdefault(_ALLOCATOR, wanted)
    if found != wanted:
        logger().warning("%s=%s of the environment is used, not env.cuda_allocator=%s.", _ALLOCATOR, found, wanted)
    elif torch.cuda.is_initialized():
        logger().warning("env.cuda_allocator has no effect: this process has used CUDA before. Set %s=%s before it"
                         " starts.", _ALLOCATOR, wanted)  # fmt: skip
