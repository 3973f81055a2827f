"""The files of the base of adapters: where they are, and that they are those that the adapters were trained on.

A checkpoint of adapters lacks the base: its manifest records (``Base``) the folders as ``model.pretrained`` names them,
and size and hash of each file that decides a number (weights, configs). Files are hashed when a run starts and whenever
a checkpoint is opened. ``CheckpointHook(save_base=True)`` copies them beside the checkpoints, where they are found
first.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from unigen_ds.checkpoint.manifest import Base, FileEntry, Folders, parts_of
from unigen_ds.checkpoint.store import outer
from unigen_ds.config.hub import folder_of
from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.system.files import file_digest, fsync_path, make_directory, new_directory
from unigen_ds.system.log import logger

_FOLDER = "base"
"""Folder of a work dir that has the copy of the base."""
_CONFIGS = ("config.json", "llm_config.json", "vit_config.json", "unigen_ds.json")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


def read_base(folders: Folders) -> Base:
    """The record of the files that are there now. Reads and hashes all of them. Raises ``ConfigError``."""
    where = {part: str(folder_of(path, where="model.pretrained").absolute()) for part, path in parts_of(folders)}
    paths = {name: path for name, path in _files(where).items() if path.suffix in _WEIGHTS or path.name in _CONFIGS}
    if not any(path.suffix in _WEIGHTS for path in paths.values()):
        missing = [path for path in where.values() if not Path(path).exists()]
        what = f", and {missing[0]} does not exist" if missing else " has no files of weights"
        raise ConfigError(f"model.pretrained is {folders!r}{what}: adapters need a base")
    entries = [FileEntry(name, path.stat().st_size, file_digest(path)) for name, path in sorted(paths.items())]
    return Base(where[""] if isinstance(folders, str) else where, tuple(entries))


def find_base(base: Base, *, folder: str | None, checkpoint: Path | None) -> Folders:
    """Find the recorded files: in ``folder`` (``--base``), else beside the ``checkpoint``, else where they were.

    Raises ``CheckpointError`` naming the file that differs or is missing, for each of them.
    """
    choices: list[Folders] = [base.path]
    if folder is not None:
        choices = [_inside(base, folder_of(folder, where="--base").absolute())]
    elif checkpoint is not None and (copy := outer(checkpoint).parent / _FOLDER).is_dir():
        choices.insert(0, _inside(base, copy))
    problems = []
    for folders in choices:
        files, differing = _files(folders), []
        for entry in base.files:
            path = files.get(entry.path)
            if path is None:
                differing.append(f"{folders} has no {entry.path}")
            elif path.stat().st_size != entry.size or file_digest(path) != entry.digest:
                differing.append(f"{path} has another content than the base's ({entry.size:,} bytes, {entry.digest})")
        if not differing:
            return folders
        problems.append(differing[0])
    raise CheckpointError(
        f"the base of the adapters is not there: {'; '.join(problems)}",
        allowed="the files that the manifest records, with their hashes: the adapters fit no other base",
        remedy="--base DIR names the folder of that base",
    )


def save_base(base: Base, checkpoint_dir: Path) -> Path | None:
    """Copy the files into ``base`` of ``checkpoint_dir``, complete or not at all, with small others of their folders,
    as tokenizers are; None: it is there. Raises ``CheckpointError`` for a changed file, or a failed copy.
    """
    out = checkpoint_dir / _FOLDER
    if out.exists():
        return None
    make_directory(checkpoint_dir)
    entries = {entry.path: entry for entry in base.files}
    with new_directory(out) as staging:
        for name, path in _files(base.path).items():
            if name not in entries and (path.suffix in _WEIGHTS or path.stat().st_size > 64 << 20):  # no tokenizer
                logger().info("%s is not copied: the base does not need it.", path)
                continue
            target = staging / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            fsync_path(target)
            if name in entries and file_digest(target) != entries[name].digest:
                raise CheckpointError(f"{path} has changed since the run began")
    return out


def _files(folders: Folders) -> dict[str, Path]:
    """Every file directly in the folders, by its path in a record."""
    files = {}
    for part, path in parts_of(folders):
        for each in sorted(path.iterdir()) if path.is_dir() else [path]:
            if each.is_file():
                files[f"{part}/{each.name}" if part else each.name] = each
    return files


def _inside(base: Base, folder: Path) -> Folders:
    """``base.path`` as it is below a folder that has the files as the record names them."""
    if isinstance(base.path, str):
        return str(folder)
    names = {part: Path(path).name for part, path in base.path.items()}
    single = {entry.path for entry in base.files}
    return {
        part: str(folder / part / name if f"{part}/{name}" in single else folder / part) for part, name in names.items()
    }
