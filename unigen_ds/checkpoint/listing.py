"""Checkpoints as text for people: a table of a work dir, what is wrong with each, and one manifest as text.

In: a work dir or a checkpoint directory. Out: lines of text. Only manifests are read, except by ``problems``, which
reads every byte of every file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.best_record import best_of
from unigen_ds.checkpoint.home import home_of
from unigen_ds.checkpoint.manifest import FILE_NAME, Manifest
from unigen_ds.checkpoint.store import Found, Lineage
from unigen_ds.core.errors import CheckpointError
from unigen_ds.schedule.schedule import Schedules

COLUMNS = ("name", "iteration", "updates", "epoch", "effective batch", "size", "created", "parent", "state")
COMPLETE, NEXT, ABANDONED = "complete", "complete, --resume uses it", "complete, abandoned by a resume"


def find(directory: Path) -> list[Found]:
    """The checkpoints of a work dir, oldest first, or the one that ``directory`` is.

    Raises ``CheckpointError`` when there is none.
    """
    if not directory.exists():
        raise store.missing(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory", remedy="name a work dir or a checkpoint in it")
    directory = home_of(directory)
    if (directory / FILE_NAME).is_file() or store.is_checkpoint_name(directory.name):
        directory = directory.resolve()
        listing = store.list_checkpoints(directory.parent)
        return [one for one in listing if one.path == directory] or [Found(directory, Manifest.read(directory), None)]
    checkpoints = store.list_checkpoints(directory)
    if not checkpoints:
        raise CheckpointError(f"no checkpoint found in {directory}")
    return checkpoints


def table(directory: Path) -> list[str]:
    """One line for each checkpoint, under a heading; sizes are compared, contents are not read."""
    checkpoints = find(directory)
    abandoned = Lineage.read(checkpoints[0].path.parent).abandoned
    good = [f for f in checkpoints if f.problem is None and f.manifest and f.manifest.commit not in abandoned]
    newest = good[-1].path if good else None
    marks = _best_marks(newest)
    rows = [COLUMNS, *(_row(f, abandoned=abandoned, newest=newest, marks=marks) for f in checkpoints)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return lines + [f"{path}{mark}" for path, mark in marks.items() if path not in {f.path for f in checkpoints}]


def best(directory: Path) -> list[str]:
    """Path, metric, value and update of the best checkpoint of a work dir.

    Raises ``CheckpointError`` where the run has none, or it is gone.
    """
    find(directory)
    record = best_of(home_of(directory).resolve())
    if record is None:
        remedy = "custom_hooks=[dict(type='EvaluateHook', save_best='val/loss')] keeps the best one"
        raise CheckpointError(f"no best checkpoint was recorded in {directory}", remedy=remedy)
    path, chosen = record
    facts = {"best": path, "metric": f"{chosen.metric} ({chosen.rule} is better)", "value": repr(chosen.value)}
    return [f"{name.ljust(6)}  {value}" for name, value in {**facts, "update": chosen.updates}.items()]


def _best_marks(newest: Path | None) -> dict[Path, str]:
    """What to add to the state of the best checkpoint; a damaged record is shown where it is."""
    if newest is None:
        return {}
    try:
        record = best_of(newest)
    except CheckpointError as error:
        return {newest: f"; {error.problem}"}
    return {} if record is None else {record[0]: f"; best: {record[1].metric} {record[1].value:.6g}"}


def _row(
    checkpoint: Found, *, abandoned: Sequence[int], newest: Path | None, marks: Mapping[Path, str]
) -> tuple[str, ...]:
    manifest = checkpoint.manifest
    if manifest is None:
        return (checkpoint.path.name, *["-"] * (len(COLUMNS) - 2), str(checkpoint.problem))
    state = ABANDONED if manifest.commit in abandoned else NEXT if checkpoint.path == newest else COMPLETE
    return (
        checkpoint.path.name,
        str(manifest.iteration),
        str(manifest.progress.updates),
        f"{_epoch(manifest):.2f}",
        str(manifest.geometry.global_batch_size),
        size_text(sum(entry.size for entry in manifest.files)),
        manifest.created,
        manifest.parent or "-",
        checkpoint.problem or state + marks.get(checkpoint.path, ""),
    )


def problems(checkpoint: Found) -> str | None:
    """What is wrong with a checkpoint, every byte read; None when nothing is."""
    if checkpoint.problem is not None or checkpoint.manifest is None:
        return checkpoint.problem
    return store.verify(checkpoint.path, checkpoint.manifest, hashes=True)


def describe(directory: Path) -> list[str]:
    """The manifest of a checkpoint, or of the newest one of a work dir, as text."""
    checkpoints = find(directory)
    abandoned = Lineage.read(checkpoints[0].path.parent).abandoned
    readable = [f for f in checkpoints if f.manifest is not None]
    if not readable:
        raise CheckpointError(f"{checkpoints[-1].path}: {checkpoints[-1].problem}")
    current = [f for f in readable if f.problem is None and f.manifest and f.manifest.commit not in abandoned]
    chosen = (current or readable)[-1]
    assert chosen.manifest is not None
    pairs = list(_facts(chosen, chosen.manifest))
    width = max(len(name) for name, _ in pairs)
    return [f"{name.ljust(width)}  {value}" for name, value in pairs]


def _facts(checkpoint: Found, manifest: Manifest) -> Iterator[tuple[str, str]]:
    progress, loader = manifest.progress, manifest.loader
    yield "checkpoint", str(checkpoint.path)
    yield "state", checkpoint.problem or COMPLETE
    yield "created", f"{manifest.created} as commit {manifest.commit}, after {manifest.parent or 'a fresh start'}"
    yield "iteration", f"{manifest.iteration} ({progress.updates} updates, {progress.skipped_updates} of them skipped)"
    yield "epoch", f"{_epoch(manifest):.4f} of {manifest.ruler.sequences_per_epoch:,} sequences each"
    yield "data seen", f"{progress.sequences:,} sequences, {progress.samples:,} samples, {progress.tokens:,} tokens"
    yield "effective batch", str(manifest.geometry)
    if manifest.ruler.geometry != manifest.geometry:
        yield "first started as", str(manifest.ruler.geometry)
    yield "engine", _pairs(manifest.topology)
    schedules = Schedules.from_state_dict(manifest.schedule)
    yield "next learning rate", _pairs({group["name"]: f"{group['lr']:.6g}" for group in schedules.at(progress)})
    if schedules.lr_scale != 1.0:
        yield "learning rate scale", f"{schedules.lr_scale:g}"
    yield "next sequence", _pairs(loader["cursor"])
    yield "data", f"seed {loader['seed']}, fingerprint {loader['fingerprint']}"
    yield from _parameters(manifest.parameters)
    if manifest.metrics:
        yield "metrics", _pairs(manifest.metrics)
    yield "versions", _pairs(manifest.versions)
    yield "layout", f"{manifest.layout}, {size_text(sum(entry.size for entry in manifest.files))}"
    for entry in manifest.files:
        yield "", f"{size_text(entry.size):>10}  {entry.path}"


def _parameters(parameters: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    groups: dict[str, int] = {}
    for row in parameters:
        numel = 1
        for extent in row["shape"]:
            numel *= extent
        name = f"group {row['group']}" if row["trainable"] else "frozen"
        groups[name] = groups.get(name, 0) + numel
    yield (
        "parameters",
        f"{sum(groups.values()):,} in {len(parameters)} tensors: "
        + _pairs({name: f"{numel:,}" for name, numel in groups.items()}),
    )


def _epoch(manifest: Manifest) -> float:
    return manifest.progress.sequences / manifest.ruler.sequences_per_epoch


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def size_text(size: float) -> str:
    """``1.5 GiB``."""
    if size < 1024:
        return f"{size:.0f} B"
    units = ["KiB", "MiB", "GiB", "TiB"]
    while (size := size / 1024) >= 1024 and len(units) > 1:
        units.pop(0)
    return f"{size:.1f} {units[0]}"
