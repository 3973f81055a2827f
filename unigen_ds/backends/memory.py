"""Memory for a model that was built on the meta device: an engine moves what has memory, shards, and replaces the rest
by uninitialised tensors (``allocate``), which ``load_tensors`` then fills.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def on_meta(model: nn.Module) -> bool:
    """Whether weights are without memory yet: they are read once the model is sharded."""
    return any(parameter.is_meta for parameter in model.parameters())


@torch.no_grad()
def allocate(
    model: nn.Module,
    make: Callable[[Tensor], Tensor],
    *,
    make_buffer: Callable[[Tensor], Tensor] | None = None,
    finish: Callable[[nn.Parameter], None] | None = None,
    replaces: Callable[[Tensor], bool] = lambda tensor: tensor.is_meta,
) -> None:
    """Replace every tensor on the meta device, or that ``replaces`` chooses, by ``make(tensor)``, a buffer by
    ``make_buffer(tensor)`` where that differs; tied ones remain one. ``finish`` gets every new parameter before the
    next is made.
    """
    replacements: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and replaces(parameter):
                if id(parameter) not in replacements:
                    new = nn.Parameter(make(parameter), requires_grad=parameter.requires_grad)
                    if finish:
                        finish(new)
                    replacements[id(parameter)] = new
                module._parameters[name] = replacements[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and replaces(buffer):
                module._buffers[name] = (make_buffer or make)(buffer)


@contextmanager
def blocks_freed_at_once() -> Iterator[None]:
    """Inside, freed blocks of 1 MiB and more return to the system at once: glibc keeps those below a threshold, which
    rises to 32 MiB, and while a model is sharded the fragmented memory would be as large as a second shard.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not every C library has it
    if mallopt:
        mallopt(_M_MMAP_THRESHOLD, 2**20)
    try:
        yield
    finally:
        if mallopt:
            mallopt(_M_MMAP_THRESHOLD, 2**25)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the memory of a device or of the host ran out. On the CPU torch raises a plain ``RuntimeError``."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
