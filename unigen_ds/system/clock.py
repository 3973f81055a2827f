"""What the time of an update is spent on: named sections, read and reset once per log line."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as td

DEVICE_SECTIONS = ("forward_backward", "step")
"""Sections that queue work for the device: on CUDA their time is the device's."""
EVALUATION = "evaluation"
"""Section of what is no part of an update."""
COMMUNICATION = "communication"
"""Section of ``system/clock.py``: on a CPU taken out of the section around it; on CUDA it may overlap with it."""

_Mark = Any
"""A point in time: of the host, in seconds, or an event of a CUDA device."""


class Clock:
    """``with clock('data'): ...`` adds to a section. The rest of the wall time is ``other``.

    On a CPU this is host time. On CUDA the host is ahead of the device and would wait in ``step`` for all of it, so
    ``DEVICE_SECTIONS`` are measured by events that the device itself records. They are read once it has passed them, so
    nothing waits for them: what is not yet passed counts at the next read.
    """

    def __init__(self, *, device: torch.device | None = None, began: float = 0.0) -> None:
        self.on_cuda = device is not None and device.type == "cuda"
        self.began = began
        """When the building of the run began, of ``time.perf_counter``."""
        self._sections: dict[str, float] = {}
        self.totals: dict[str, float] = {}
        """Seconds by section since the clock was made; reading does not reset them."""
        self._events: list[tuple[str, _Mark, _Mark]] = []
        """Section, begin and end of what the device may not have passed yet."""
        self._since = time.perf_counter()
        self.section, self.num_sections = "start", 0
        """What the thread that trains does, and how many sections it has begun."""
        self._current: str | None = None
        self._thread = threading.get_ident()
        self.labels = False  # whether a profile names the sections

    @property
    def in_update(self) -> bool:
        """Whether a section of ``DEVICE_SECTIONS`` is being timed; on a CPU: by this thread."""
        return self._current is not None and (self.on_cuda or self._thread == threading.get_ident())

    def mark(self) -> _Mark:
        """Now: seconds on a CPU, on CUDA an event of the present stream."""
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add_communication(self, since: _Mark) -> None:
        """Count communication inside of the present section, from a mark until now."""
        now = self.mark()
        if self.on_cuda:
            self._events.append((COMMUNICATION, since, now))
        elif self._current is not None:
            self._add(COMMUNICATION, now - since)
            self._add(self._current, since - now)

    @contextmanager
    def __call__(self, section: str) -> Iterator[None]:
        """Time what is inside of ``with``."""
        of_device = section in DEVICE_SECTIONS
        outer, outer_section, self._thread = self._current, self.section, threading.get_ident()
        self._current, self.section = section if of_device else None, section
        self.num_sections += 1
        begin = self.mark() if of_device else time.perf_counter()
        try:
            with torch.profiler.record_function(section) if self.labels else nullcontext():
                yield
        finally:
            self._current = outer
            if of_device and self.on_cuda:
                self._events.append((section, begin, self.mark()))
            else:
                self._add(section, time.perf_counter() - begin)
        self.section = outer_section  # after an error it is still the present one

    def _add(self, section: str, seconds: float) -> None:
        self._sections[section] = self._sections.get(section, 0.0) + seconds
        self.totals[section] = self.totals.get(section, 0.0) + seconds

    def read(self) -> tuple[float, dict[str, float]]:
        """Seconds since the last read, and seconds by section; starts anew."""
        events, self._events = self._events, []
        for section, begin, end in events:
            if begin.query() and end.query():  # streams pass their events in different orders
                self._add(section, begin.elapsed_time(end) / 1000.0)
            else:
                self._events.append((section, begin, end))
        now = time.perf_counter()
        wall, sections = now - self._since, self._sections
        self._since, self._sections = now, {}
        return wall, sections


# How long an engine communicates, whatever the engine: the collectives of ``torch.distributed`` are timed.

_METHODS = (
    "allreduce", "allreduce_coalesced", "reduce", "broadcast", "allgather", "reduce_scatter", "alltoall",
    "_allgather_base", "_reduce_scatter_base", "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced",
    "alltoall_base",
    # the same under their names since torch 2.13
    "all_gather_single", "reduce_scatter_single", "all_gather_single_coalesced", "reduce_scatter_single_coalesced",
    "all_to_all_single",
)  # fmt: skip


@contextmanager
def count_communication(clock: Clock) -> Iterator[None]:
    """Inside, ``clock`` counts an update's collectives, and waits for them (on CUDA those of the present stream)."""
    kinds = [(td.ProcessGroup, name) for name in _METHODS] + [(td.Work, "wait")] if td.is_available() else []
    originals = [(kind, name, vars(kind)[name]) for kind, name in kinds if name in vars(kind)]

    def time_call(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            if not clock.in_update:
                return function(*arguments, **options)
            begin = clock.mark()
            result = function(*arguments, **options)
            clock.add_communication(begin)
            return result

        return call

    for kind, name, function in originals:
        setattr(kind, name, time_call(function))
    try:
        yield
    finally:
        for kind, name, function in originals:
            setattr(kind, name, function)
