"""Write one checkpoint so that it either exists completely or not at all.

::

    iter_100.pth.tmp-<commit>/   every rank writes its files, flushes them to disk, reports sizes and hashes
    manifest.json                rank 0, last
    rename                       the commit: from here on it exists
    last_checkpoint              a hint

A failure on any rank (a full disk, say) makes every rank raise the same ``CheckpointError``, removes the staging
directory, and leaves every older checkpoint as it was. A disk that is known to be too full is refused before anything
is written. Deleting older ones is the caller's, after the commit.
"""

from __future__ import annotations

import errno
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
from unigen_ds.core.log import logger
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
    size = _least_size(backend, hook_shards)
    try:
        _on_main(lambda: _check_space(work_dir, manifest, hook_shards, least=size), "prepare", final)
        _on_main(lambda: _make_staging(work_dir, staging), "prepare", final)
        info = _everywhere(lambda: backend.save_shards(staging), "write", final)
        manifest.layout = info[0]["layout"]
        _everywhere(lambda: _write_own_files(staging, hook_shards), "write", final)
        _on_main(lambda: _write_shared_files(staging, hook_states, config_text), "write", final)
        listed = _everywhere(lambda: _list(staging), "list", final)
        files = sorted({path for part in listed for path in part})
        entries = _everywhere(lambda: _flush(staging, files), "flush", final)
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
            remedy="free disk space (there must be room for one checkpoint more than max_keep_ckpts, because an old one"
            " goes only after the new one is complete) or fix the permission; older checkpoints and the training itself"
            " are untouched",
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


def _least_size(backend: Backend, hook_shards: Mapping[str, Sequence[Shard]]) -> float:
    """Bytes that the checkpoint will have at the very least, over all ranks: masters and hooks' shards. Collective."""
    parts = [backend.master_shards(), *hook_shards.values()]
    own = sum(shard.data.nbytes for shards in parts for shard in shards if shard.primary)
    return dist.sum_floats([float(own)])[0]


def _check_space(
    work_dir: Path, manifest: Manifest, hook_shards: Mapping[str, Sequence[Shard]], *, least: float
) -> None:
    """Raise ``OSError`` when the disk cannot hold the checkpoint: one like the last of the same topology, or ``least``.

    A quota does not show here; running into it fails the save later, as cleanly.
    """
    work_dir.mkdir(parents=True, exist_ok=True)
    folders = {"", RNG_DIRECTORY, *hook_shards}
    needed = least
    for found in reversed(store.list_checkpoints(work_dir)):
        if found.problem is None and found.manifest is not None and found.manifest.topology == manifest.topology:
            files = found.manifest.files
            needed = max(needed, sum(entry.size for entry in files if entry.path.rpartition("/")[0] in folders))
            break
    free = shutil.disk_usage(work_dir).free
    if free < needed:
        text = f"it needs about {needed / 2**20:,.1f} MiB and {free / 2**20:,.1f} MiB are free"
        raise OSError(errno.ENOSPC, text, str(work_dir))


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


def _list(staging: Path) -> list[str]:
    """The files that this rank sees. A network disk may show others' late, but always one's own: the union is all."""
    return [p.relative_to(staging).as_posix() for p in staging.rglob("*") if p.is_file()]


def _flush(staging: Path, files: Sequence[str]) -> list[FileEntry]:
    """Flush this rank's share of all files to the shared disk and report size and hash."""
    entries = []
    for name in files[dist.rank() :: dist.world_size()]:
        path = staging / name
        fsync_path(path)
        entries.append(FileEntry(name, path.stat().st_size, file_digest(path)))
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
    try:
        store.write_hint(work_dir, final)
    except OSError as error:  # it is committed; the hint is only for people and other tools
        logger().warning("%s could not be updated: %s", store.HINT, error)


def restore_rng(directory: Path) -> bool:
    """Restore this rank's generators. False, on all ranks alike, where the checkpoint has another process count's."""
    path = directory / RNG_DIRECTORY / f"rank{dist.rank():05d}.safetensors"
    if len(list(path.parent.glob("rank*.safetensors"))) != dist.world_size():
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
