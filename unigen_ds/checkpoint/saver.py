"""Write one checkpoint so that it either exists completely or not at all.

::

    iter_100.pth.tmp-<commit>/   every rank writes its files, flushes them to disk, reports sizes and hashes
    manifest.json                rank 0, last
    rename                       the commit: from here on it exists
    last_checkpoint              a hint

A failure on any rank (a full disk, say) makes every rank raise the same ``CheckpointError``, removes the staging
directory, and leaves every older checkpoint as it was. Deleting older ones is the caller's, after the commit.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from unigen_ds.backends.base import Backend
from unigen_ds.checkpoint import store
from unigen_ds.checkpoint.manifest import FILE_NAME, FileEntry, Manifest
from unigen_ds.core import dist
from unigen_ds.core.errors import CheckpointError
from unigen_ds.core.files import file_digest, fsync_path
from unigen_ds.core.seeding import rng_state, set_rng_state
from unigen_ds.core.shards import Shard, shard_key

RNG_DIRECTORY, HOOKS_FILE, CONFIG_FILE = "rng", "hooks.json", "config.py"


def save(
    work_dir: Path,
    name: str,
    *,
    backend: Backend,
    manifest: Manifest,
    hook_states: Mapping[str, Any],
    hook_shards: Mapping[str, Sequence[Shard]],
    config_text: str,
) -> Path:
    """Write and commit ``work_dir/name``. Collective. Returns the committed directory.

    ``hook_shards``: directory name -> shards (``{'ema': [...]}``). ``manifest`` gets its files and layout here.
    A name that exists gets a suffix: ``iter_100.pth`` -> ``iter_100_2.pth``.
    """
    final: Path = dist.broadcast_object(_free_name(work_dir, name) if dist.is_main() else None)
    staging = final.with_name(f"{final.name}{store.STAGING}{manifest.commit}")
    try:
        _on_main(lambda: _make_staging(work_dir, staging), "prepare", final)
        info = _everywhere(lambda: backend.save_shards(staging), "write", final)
        manifest.layout = info[0]["layout"]
        _everywhere(lambda: _write_own_files(staging, hook_shards), "write", final)
        _on_main(lambda: _write_shared_files(staging, hook_states, config_text), "write", final)
        entries = _everywhere(lambda: _flush(staging), "flush", final)
        manifest.files = sorted((e for part in entries for e in part), key=lambda e: e.path)
        _on_main(lambda: _commit(work_dir, staging, final, manifest), "commit", final)
    except BaseException:
        if dist.is_main():
            shutil.rmtree(staging, ignore_errors=True)
        raise
    return final


def _everywhere(action: Callable[[], Any], what: str, final: Path) -> list[Any]:
    """Run on every rank; if it fails on any, fail on all. Returns every rank's value."""
    outcome: tuple[Any, str | None]
    try:
        outcome = (action(), None)
    except Exception as error:
        outcome = (None, f"rank {dist.rank()}: {type(error).__name__}: {error}")
    outcomes = dist.gather_objects(outcome)
    failures = [problem for _, problem in outcomes if problem]
    if failures:
        raise CheckpointError(
            f"could not {what} checkpoint {final}: {'; '.join(failures)}",
            remedy="older checkpoints are untouched; free disk space or fix the permission, training state is intact",
        )
    return [value for value, _ in outcomes]


def _on_main(action: Callable[[], Any], what: str, final: Path) -> None:
    _everywhere(lambda: action() if dist.is_main() else None, what, final)


def _free_name(work_dir: Path, name: str) -> Path:
    stem, _, ending = name.rpartition(".")
    candidate, number = work_dir / name, 2
    while candidate.exists():
        candidate, number = work_dir / f"{stem}_{number}.{ending}", number + 1
    return candidate


def _make_staging(work_dir: Path, staging: Path) -> None:
    work_dir.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(staging, ignore_errors=True)
    (staging / RNG_DIRECTORY).mkdir(parents=True)


def _write_own_files(staging: Path, hook_shards: Mapping[str, Sequence[Shard]]) -> None:
    """This rank's random state and its part of every hook's shards."""
    rank = dist.rank()
    state = rng_state()
    scalars = json.dumps(state.pop("scalars"))
    save_file(state, staging / RNG_DIRECTORY / f"rank{rank:05d}.safetensors", {"scalars": scalars})
    for directory, shards in hook_shards.items():
        (staging / directory).mkdir(exist_ok=True)
        tensors = {
            shard_key(directory, shard.name, shard.flat_start): shard.data.detach().cpu().contiguous()
            for shard in shards
            if shard.primary
        }
        save_file(tensors, staging / directory / f"rank{rank:05d}.safetensors", {"format": "pt"})


def _write_shared_files(staging: Path, hook_states: Mapping[str, Any], config_text: str) -> None:
    (staging / HOOKS_FILE).write_text(json.dumps(hook_states, indent=1), encoding="utf-8")
    (staging / CONFIG_FILE).write_text(config_text, encoding="utf-8")


def _flush(staging: Path) -> list[FileEntry]:
    """Flush this rank's share of the files (all ranks see all files on the shared disk) and report them."""
    files = sorted(p for p in staging.rglob("*") if p.is_file())
    entries = []
    for path in files[dist.rank() :: dist.world_size()]:
        fsync_path(path)
        entries.append(FileEntry(path.relative_to(staging).as_posix(), path.stat().st_size, file_digest(path)))
    return entries


def _commit(work_dir: Path, staging: Path, final: Path, manifest: Manifest) -> None:
    for directory in (p for p in staging.rglob("*") if p.is_dir()):
        fsync_path(directory)
    path = staging / FILE_NAME
    path.write_text(manifest.to_json(), encoding="utf-8")
    fsync_path(path)
    fsync_path(staging)
    os.rename(staging, final)
    fsync_path(work_dir)
    store.write_hint(work_dir, final)


def restore_rng(directory: Path) -> bool:
    """Restore this rank's generators. False when the checkpoint has none for it (another process count)."""
    path = directory / RNG_DIRECTORY / f"rank{dist.rank():05d}.safetensors"
    if not path.is_file():
        return False
    from safetensors import safe_open

    with safe_open(path, framework="pt") as stream:
        scalars = json.loads(stream.metadata()["scalars"])
    state: dict[str, Any] = dict(load_file(path))
    state["torch"] = state["torch"].to(torch.uint8)
    set_rng_state(state | {"scalars": scalars})
    return True


def read_hook_states(directory: Path) -> dict[str, Any]:
    """``hooks.json`` of a checkpoint."""
    path = directory / HOOKS_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
