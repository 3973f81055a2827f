"""Lines of the log about a run: at the start who it is, its model, memory and schedule; at the end where everything is,
and the command that comes next."""

from __future__ import annotations

import platform
import re
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from unigen_ds import __version__
from unigen_ds.backends.base import Backend
from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.best_record import BEST_FILE
from unigen_ds.config.paths import command
from unigen_ds.core.progress import Progress
from unigen_ds.data.datasets.dataset import PlannedDataset
from unigen_ds.families.base import Family, family_of
from unigen_ds.hooks.base import Hook
from unigen_ds.hooks.log.logger import global_memory
from unigen_ds.hooks.save.checkpoint import CheckpointHook
from unigen_ds.runner.settings.tree import Settings
from unigen_ds.runner.start.stages import Start
from unigen_ds.schedule.schedule import Schedules
from unigen_ds.system import dist, machine
from unigen_ds.system.files import read_line, size_text


def run_line(settings: Settings) -> str:
    """Versions, processes and devices, and the folder of the run."""
    commit = machine.git_commits().get("package", {})
    code = f" (commit {commit['commit'][:9]}{', with changes' * bool(commit['changed'])})" if commit else ""
    facts = machine.description(processes=dist.env_world_size())
    return (
        f"unigen_ds {__version__}{code}, PyTorch {torch.__version__}, Python {platform.python_version()};"
        f" {facts['processes']} process(es) on {facts['device']} of {facts['host']} ({facts['cpu_cores']} cores)."
        f" Output: {settings.folder}."
    )


def model_line(kind: str, parameters: Sequence[tuple[str, nn.Parameter]]) -> str:
    """Numbers of parameters: all, those of the largest parts of the model, and those that are trained."""
    sizes, each = Counter[str](), {id(parameter): (name, parameter) for name, parameter in reversed(parameters)}
    for name, parameter in reversed(each.values()):  # a tied one counts once
        sizes[name.partition(".")[0]] += parameter.numel()
    number = sum(parameter.numel() for _, parameter in each.values() if parameter.requires_grad)
    parts = [f"{name} {size / 1e6:.3g} M" for name, size in sizes.most_common(6)]
    return (
        f"Model: {kind}, {sum(sizes.values()) / 1e6:.3g} M parameters ({', '.join(parts)}{', ...' * (len(sizes) > 6)});"
        f" {number / 1e6:.3g} M are trained."
    )


def memory_line(backend: Backend) -> str:
    """What a process uses with the model and its engine, at most, and what is free on the device. Collective."""
    used = global_memory()["memory"] * 2**20
    match = re.search(r"MemAvailable: *(\d+)", read_line(Path("/proc/meminfo")) or "MemAvailable: 0")
    free = f", {size_text(1024 * int(match[1]))} are available" if match and backend.device.type == "cpu" else ""
    return (
        f"Memory: a process uses {size_text(used)} before the first update{free}; gradients, moments and activations"
        " come on top (tools/plan.py computes them)."
    )


def schedule_line(start: Start, schedules: Schedules, hooks: Sequence[Hook], *, max_updates: int | None) -> str:
    """The length of the training, the curve of the learning rate, and when checkpoints are saved."""
    progress = start.manifest.progress if start.manifest else Progress()
    size, tokens = start.geometry.global_batch_size, start.data.stream.tokens_per_sequence
    first, last = progress.updates, progress.updates + int((start.total_sequences - progress.sequences) // size)
    if last <= first:
        return f"Schedule: no update is left after update {first:,}."
    rates = {}
    for update in sorted({*range(first, last, last // 500 + 1), last - 1}):
        sequences = progress.sequences + (update - first) * size
        at = Progress(sequences, tokens=round(sequences * tokens), updates=update)
        rates[update + 1] = schedules.at(at)[0]["lr"]
    marks = sorted({min(rates), max(rates, key=rates.__getitem__), max(rates)})
    curve = ", ".join(f"{rates[update]:.3g} at update {update:,}" for update in marks)
    saves = [hook for hook in hooks if isinstance(hook, CheckpointHook) and hook.interval > 0]
    often = "".join(f" every {hook.interval:g} {hook.unit}(s) and" for hook in saves)
    until = f" (this start ends at {max_updates:,})" if max_updates is not None and max_updates < last else ""
    text = f"Schedule: updates {first + 1:,} to {last:,}{until}; learning rate {curve}; a checkpoint{often} at the end."
    return f"{text} How long: each line has the time to go (ETA)."


def outcome_line(settings: Settings, datasets: Sequence[PlannedDataset], *, complete: bool) -> str:
    """Where everything of a run is, and the command that comes next: to continue it, or to use its model. On rank 0."""
    folder, home = settings.folder, settings.checkpoints
    hints = {kind: read_line(home / file) for kind, file in (("newest", store.HINT), ("best", BEST_FILE))}
    paths = {kind: home / Path(hint).name for kind, hint in hints.items() if hint}
    files = [*(f"{path.name} ({kind} checkpoint)" for kind, path in paths.items()), "metrics.jsonl", "train.log"]
    text = f"Everything is in {folder}{f' and {home}' * (home != folder)}: {', '.join(files)}."
    commands = [command("report", str(folder))]
    if complete and paths and type(family := family_of(settings.model.cls)).inferencer is not Family.inferencer:
        counts = [dataset.counts() for dataset in datasets]
        reads = not any(one.image_targets.any() for one in counts) and any(one.images.any() for one in counts)
        own = any(not name.startswith("unigen_ds.") for name in settings.custom_imports.imports)
        options = ["--image", "FILE"] * reads + ["--understand"] * (reads and family.drawing is not None)
        options += ["--prompt", "TEXT"] + ["--allow-custom-imports"] * own
        options += [] if family.drawing or reads else ["--temperature", "0.7", "--max-length", "100"]
        commands.insert(0, command("generate", str(paths.get("best") or paths["newest"]), *options))
    elif not complete and Path(sys.argv[0]).stem in ("train", "unigen-train"):
        words = re.sub(r"--(max-updates|profile)[ =]\d+ |--local\S+ ", "", f"{shlex.join(sys.argv[1:])} ")
        train = command("train", processes=dist.env_processes_per_node() or dist.env_world_size())
        commands.insert(0, f"{train} {words}{'--resume' * ('--resume' not in words)}".strip())
    return f"{text} Next: {'; '.join(commands)}"
