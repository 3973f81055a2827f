"""Where the time of an update goes: named sections of host time, read and reset once per log line."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """``with clock('data'): ...`` adds to a section. The rest of the wall time is ``other``.

    Host time: on CUDA a section ends when its kernels are queued; the wait for them shows where the host first
    synchronises, which is ``step`` (the non-finite check reads the gradient norm).
    """

    def __init__(self) -> None:
        self._sections: dict[str, float] = {}
        self._since = time.perf_counter()

    @contextmanager
    def __call__(self, section: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._sections[section] = self._sections.get(section, 0.0) + time.perf_counter() - start

    def read(self) -> tuple[float, dict[str, float]]:
        """Seconds since the last read, and seconds by section; starts anew."""
        now = time.perf_counter()
        wall, sections = now - self._since, self._sections
        self._since, self._sections = now, {}
        return wall, sections
