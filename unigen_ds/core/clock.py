"""What the time of an update is spent on: named sections, read and reset once per log line."""

from __future__ import annotations

import threading
import time

import torch

DEVICE_SECTIONS = ("forward_backward", "step")
"""Sections that queue work for the device: on CUDA their time is the device's."""
EVALUATION = "evaluation"
"""Section of what is no part of an update."""
COMMUNICATION = "communication"
"""Section of ``core/collectives.py``: on a CPU taken out of the section around it; on CUDA it may overlap with it."""

Mark = float | torch.cuda.Event
"""A point in time: of the host, in seconds, or of a device."""


class Clock:
    """``with clock('data'): ...`` adds to a section. The rest of the wall time is ``other``.

    On a CPU this is host time. On CUDA the host is ahead of the device and waits for it where it first reads a value,
    in ``step``; host time would count all of the waiting in that section. So ``DEVICE_SECTIONS`` are measured by events
    that the device itself records. They are read once it has passed them, so nothing waits for them: what is not yet
    passed counts at the next read.
    """

    def __init__(self, *, device: torch.device | None = None) -> None:
        self.on_cuda = device is not None and device.type == "cuda"
        self._sections: dict[str, float] = {}
        self.totals: dict[str, float] = {}
        """Seconds by section since the clock was made; reading does not reset them."""
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._overlapping: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        """Of other streams, which pass their events in another order."""
        self._since = time.perf_counter()
        self._current: str | None = None
        self._thread = threading.get_ident()

    @property
    def in_update(self) -> bool:
        """Whether a section of ``DEVICE_SECTIONS`` is being timed; on a CPU: by this thread."""
        return self._current is not None and (self.on_cuda or self._thread == threading.get_ident())

    def mark(self) -> Mark:
        """Now: seconds on a CPU, on CUDA an event of the present stream."""
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def communicated(self, since: Mark) -> None:
        """Count communication inside of the present section, from a mark until now."""
        now = self.mark()
        if not isinstance(since, float) and not isinstance(now, float):
            self._overlapping.append((COMMUNICATION, since, now))
        elif isinstance(since, float) and isinstance(now, float) and self._current is not None:
            self._add(COMMUNICATION, now - since)
            self._add(self._current, since - now)

    def __call__(self, section: str) -> _Timed:
        """Time what is inside of ``with``."""
        return _Timed(self, section)

    def _add(self, section: str, seconds: float) -> None:
        self._sections[section] = self._sections.get(section, 0.0) + seconds
        self.totals[section] = self.totals.get(section, 0.0) + seconds

    def read(self) -> tuple[float, dict[str, float]]:
        """Seconds since the last read, and seconds by section; starts anew."""
        passed = [event for event in self._events if event[2].query()]
        self._events = self._events[len(passed) :]  # they are passed in the order in which they were recorded
        overlapping, self._overlapping = self._overlapping, []
        for event in overlapping:
            (passed if event[1].query() and event[2].query() else self._overlapping).append(event)
        for section, start, end in passed:
            self._add(section, start.elapsed_time(end) / 1000.0)
        now = time.perf_counter()
        wall, sections = now - self._since, self._sections
        self._since, self._sections = now, {}
        return wall, sections


class _Timed:
    """One section, while it is timed: a class, since generators cost more than what they time here."""

    __slots__ = ("_begin", "_clock", "_outer", "_section")

    def __init__(self, clock: Clock, section: str) -> None:
        self._clock, self._section = clock, section

    def __enter__(self) -> None:
        clock, section = self._clock, self._section
        of_device = section in DEVICE_SECTIONS
        self._outer, clock._thread = clock._current, threading.get_ident()
        clock._current = section if of_device else None
        self._begin = clock.mark() if of_device else time.perf_counter()

    def __exit__(self, *error: object) -> None:
        clock, begin = self._clock, self._begin
        clock._current = self._outer
        if isinstance(begin, float):
            clock._add(self._section, time.perf_counter() - begin)
        else:
            end = clock.mark()
            assert not isinstance(end, float)
            clock._events.append((self._section, begin, end))
