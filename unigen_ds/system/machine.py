"""What a run is computed on and by which code: plain values, for the record of a start."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from unigen_ds.system import dist

_TIMEOUT_S = 5.0


def description() -> dict[str, Any]:
    """Host, system, processes, devices and command line of this process. Not collective."""
    values: dict[str, Any] = {
        "host": platform.node(),
        "system": platform.platform(),
        "processes": dist.world_size(),
        "cpu_cores": num_cores(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "threads": torch.get_num_threads(),
        "command": " ".join(sys.argv),
    }
    return values | ({"cuda": torch.version.cuda} if torch.cuda.is_available() else {})


def git_commits() -> dict[str, dict[str, Any]]:
    """``package`` (the code of unigen_ds) and ``folder`` (the present folder, where it is another repository):
    ``{'commit', 'changed'}``; ``changed``: whether a tracked file differs, None where git did not answer in time.

    A folder outside of git, or a machine without git, is left out.
    """
    package, folder = git_commit(Path(__file__).resolve().parent), git_commit(Path.cwd())
    commits = {"package": package} if package else {}
    return commits | ({"folder": folder} if folder and folder != package else {})


def git_commit(folder: Path) -> dict[str, Any] | None:
    """The commit of the repository that tracks ``folder``; None where none does."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None or not _git(folder, "ls-files", "--", "."):  # an installation inside of some other repository
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit.strip(), "changed": None if changed is None else bool(changed.strip())}


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return ended.stdout if ended.returncode == 0 else None


# How many things can be computed at a time on this machine. Imports nothing large: spawned processes start with it.

TOKENIZERS = "TOKENIZERS_PARALLELISM"
"""The variable that decides whether a tokenizer uses threads of its own."""


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
