"""How long a start needs: from the process, or from the building of a run, to its first update.

``tools/train.py`` counts from the start of its process, so that imports are part of it; in a notebook a run counts from
where it is built.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_since: float | None = None
_whole_process = False


def begin(*, whole_process: bool = False) -> None:
    """A run begins now; with ``whole_process`` it began with this process, which a later ``begin()`` keeps."""
    global _since, _whole_process
    if not _whole_process:
        _since = time.perf_counter() - (process_age() or 0.0 if whole_process else 0.0)
        _whole_process = whole_process


def seconds() -> float | None:
    """Since the start began; None where none did. The next ``begin`` counts anew."""
    global _since, _whole_process
    found = None if _since is None else time.perf_counter() - _since
    _since, _whole_process = None, False
    return found


def process_age() -> float | None:
    """Seconds since this process was started; None where the system does not have ``/proc``."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, LookupError, AttributeError):
        return None
