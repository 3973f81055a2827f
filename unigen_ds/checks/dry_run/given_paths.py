"""Paths of a config, also of one with mistakes: whether each is there, can be read, or can be written."""

from __future__ import annotations

import glob
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unigen_ds.checks.dry_run.result import Checked, ok, problem, problems_of, unchecked
from unigen_ds.config.paths import PATH_KEYS, expand, is_hub_name
from unigen_ds.core.choices import AUTO
from unigen_ds.core.errors import UnigenError

_READ = PATH_KEYS - {"work_dir", "checkpoint_dir", "cache_dir", "save_dir", "root", "config", "resume"}
"""Keys whose files must be there. ``root`` is made by the demo's data set, ``config`` may be the name of a preset."""


def read_paths(config: Any, *, where: str = "", is_path: bool = False) -> Iterator[tuple[str, str]]:
    """(dotted key, path) of every path that is read, at any depth."""
    pairs = config.items() if isinstance(config, Mapping) else enumerate(config)
    for key, value in pairs:
        name = f"{where}.{key}" if where else str(key)
        path = is_path or key in _READ
        if isinstance(value, (Mapping, list, tuple)):
            yield from read_paths(value, where=name, is_path=path)
        elif path and isinstance(value, str) and value:
            yield name, value
    if not where and isinstance(config.get("resume"), str) and config["resume"] != AUTO:
        yield "resume", config["resume"]


def path_results(config: Mapping[str, Any]) -> Iterator[tuple[Checked, str | None]]:
    """A result, and the path where it is missing."""
    there = 0
    for where, text in read_paths(config):
        try:
            path = expand(text, where=where)
        except UnigenError as error:
            yield problems_of(error)[0], text
            continue
        if "://" in path:
            yield unchecked(f"{where} {path}: the server is not asked"), None
        elif os.access(path, os.R_OK) or glob.glob(path):
            there += 1
        elif Path(path).exists():
            yield problem(f"{where} {path} cannot be read", remedy="change its permissions"), path
        elif is_hub_name(path.partition("@")[0]) and not Path(path).suffix:
            yield _of_hub(where, path), None
        else:
            yield (
                problem(
                    f"{where} is {path!r}, and there is no such file or folder",
                    remedy=f"check the path; a relative one begins at {Path.cwd()}",
                ),
                path,
            )
    if there:
        yield ok(f"{there} path{'s' * (there != 1)} of the config can be read"), None


def _of_hub(where: str, name: str) -> Checked:
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE

    name = name.partition("@")[0]
    if (Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}").is_dir():
        return ok(f"{where} {name} is in the hub's cache")
    if HF_HUB_OFFLINE:
        return problem(
            f"{where} {name} is neither a folder here nor in the hub's cache, and HF_HUB_OFFLINE is set",
            remedy=f"where there is a network: hf download {name}",
        )
    return unchecked(f"{where} {name} is of the hub and not in its cache: a start downloads it")


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def writable_results(folder: Path, *, key: str) -> Iterator[Checked]:
    """Write a file without a name where ``folder`` is, or will be made: it is gone when it is closed."""
    where = existing(folder)
    try:
        if not where.is_dir():
            raise NotADirectoryError(f"{where} is not a folder")
        with tempfile.TemporaryFile(dir=where) as stream:
            stream.write(b"1")
            stream.flush()
    except OSError as error:
        yield problem(
            f"{key} {folder} cannot be written: {error}",
            remedy=f"choose another --{key.replace('_', '-')}, free disk space, or change the permissions of {where}",
        )
    else:
        yield ok(f"{key} {folder} can be written" + ("" if where == folder else f" (it is made in {where})"))
