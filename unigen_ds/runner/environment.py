"""``env`` of a config: settings of the process and of torch that hold for everything a run does."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from unigen_ds.core.errors import ConfigError
from unigen_ds.core.log import logger

MATMUL_PRECISIONS = ("highest", "high", "medium")
_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


def apply_environment(env: Mapping[str, Any]) -> None:
    """Set what is given. What is left out, or None, stays as torch, or whoever has set it before, has it.

    Raises ``ConfigError``. Called before the model is built and before CUDA is used.
    """
    if (threads := env.get("num_threads")) is not None:
        if threads < 1:
            raise ConfigError(f"env.num_threads is {threads}", allowed="a whole number of at least 1")
        torch.set_num_threads(threads)
    if (precision := env.get("matmul_precision")) is not None:
        if precision not in MATMUL_PRECISIONS:
            raise ConfigError(f"env.matmul_precision is {precision!r}", allowed=", ".join(MATMUL_PRECISIONS))
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = precision != "highest"
    if (deterministic := env.get("deterministic")) is not None:
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with this
            torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(deterministic)
    if (allocator := env.get("cuda_allocator")) is not None:
        _set_allocator(allocator)


def _set_allocator(wanted: str) -> None:
    """torch reads it from the environment when it uses CUDA first."""
    found = os.environ.setdefault(_ALLOCATOR, wanted)
    if found != wanted:
        logger().warning("%s=%s of the environment is used, not env.cuda_allocator=%s.", _ALLOCATOR, found, wanted)
    elif torch.cuda.is_initialized():
        logger().warning("env.cuda_allocator has no effect: this process has used CUDA before. Set %s=%s before it"
                         " starts.", _ALLOCATOR, wanted)  # fmt: skip
