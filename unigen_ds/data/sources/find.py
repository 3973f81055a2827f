"""What a config calls its data -> a source: by the format's name, by the suffix of a file, or by what a folder has."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unigen_ds.config.paths import is_hub_name
from unigen_ds.config.registry import SOURCES, resolve
from unigen_ds.core.errors import ConfigError, DataError, suggestion
from unigen_ds.data.cache.array_cache import cache_folder
from unigen_ds.data.records.unusable import instead_of
from unigen_ds.data.sources.base import RecordSource, Sources
from unigen_ds.data.sources.image_folder import METADATA, images_in, visible
from unigen_ds.data.sources.tables import ParquetSource, is_saved
from unigen_ds.data.sources.unpacked import COMPRESSIONS, unpacked_file
from unigen_ds.data.sources.webdataset import IMAGES
from unigen_ds.system.log import notice

DataPath = str | Path | Sequence[str | Path]
JSON, TEXT = "json", "text"
PATTERN = re.compile(r"[*?\[]")


def default_name(data_path: DataPath) -> str:
    """The first part of sample ids: the stem of the first file, without the signs of a pattern."""
    first = Path(data_path if isinstance(data_path, (str, Path)) else next(iter(data_path), "data"))
    path = first.with_suffix("") if first.suffix.lower() in COMPRESSIONS else first
    if not PATTERN.search(path.name):
        return path.stem
    return PATTERN.split(path.stem)[0].rstrip("-_.") or path.parent.name or "data"


def open_source(
    data_path: DataPath,
    *,
    format: str | Mapping[str, Any] | None = None,
    cache_dir: Path | None = None,
    columns: Mapping[str, str] | None = None,
) -> RecordSource:
    """The records of ``data_path``. ``cache_dir``: of unpacked copies; ``columns``: as of ``RecordSource``. Raises
    ``DataError`` for no files or those of several formats, ``ConfigError`` for an unknown format or setting of it.
    """
    paths, spec = requested_format(data_path, format)
    is_hub = spec.get("type") == "huggingface"
    if not is_hub and (urls := [str(path) for path in paths if "://" in str(path)]):
        choices = "files and folders of this machine; urls with streaming=True"
        raise ConfigError(f"data_path {urls[0]!r} is a url", allowed=choices, remedy="streaming=True of the data set")
    matches = [Path(path) for path in paths] if is_hub else [one for path in paths for one in matching(path)]
    if not matches:
        raise ConfigError("data_path is an empty list", allowed="a file, a folder, a pattern, or a list of files")
    cls, options = resolve(SOURCES, {**spec, "type": spec.get("type") or one_format(matches)}, where="format")
    files = [file for path in matches for file in files_of(path, cls)]
    for file, number in Counter(files).items():
        if number > 1:
            notice(f"data_path has {file} {number} times: its records are used as often.")
    sources = [open_file(file, cls, options, cache_dir) for file in files]
    for source in sources:
        source.columns = columns or {}
    return sources[0] if len(sources) == 1 else Sources(sources, f"{', '.join(map(str, paths))} ({len(sources)} files)")


def requested_format(
    data_path: DataPath, format: str | Mapping[str, Any] | None
) -> tuple[list[str | Path], dict[str, Any]]:
    """Return the paths, and the format as ``dict(type=..., **settings)``. Raises ``ConfigError`` for an unknown one."""
    spec = {"type": format} if isinstance(format, str) else dict(format or {})
    kind = spec.get("type")
    if isinstance(kind, str) and kind not in SOURCES.module_dict:
        valid = sorted(SOURCES.module_dict)
        raise ConfigError(f"format is {kind!r}", allowed=", ".join(valid), remedy=suggestion(kind, valid))
    return [data_path] if isinstance(data_path, (str, Path)) else list(data_path), spec


def open_file(
    path: Path, cls: type, options: Mapping[str, Any], cache_dir: Path | None, *, label: str | None = None
) -> RecordSource:
    """One file of a known format. ``label``: how messages call it; None: by its path."""
    if getattr(cls, "suffixes", ()) and not path.is_file():  # a pipe would be waited for
        raise DataError(f"data file {path} is not a file")
    is_packed = path.suffix.lower() in (*COMPRESSIONS, ".tgz")
    folder = cache_folder(path, cache_dir) if is_packed or issubclass(cls, ParquetSource) else None
    file = unpacked_file(path, folder) if is_packed else path
    source: RecordSource = cls(file, label=label or str(path), folder=folder, **options)
    source.options = options
    if is_packed:
        source.origin = path
    return source


def matching(path: str | Path) -> list[Path]:
    """Return the paths that a pattern matches; any other path is itself."""
    text = str(path)
    if not PATTERN.search(text) or os.path.exists(text):
        return [Path(text)]
    matches = sorted(map(Path, glob.glob(text, recursive=True)), key=by_numbers)
    if not matches:
        raise DataError(f"no file matches {text}")
    return matches


def by_numbers(path: str | Path) -> list[tuple[int, int, str]]:
    """Sort key: names, with numbers by their value: part-10 comes after part-9, so that a new part is appended."""
    parts = re.split(r"(\d+)", str(path))
    return [(1, int(part), part) if i % 2 else (0, 0, part) for i, part in enumerate(parts)]


def by_suffix() -> dict[str, str]:
    """Return the name of the format of each suffix."""
    return {suffix: name for name, cls in SOURCES.module_dict.items() for suffix in getattr(cls, "suffixes", ())}


def suffix_of(path: Path) -> str:
    """Return the last suffix, of a compressed file the one before."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() in COMPRESSIONS else path.suffix.lower()


