"""The devices of this machine, asked by a process of its own: CUDA in this one would prevent it from being forked."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from unigen_ds.planning.forked import in_processes


@dataclass(frozen=True)
class Hardware:
    """CUDA devices that this process may use."""

    count: int
    name: str = ""
    """Of the first, as the next three."""
    memory: int = 0
    free: int = 0
    bf16: bool = True


def find_hardware() -> Hardware:
    """Asked once: afterwards this process and its children use no device. Raises nothing."""
    found, _ = in_processes({"devices": _found}, jobs=1)["devices"]
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    return Hardware(**found) if found else Hardware(0)


def _found() -> dict[str, object]:
    if not torch.cuda.is_available():
        return {"count": 0}
    free, memory = torch.cuda.mem_get_info(0)
    return {
        "count": torch.cuda.device_count(),
        "name": torch.cuda.get_device_name(0),
        "memory": memory,
        "free": free,
        "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
    }
