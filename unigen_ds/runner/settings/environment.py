"""``env`` of a config: settings of the process and of torch that hold for everything a run does."""

from __future__ import annotations

import os
from typing import Literal

import torch
from pydantic import Field

from unigen_ds.config.section import Section
from unigen_ds.config.values import Number
from unigen_ds.system.log import logger
from unigen_ds.system.machine import TOKENIZER_THREADS

_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


class Environment(Section):
    """Settings of the process and of torch. None: not changed. A variable of the environment overrides the key."""

    dist_timeout_s: Number = Field(default=1800.0, gt=0)
    """Seconds that a collective may wait."""
    num_threads: int | None = Field(default=None, ge=1)
    """Threads of the main process (`torch.set_num_threads`)."""
    matmul_precision: Literal["highest", "high", "medium"] | None = None
    """`highest`, `high` (TF32) or `medium`: `torch.set_float32_matmul_precision`, and TF32 of cuDNN unless `highest`.
    None: as torch has it, `highest`."""
    deterministic: bool | None = None
    """`True`: deterministic algorithms alone; an operation that has none raises. None: as torch has it, False."""
    cuda_allocator: str | None = "expandable_segments:True"
    """Settings of torch's CUDA allocator: `PYTORCH_CUDA_ALLOC_CONF`. The default keeps packed sequences, whose lengths
    differ, from fragmenting the memory. `PYTORCH_CUDA_ALLOC_CONF` or `PYTORCH_ALLOC_CONF` in the environment is used
    instead, with a warning where this key is given, too. None: as torch has it."""
    tokenizers_parallelism: bool | None = False
    """Threads in a tokenizer: `TOKENIZERS_PARALLELISM`. False, because records are planned by threads and batches made
    by worker processes already. `TOKENIZERS_PARALLELISM` in the environment is used instead, but not in worker
    processes, where threads could wait for ever."""
    peak_tflops: Number | None = Field(default=None, gt=0)
    """10^12 dense operations a second that one device can do in the run's precision; for `mfu` in `metrics.jsonl`.
    Well-known GPUs are known by name, in bf16; for others `mfu` needs this."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Level of the console and of `train.log`: lines below it are left out."""


def apply_variables(env: Environment) -> None:
    """Set what is read from the environment. Called first of all, before CUDA is used."""
    if env.cuda_allocator is not None:
        name = next((name for name in (_ALLOCATOR, "PYTORCH_ALLOC_CONF") if name in os.environ), _ALLOCATOR)
        current = os.environ.setdefault(name, env.cuda_allocator)
        if "cuda_allocator" in env.model_fields_set and current != env.cuda_allocator:
            logger().warning(
                "%s=%s of the environment is used, not env.cuda_allocator=%s.", name, current, env.cuda_allocator
            )
    if env.tokenizers_parallelism is not None:
        os.environ.setdefault(TOKENIZER_THREADS, str(env.tokenizers_parallelism).lower())


def apply_environment(env: Environment) -> None:
    """Set what is given, apart from ``apply_variables``. Called before the model is built."""
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
