"""Checkpoints as text for people, from manifests alone: only ``problems`` reads every byte of every file."""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.best_record import best_of
from unigen_ds.checkpoint.home import home_of
from unigen_ds.checkpoint.manifest import FILE_NAME, Manifest
from unigen_ds.core.errors import CheckpointError
from unigen_ds.system.files import size_text

TABLE_COLUMNS = ("name", "iteration", "updates", "epoch", "effective batch", "size", "created", "parent", "state")
COMPLETE, NEXT, VOID = "complete", "complete, --resume uses it", "complete, abandoned by a resume"


def find_checkpoints(directory: Path) -> list[store.Candidate]:
    """The checkpoints of a work dir, oldest first, or the one that ``directory`` is; ``CheckpointError`` for none."""
    if not directory.exists():
        raise store.missing(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory", remedy="name a work dir or a checkpoint in it")
    directory = home_of(directory)
    if (directory / FILE_NAME).is_file() or store.is_checkpoint_name(directory.name):
        directory = directory.resolve()
        own = [one for one in store.list_checkpoints(directory.parent) if one.path == directory]
        return own or [store.Candidate(directory, Manifest.read(directory), None)]
    checkpoints = store.list_checkpoints(directory)
    if not checkpoints:
        raise CheckpointError(f"no checkpoint found in {directory}")
    return checkpoints


def table(directory: Path) -> list[str]:
    """One line for each checkpoint, under a heading; sizes are compared, contents are not read."""
    checkpoints = find_checkpoints(directory)
    current = store.current(checkpoints)
    newest, marks, valid = current[-1].path if current else None, dict[Path, str](), {one.path for one in current}
    if newest is not None:
        try:
            if (best := best_of(newest)) is not None:
                marks[best[0]] = f"; best: {best[1].metric} {best[1].value:.6g}"
        except CheckpointError as error:  # a damaged record is shown where it is
            marks[newest] = f"; {error.problem}"
    rows: list[tuple[str, ...]] = [TABLE_COLUMNS]
    for checkpoint in checkpoints:
        path, manifest = checkpoint.path, checkpoint.manifest
        if manifest is None:
            rows.append((path.name, *["-"] * (len(TABLE_COLUMNS) - 2), str(checkpoint.problem)))
            continue
        state = NEXT if path == newest else COMPLETE if path in valid else VOID
        epoch = manifest.progress.sequences / manifest.ruler.sequences_per_epoch
        size, batch = size_text(manifest.size), manifest.geometry.global_batch_size
        numbers = (manifest.iteration, manifest.progress.updates, f"{epoch:.2f}", batch, size)
        ending = checkpoint.problem or state + marks.get(path, "")
        rows.append((path.name, *map(str, numbers), manifest.created, manifest.parent or "-", ending))
    widths = [max(len(row[i]) for row in rows) for i in range(len(TABLE_COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return lines + [f"{path}{mark}" for path, mark in marks.items() if path not in {f.path for f in checkpoints}]


def best(directory: Path) -> list[str]:
    """Path, metric, value and update of the best checkpoint of a work dir. Raises ``CheckpointError`` for none."""
    find_checkpoints(directory)
    record = best_of(home_of(directory).resolve())
    if record is None:
        remedy = "custom_hooks=[dict(type='EvaluateHook', save_best='val/loss')] keeps the best one"
        raise CheckpointError(f"no best checkpoint was recorded in {directory}", remedy=remedy)
    path, score = record
    facts = {"best": path, "metric": f"{score.metric} ({score.rule} is better)", "value": repr(score.value)}
    return [f"{name.ljust(6)}  {value}" for name, value in {**facts, "update": score.updates}.items()]


def problems(checkpoint: store.Candidate) -> str | None:
    """What is wrong with a checkpoint, every byte read; None when nothing is."""
    if checkpoint.problem is not None or checkpoint.manifest is None:
        return checkpoint.problem
    return store.verify(checkpoint.path, checkpoint.manifest, hashes=True)


def describe_checkpoint(directory: Path) -> list[str]:
    """The manifest of a checkpoint, or of the newest one of a work dir, as text."""
    from unigen_ds.schedule.schedule import Schedules  # which imports torch: a list does not wait for it

    checkpoints = find_checkpoints(directory)
    checkpoint = (store.current(checkpoints) or checkpoints)[-1]  # those without a manifest come first
    if (manifest := checkpoint.manifest) is None:
        raise CheckpointError(f"{checkpoint.path}: {checkpoint.problem}")
    progress, loader, schedules = manifest.progress, manifest.loader, Schedules.from_state_dict(manifest.schedule)
    sizes, per_epoch = Counter[str](), manifest.ruler.sequences_per_epoch
    for row in manifest.parameters:
        sizes[f"group {row['group']}" if row["trainable"] else "frozen"] += prod(row["shape"])
    facts = {
        "checkpoint": checkpoint.path,
        "state": checkpoint.problem or COMPLETE,
        "created": f"{manifest.created} as commit {manifest.commit}, after {manifest.parent or 'a fresh start'}",
        "iteration": f"{manifest.iteration} ({progress.updates} updates, {progress.skipped_updates} of them skipped)",
        "epoch": f"{progress.sequences / per_epoch:.4f} of {per_epoch:,} sequences each",
        "data seen": f"{progress.sequences:,} sequences, {progress.samples:,} samples, {progress.tokens:,} tokens",
        "effective batch": manifest.geometry,
        "first started as": manifest.ruler.geometry,
        "engine": _pairs(manifest.topology),
        "next learning rate": _pairs({group["name"]: f"{group['lr']:.6g}" for group in schedules.at(progress)}),
        "learning rate scale": f"{schedules.lr_scale:g}",
        "next sequence": _pairs(loader["cursor"]),
        "data": f"seed {loader['seed']}, fingerprint {loader['fingerprint']}",
        "parameters": f"{sizes.total():,} in {len(manifest.parameters)} tensors: "
        + _pairs({name: f"{numel:,}" for name, numel in sizes.items()}),
        "metrics": _pairs(manifest.metrics),
        "versions": _pairs(manifest.versions),
        "layout": f"{manifest.layout}, {size_text(manifest.size)}",
    }
    width = max(map(len, facts))
    lines = [f"{name.ljust(width)}  {value}" for name, value in facts.items()]
    return lines + [f"{'':{width}}  {size_text(entry.size):>10}  {entry.path}" for entry in manifest.files]


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
