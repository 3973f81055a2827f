"""A tiny trained model and its checkpoints, written by the real saver with the real backend."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import nn

from unigen_ds.backends.base import Backend
from unigen_ds.backends.single import SingleBackend
from unigen_ds.checkpoint import saver, store
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.config.section import AS_LIST, Section
from unigen_ds.core.progress import Geometry, Progress, Ruler
from unigen_ds.core.shards import Shard
from unigen_ds.optim.optimizer import OptimizerConfig, ParamGroup
from unigen_ds.schedule.schedule import CurveComponent, Schedules
from unigen_ds.system.outputs import write_output

GEOMETRY = Geometry(batch_size=4, accumulative_counts=3)
RULER = Ruler(GEOMETRY, sequences_per_epoch=60)


class _Curves(Section):
    param_scheduler: Annotated[tuple[CurveComponent, ...], AS_LIST] = ()


def schedules_of(specs: Any, **options: Any) -> Schedules:
    """``Schedules.from_cfg`` of curves as a config has them."""
    return Schedules.from_cfg(_Curves.parse({"param_scheduler": specs}).param_scheduler, **options)


def make_backend(*, width: int = 6, updates: int = 1) -> SingleBackend:
    torch.manual_seed(0)
    model = nn.Linear(width, 4)
    backend = SingleBackend()
    backend.check(geometry=Geometry(1), optimizer_cfg=OptimizerConfig())
    backend.prepare(model, [ParamGroup("default", 0.1, 0.0, ("weight", "bias"))])
    for _ in range(updates):
        with backend.accumulate(last=True):
            backend.backward(backend.model(torch.randn(3, width, device=backend.device)).square().sum())
        backend.step()
    return backend


def make_manifest(commit: int = 1, *, parent: str | None = None, updates: int = 4, **values: Any) -> Manifest:
    schedules = Schedules.from_cfg([], ruler=RULER, base=[{"name": "default", "lr": 0.1}], total_sequences=600)
    fields = dict(
        commit=commit,
        parent=parent,
        progress=Progress(sequences=12 * updates, samples=30 * updates, tokens=500 * updates, updates=updates),
        geometry=GEOMETRY,
        ruler=RULER,
        topology={"engine": "single", "dp_size": 1, "precision": "fp32"},
        schedule=schedules.state_dict(),
        loader={
            "cursor": {"epoch": 0, "window": 1, "row": 2, "sequences": 12 * updates},
            "seed": 7,
            "fingerprint": "f" * 32,
        },
        parameters=[
            {"name": "weight", "shape": [4, 6], "dtype": "float32", "trainable": True, "group": "default"},
            {"name": "bias", "shape": [4], "dtype": "float32", "trainable": True, "group": "default"},
        ],
        config={"optim_wrapper": {"optimizer": {"type": "AdamW", "lr": 0.1}}},
    )
    return Manifest(**{**fields, **values})  # type: ignore[arg-type]


def save(
    work_dir: Path,
    name: str = "iter_12.pth",
    *,
    backend: SingleBackend | None = None,
    manifest: Manifest | None = None,
    parent: str | None = None,
    updates: int = 4,
    hook_shards: Mapping[str, Sequence[Shard]] | None = None,
) -> Path:
    """Commit one checkpoint as a run does, with the next commit number."""
    backend = backend or make_backend()
    shards = {"ema": backend.master_shards()} if hook_shards is None else hook_shards
    return saver.save(
        work_dir,
        name,
        backend=backend,
        manifest=manifest or make_manifest(store.next_commit(work_dir), parent=parent, updates=updates),
        hook_states={"ema": {"num_updates": updates}},
        hook_shards=shards,
        config_text="batch_size = 4\n",
    )


def save_chain(work_dir: Path, *iterations: int, parent: str | None = None) -> list[Path]:
    paths = []
    for iteration in iterations:
        path = save(work_dir, f"iter_{iteration}.pth", parent=parent, updates=iteration // 3)
        paths.append(path)
        parent = path.name
    return paths


def write_state(backend: Backend, directory: Path) -> str:
    """The engine's files only, of one process, without the rest of a checkpoint. Returns the layout."""
    state = backend.state_files()
    directory.mkdir(exist_ok=True)
    results = [write_output(directory, file)[2] for file in state.files]
    for file in state.index([[one for one in results if one is not None]]) if state.index else ():
        write_output(directory, file)
    return state.layout


class Evil:
    """Unpickling it creates a file, by one of several methods."""

    def __init__(self, path: Path, way: str = "os.system") -> None:
        self.path, self.way = path, way

    def __reduce__(self) -> Any:
        if self.way == "os.system":
            return os.system, (f"touch '{self.path}'",)
        if self.way == "subprocess.Popen":
            return subprocess.Popen, (["touch", str(self.path)],)
        return eval, (f"open({str(self.path)!r}, 'w')",)


def flip_byte(path: Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def tree(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
