"""How long an engine communicates, whatever the engine: the collectives of ``torch.distributed`` are timed.

Only ``ProcessGroup``'s methods and ``Work.wait`` see the collectives of FSDP2 and DeepSpeed alike, so they are wrapped
while a run trains: a wrapper calls the same function with the same arguments, returns what it returns and keeps
nothing of it. On a CPU the time is what this process spends in them; on CUDA it is that of the device, from where a
collective is queued in its stream to where the stream has its result, by events that nothing waits for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as td

from unigen_ds.core.clock import Clock, Mark

_METHODS = (
    "allreduce", "allreduce_coalesced", "reduce", "broadcast", "allgather", "reduce_scatter", "alltoall",
    "_allgather_base", "_reduce_scatter_base", "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced",
    "alltoall_base",
    # the same under their names since torch 2.13
    "all_gather_single", "reduce_scatter_single", "all_gather_single_coalesced", "reduce_scatter_single_coalesced",
    "all_to_all_single",
)  # fmt: skip
_clocks: list[Clock] = []
"""Of the runs that train in this process."""
_originals: list[tuple[Any, str, Any]] = []


@contextmanager
def timed(clock: Clock) -> Iterator[None]:
    """Inside, collectives of the sections of an update count in ``clock`` as ``communication``."""
    if not td.is_available():
        yield
        return
    if not _clocks:
        _wrap()
    _clocks.append(clock)
    try:
        yield
    finally:
        _clocks.remove(clock)
        if not _clocks:
            _restore()


def _wrap() -> None:
    pending: dict[int, Mark] = {}
    """``id`` of a work that is under way on CUDA -> where it began. An id that is used again is written again."""
    for kind, name, wrapper in [(td.ProcessGroup, n, _issuing) for n in _METHODS] + [(td.Work, "wait", _waiting)]:
        if name in vars(kind):
            _originals.append((kind, name, vars(kind)[name]))
            setattr(kind, name, wrapper(vars(kind)[name], pending))


def _restore() -> None:
    while _originals:
        setattr(*_originals.pop())


def _updating() -> Clock | None:
    """The clock of the run whose update this thread computes."""
    return next((clock for clock in _clocks if clock.in_update), None)


def _issuing(function: Callable[..., Any], pending: dict[int, Mark]) -> Callable[..., Any]:
    @functools.wraps(function)
    def issue(*arguments: Any, **named: Any) -> Any:
        clock = _updating()
        if clock is None:
            work = function(*arguments, **named)
            pending.pop(id(work), None)
            return work
        begin = clock.mark()
        work = function(*arguments, **named)
        if work is None or not clock.on_cuda:  # without a work the present stream has the result
            clock.communicated(begin)
        else:
            pending[id(work)] = begin
        return work

    return issue


def _waiting(function: Callable[..., Any], pending: dict[int, Mark]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wait(work: Any, *arguments: Any, **named: Any) -> Any:
        begin, clock = pending.pop(id(work), None), _updating()
        if clock is not None and not clock.on_cuda:
            begin = clock.mark()
        done = function(work, *arguments, **named)
        if clock is not None and begin is not None:
            clock.communicated(begin)
        return done

    return wait
