"""What a run is computed on and by which code: devices, cores, versions, commits, environment variables.

Nothing large is imported: a start checks versions before torch, and spawned processes begin with this module.
"""

from __future__ import annotations

import gc
import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from unigen_ds.core.errors import ConfigError, UnigenError, raise_any

REQUIREMENTS = {"torch": ">=2.6", "transformers": ">=5"}
"""Package -> its versions. ``setup.py`` has the same; DeepSpeed's are in ``backends/deepspeed/deepspeed_config.py``."""
TOKENIZER_THREADS = "TOKENIZERS_PARALLELISM"
"""The variable that decides whether a tokenizer uses threads of its own."""


def description(*, processes: int) -> dict[str, Any]:
    """Host, system, processes, devices and command line of this process, for the record of a start."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "processes": processes,
        "cpu_cores": num_cores(),
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "threads": torch.get_num_threads(),
        "command": " ".join(sys.argv),
        **({"cuda": torch.version.cuda} if cuda else {}),
    }


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_memory() -> int:
    """Bytes of memory of this machine, or of the container that this process is in."""
    limit = Path("/sys/fs/cgroup/memory.max")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdecimal() else total


def git_commits() -> dict[str, dict[str, Any]]:
    """``package`` (of unigen_ds), ``folder`` (the present one, if another repository): ``{'commit', 'changed'}``.

    ``changed``: whether a tracked file differs, None without an answer in time. What git does not know is left out.
    """

    def git(folder: Path, *arguments: str) -> str | None:
        command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments]
        try:
            process = subprocess.run(command, capture_output=True, text=True, timeout=5.0, check=False)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            return None
        return process.stdout.strip() if process.returncode == 0 else None

    commits: dict[str, dict[str, Any]] = {}
    for name, folder in (("package", Path(__file__).resolve().parent), ("folder", Path.cwd())):
        commit = git(folder, "rev-parse", "HEAD")
        if commit is not None and git(folder, "ls-files", "--", "."):  # not an installation inside of some repository
            status = git(folder, "status", "--porcelain", "--untracked-files=no")
            commits[name] = {"commit": commit, "changed": None if status is None else bool(status)}
    if commits.get("folder") == commits.get("package"):
        commits.pop("folder", None)
    return commits


@cache
def installed_version(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def import_optional(module: str, what: str, *, install: str, kind: type[UnigenError] = ConfigError) -> Any:
    """A module of an optional package. Raises ``kind``: ``what`` needs it, and ``pip install`` with ``install``."""
    try:
        return import_module(module)
    except ImportError as error:
        problem = f"{what} needs the package {module.partition('.')[0]}: {error}"
        raise kind(problem, remedy=f"pip install {install}") from error


@cache
def source_digest(file: Path = Path(__file__).parents[1] / "__init__.py") -> str:
    """Return a digest of a module's source, or of all sources of a package: equal for equal code, wherever it is."""
    folder, digest = file.parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")) if file.name == "__init__.py" else [file]:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def check_packages(requirements: Mapping[str, str] = REQUIREMENTS) -> None:
    """Raise one ``ConfigError`` for all packages that are missing or have another version."""
    problems = []
    for package, versions in requirements.items():
        present = installed_version(package)
        if present is None or not SpecifierSet(versions).contains(present, prereleases=True):
            problem = f"{package} {present} is installed" if present else f"{package} is not installed"
            remedy = f"pip install '{package}{versions}'"
            problems.append(ConfigError(problem, allowed=f"{package} {versions}", remedy=remedy))
    raise_any(problems)


def env_number(name: str, default: int) -> int:
    """A number that the launcher has set. Raises ``ConfigError`` where the variable is none."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ConfigError(f"the environment variable {name} is {text!r}", allowed="a whole number, as launchers set it")
    return int(text)


@contextmanager
def without_collector() -> Iterator[None]:
    """Inside, many small objects are made without a look for unreachable ones, which needed half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
