"""How many things can be computed at a time on this machine. Imports nothing large: spawned processes start with it."""

from __future__ import annotations

import os

TOKENIZERS = "TOKENIZERS_PARALLELISM"
"""The variable that decides whether a tokenizer uses threads of its own."""


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