def one_format(paths: Sequence[Path]) -> str:
    """Return the format of some files and folders. Raises ``DataError`` where they have several."""
    formats = by_suffix()  # a file with another suffix is JSON
    kinds = {path: _format_of_folder(path) if path.is_dir() else formats.get(suffix_of(path), JSON) for path in paths}
    if len(set(kinds.values())) > 1:
        first = ", ".join(f"{path.name}: {kind}" for path, kind in list(kinds.items())[:5])
        problem = f"the files of data_path have several formats ({first})"
        raise DataError(problem, remedy="a data set for each of them: train_dataloader.dataset is a list then")
    return kinds[paths[0]]


def _format_of_folder(folder: Path) -> str:
    if is_saved(folder):
        return "huggingface"
    if any((folder / name).is_file() for name in METADATA):
        return "image_folder"
    formats = by_suffix()
    suffixes = (suffix_of(path) for path in visible(folder) if path.is_file())
    numbers = Counter(formats[suffix] for suffix in suffixes if suffix in formats)
    num_texts = numbers.pop(TEXT, 0)
    if len(numbers) > 1:
        each = ", ".join(f"{number} of {kind}" for kind, number in numbers.most_common())
        remedy = f"format={numbers.most_common(1)[0][0]!r} chooses one"
        raise DataError(f"folder {folder} has files of several formats: {each}", remedy=remedy)
    for kind, number in numbers.items():
        if num_texts:
            notice(f"{folder}: {number} files are read as {kind}, {num_texts} of text are not read.")
        return kind
    if next(images_in(folder), None) is not None:
        return "image_folder"
    if num_texts:
        return TEXT
    raise DataError(
        f"folder {folder} has no data file",
        allowed=f"files with one of the suffixes {', '.join(sorted(formats))} (and {', '.join(COMPRESSIONS)}), images"
        " with captions, or a folder of save_to_disk",
    )


def files_of(path: Path, cls: type) -> list[Path]:
    """Return the files of a format in a folder; any other path is itself."""
    suffixes = getattr(cls, "suffixes", ())
    if suffixes and not path.exists():
        remedy = instead_of(path, suffixes)
        if not path.suffix and is_hub_name(str(path)):
            remedy += f"; format='huggingface' for the data set {path} of the hub"
        requirement = f"a file with the suffix {' or '.join(suffixes)}"
        raise DataError(f"data file {path} does not exist", allowed=requirement, remedy=remedy)
    if not suffixes or not path.is_dir():
        return [path]
    inside = [file for file in visible(path) if file.is_file()]
    files = sorted((file for file in inside if suffix_of(file) in suffixes), key=by_numbers)
    if not files:
        raise DataError(f"folder {path} has no file with the suffix {' or '.join(suffixes)}")
    # records may name images
    others = [file for file in inside if suffix_of(file) not in suffixes and file.suffix[1:].lower() not in IMAGES]
    if others:
        numbers = Counter(file.suffix.lower() or "without a suffix" for file in others).most_common(5)
        each = ", ".join(f"{number} {suffix}" for suffix, number in numbers)
        notice(f"{path}: {len(files)} files are read, {len(others)} others are not: {each}.")
    return files
