"""Used by every benchmark: a description of the machine, a median with its interval, a result file with a new name."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unigen_ds.checkpoint.manifest import current_versions

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
RESAMPLES = 10_000
REAL_HOOKS: dict[str, Any] = {
    "default_hooks.checkpoint": {"type": "CheckpointHook", "unit": "update", "interval": 10**6, "max_keep_ckpts": 2},
    "custom_hooks": [{"type": "EMAHook", "momentum": 0.0001}],
}
"""Overrides of a config: what the shipped config of BAGEL has beside the default hooks; no save is due in a block."""


def interval(ratios: Sequence[float]) -> dict[str, float]:
    """Median and its 95 % confidence interval: percentiles of the medians of re-sampled values (bootstrap)."""
    values = np.asarray(ratios)
    resamples = np.random.default_rng(0).choice(values, size=(RESAMPLES, len(values)))
    low, high = np.percentile(np.median(resamples, axis=1), [2.5, 97.5])
    return {"median": float(np.median(values)), "low": float(low), "high": float(high)}


def environment() -> dict[str, Any]:
    """Machine, versions and commit of a result."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")]
    return {
        "commit": _git("rev-parse", "HEAD").strip() or None,
        "changed_files": [line[3:] for line in _git("status", "--porcelain", "unigen_ds").splitlines()],
        "machine": f"{platform.system()} {platform.machine()}",
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "versions": current_versions(),
    }


def _git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True).stdout


def write_result(name: str, record: Mapping[str, Any], *, folder: Path = RESULTS) -> Path:
    """Write ``<name>_<date>.json``; if it exists, ``<name>_<date>_2.json`` and so on."""
    today = datetime.date.today().isoformat()
    folder.mkdir(parents=True, exist_ok=True)
    path, number = folder / f"{name}_{today}.json", 2
    while path.exists():
        path, number = folder / f"{name}_{today}_{number}.json", number + 1
    path.write_text(json.dumps({"name": name, "date": today, **environment(), **record}, indent=1) + "\n")
    return path
