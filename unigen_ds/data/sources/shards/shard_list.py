"""What a config calls its streamed data -> the list of its shards, and how each is fetched and opened.

A shard is a file of any format that has files: Parquet, JSON lines, tar, Arrow, CSV, text. Its name may be a path, a
url of any protocol that ``fsspec`` knows (``https://``, ``hf://``, ``s3://``), a pattern or a range
(``part-{000..127}.tar``), or follow from a Hugging Face data set. Listing reads names, sizes and versions, no record.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from unigen_ds.config.paths import is_hub_name
from unigen_ds.config.registry import SOURCES, resolve
from unigen_ds.core.errors import ConfigError, DataError, nearest
from unigen_ds.data.records.records import Captions
from unigen_ds.data.sources.base import RecordSource
from unigen_ds.data.sources.find import (
    PATTERN,
    DataPath,
    by_numbers,
    by_suffix,
    files_of,
    matching,
    open_file,
    suffix_of,
)
from unigen_ds.data.sources.huggingface import HuggingFaceSource, chosen_split, download_first, is_saved
from unigen_ds.data.sources.shards.iterated import IterableShards, WrittenRecords, write_records
from unigen_ds.data.sources.shards.spool import DataShard, Missing, attempted
from unigen_ds.data.sources.shards.transfer import DIGESTED, copy_of, filesystem_of, looked_at, refused
from unigen_ds.data.sources.unpacked import needed
from unigen_ds.system.files import quick_digest

_WHOLE = re.compile(r"hf://datasets/(?P<name>[^/@]+/[^/@]+)(?:@(?P<revision>refs/[^/]+/[^/]+|[^/]+))?/?")
"""A data set of the hub; a longer path is of files of one."""
_LISTED_TOGETHER = 16
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


class ShardList(Protocol):
    """The shards of a data set."""

    shards: Sequence[DataShard]
    facts: tuple[object, ...]
    """What decides besides the shards how records are read."""
    root: Path | None
    """The folder that relative image paths start from; None: there is none."""
    captions: Captions | None
    batch: int
    notes: Sequence[str]
    """What of it is not exact, or not known, for the log."""

    def fetch(self, shard: DataShard, target: Path) -> None:
        """As of ``Spool``."""
        ...

    def open(self, path: Path, shard: DataShard) -> RecordSource:
        """A copy of a shard."""
        ...


def list_shards(
    data_path: DataPath,
    *,
    format: str | Mapping[str, Any] | None,
    storage_options: Mapping[str, Any],
    attempts: int,
    limit: int,
) -> ShardList:
    """The shards of ``data_path``. ``limit``: bytes of a shard at most, where it has no size before it is written.

    Raises ``DataError`` where there is none, or where they cannot be listed; ``ConfigError`` for an unknown format, and
    for one that has no shards.
    """
    spec = {"type": format} if isinstance(format, str) else dict(format or {})
    if spec and spec.get("type") not in SOURCES.module_dict and isinstance(spec.get("type"), str):
        raise ConfigError(
            f"format is {spec['type']!r}",
            allowed=", ".join(sorted(SOURCES.module_dict)),
            remedy=nearest(spec["type"], SOURCES.module_dict),
        )
    given = [data_path] if isinstance(data_path, (str, Path)) else list(data_path)
    cls, options = resolve(SOURCES, spec, where="format") if spec else (None, {})
    if cls is not None and issubclass(cls, IterableShards):
        return IteratedShards(cls(Path(str(given[0])), **options), limit=limit)
    hub, revision = _hub_name(given, cls)
    if hub is not None:
        asked = {"revision": revision, "token": storage_options.get("token"), **options}
        few = min(attempts, 2)  # the package makes several of its own
        urls = attempted(f"listing the data set {hub}", few, lambda: _of_hub(hub, **asked))
        cls, options = None, {}
    else:
        what = f"listing {', '.join(map(str, given))}"
        urls = attempted(what, attempts, lambda: refused(lambda: _urls(given, cls, storage_options)))
    return ShardFiles(urls, cls, options, storage_options=storage_options, attempts=attempts)


def _hub_name(given: Sequence[str | Path], cls: type | None) -> tuple[str | None, str | None]:
    """(name, revision) where it is a data set of the hub as a whole, or what ``load_dataset`` calls one."""
    text = str(given[0])
    if cls is HuggingFaceSource and is_saved(Path(text)):
        raise ConfigError(
            f"{text} is a folder of save_to_disk, whose files are read at random",
            remedy="leave streaming out; or name its files: data_path='FOLDER/*.arrow'",
        )
    if whole := _WHOLE.fullmatch(text):
        return whole["name"], whole["revision"]
    return (text, None) if cls is HuggingFaceSource else (None, None)


def _of_hub(name: str, *, split: str | None = None, config: str | None = None, **given: Any) -> list[str]:
    """The files of a data set's split, without loading them."""
    datasets = needed("datasets", f"the Hugging Face data set {name!r}")
    given = {key: value for key, value in given.items() if value is not None}
    try:
        builder = datasets.load_dataset_builder(name, config, **given)
        files = getattr(builder.config, "data_files", None) or {}
    except DataError:
        raise
    except (FileNotFoundError, ValueError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "LocalEntryNotFoundError" in text:  # the hub did not answer: another attempt may succeed
            raise
        remedy = download_first(name) if is_hub_name(name) else None
        raise DataError(f"the Hugging Face data set {name!r} cannot be listed: {text}", remedy=remedy) from error
    chosen = chosen_split(split, [str(one) for one in files], f"the Hugging Face data set {name!r}")
    return [str(file) for file in files[chosen]]


def _urls(given: Sequence[str | Path], cls: type | None, options: Mapping[str, Any]) -> list[str]:
    """Paths and urls of the files, numbers in their names by their value."""
    found: list[str] = []
    for one in given:
        for text in _ranges(str(one)):
            if "://" in text:
                found += _remote(text, options)
            else:
                of_format = cls or _format_of_local(Path(text))
                found += [str(file.resolve()) for path in matching(text, None) for file in files_of(path, of_format)]
    return found


def _ranges(text: str) -> list[str]:
    """``part-{08..11}.tar`` as four names."""
    match = _RANGE.search(text)
    if match is None:
        return [text]
    first, last = match[1], match[2]
    numbers = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return [one for number in numbers for one in _ranges(text[: match.start()] + number + text[match.end() :])]


def _format_of_local(path: Path) -> type:
    """What finds the files of a folder: the only format there."""
    if not path.is_dir():
        return RecordSource  # a file is itself
    known = by_suffix()
    kinds = sorted({known[suffix] for file in path.rglob("*") if (suffix := suffix_of(file)) in known} - {"text"})
    if len(kinds) != 1:
        formats = f"files of {len(kinds)} formats: {', '.join(kinds)}" if kinds else "no file of a known format"
        saved = f"of a folder of save_to_disk its shards: data_path='{path}/*.arrow'" if is_saved(path) else None
        raise DataError(
            f"folder {path} has {formats}",
            allowed="files of one format for a streamed data set; an image folder is read without streaming",
            remedy=saved or "data_path='FOLDER/*.parquet', or format='parquet'",
        )
    cls: type = SOURCES.module_dict[kinds[0]]
    return cls


def _remote(url: str, options: Mapping[str, Any]) -> list[str]:
    filesystem, path = filesystem_of(url, options)
    if PATTERN.search(path):
        names = filesystem.glob(path)
    elif url.startswith("http") or not filesystem.isdir(path):
        names = [path]
    else:
        names = [name for name in filesystem.find(path) if suffix_of(Path(name)) in by_suffix()]
    if not names:
        raise DataError(f"no file matches {url}")
    return [filesystem.unstrip_protocol(name) for name in sorted(names, key=by_numbers)]


class ShardFiles:
    """Shards that are files. ``cls``: their format; None: by their suffix."""

    def __init__(
        self,
        urls: Sequence[str],
        cls: type | None,
        options: Mapping[str, Any],
        *,
        storage_options: Mapping[str, Any],
        attempts: int,
    ) -> None:
        self._storage = dict(storage_options)
        if not urls:
            raise DataError("data_path has no file")
        self._cls, self._options = cls or _one_format(urls), dict(options)
        names = _names(urls)
        with ThreadPoolExecutor(_LISTED_TOGETHER) as pool:

            def found(pair: tuple[str, str]) -> DataShard:
                url, name = pair
                return attempted(f"looking for shard {name} at {url}", attempts, lambda: self._look(url, name))

            self.shards: Sequence[DataShard] = tuple(pool.map(found, zip(urls, names, strict=True)))
        self.facts: tuple[object, ...] = (self._cls.__name__, sorted(self._options.items()))
        self.captions: Captions | None = getattr(self._cls, "captions", None)
        self.batch: int = getattr(self._cls, "batch", RecordSource.batch)
        local = "://" not in urls[0]
        self.root: Path | None = Path(urls[0]).parent if local else None
        unversioned = sum(shard.version is None for shard in self.shards)
        self.notes: Sequence[str] = (
            [
                f"{unversioned} of {len(urls)} shards have no version (an ETag, a digest) at their server: a shard that"
                " changes with the same size is noticed only when one of its records is found to be another"
            ]
            if unversioned
            else []
        )

    def _look(self, url: str, name: str) -> DataShard:
        """Size and version. Raises ``Missing`` where it does not exist."""
        if "://" not in url:
            if not os.path.isfile(url):
                raise Missing("it does not exist")
            return DataShard(name, url, os.path.getsize(url), quick_digest(Path(url), blocks=DIGESTED))
        filesystem, path = filesystem_of(url, self._storage)
        return DataShard(name, url, *looked_at(filesystem, path))

    def fetch(self, shard: DataShard, target: Path) -> None:
        """A link to a local file; a copy of any other one, from where an earlier attempt ended."""
        if "://" not in shard.url:
            if not os.path.isfile(shard.url):
                raise Missing("it does not exist")
            target.unlink(missing_ok=True)
            target.symlink_to(shard.url)
            return
        copy_of(shard, target, self._storage)

    def open(self, path: Path, shard: DataShard) -> RecordSource:
        """As of ``ShardList``."""
        return open_file(path, self._cls, self._options, None, label=shard.name)


def _names(urls: Sequence[str]) -> list[str]:
    """Of each shard: its path below the folder that all have in common, so that data may be moved."""
    paths = [re.sub(r"^\w+://[^/]*", "", url).partition("?")[0] if "://" in url else url for url in urls]
    if len(paths) == 1:
        return [PurePosixPath(paths[0]).name]
    top = os.path.commonpath([os.path.dirname(path) or "/" for path in paths])
    names = [os.path.relpath(path, top) for path in paths]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"shard {twice} is there more than once", remedy="name each file once in data_path")
    return names


def _one_format(urls: Sequence[str]) -> type:
    """The format of all files, by their suffixes."""
    known = by_suffix()
    kinds = {suffix: known.get(suffix) for url in urls for suffix in [suffix_of(Path(url.partition("?")[0]))]}
    if len(set(kinds.values())) != 1 or None in kinds.values():
        raise DataError(
            f"the shards have the suffixes {', '.join(sorted(kinds))}",
            allowed=f"one format for all of them: {', '.join(sorted(known))} (and .gz, .zst)",
            remedy="format='...' names it; a data set of single image files is read without streaming",
        )
    cls: type = SOURCES.module_dict[next(iter(kinds.values()))]
    return cls


class IteratedShards:
    """Shards of a component of a user."""

    def __init__(self, source: IterableShards, *, limit: int) -> None:
        self._source, self._limit = source, limit
        kind, names = type(source).__name__, source.shards()
        self.notes: Sequence[str] = (
            f"{kind} is iterated, and has no version: records that change are noticed only when they are read again",
        )
        if names is None:
            unknown = (
                f"the shards of {kind} are unknown: all its records are one shard, which is read to its end and stored"
                " before the first record is used"
            )
            names, self.notes = ["all"], (*self.notes, unknown)
        if not names or len(set(names)) < len(names) or not all(isinstance(name, str) and name for name in names):
            raise DataError(f"{kind}.shards() is {list(names)!r}", allowed="names, each once, or None")
        self.shards: Sequence[DataShard] = tuple(DataShard(name, f"{kind}://{name}") for name in names)
        self.facts: tuple[object, ...] = (source.fingerprint,)
        self.root: Path | None = None
        self.captions: Captions | None = WrittenRecords.captions
        self.batch = WrittenRecords.batch

    def fetch(self, shard: DataShard, target: Path) -> None:
        """As of ``ShardList``: from the beginning."""
        write_records(self._source.records(shard.name), target, name=shard.name, limit=self._limit)

    def open(self, path: Path, shard: DataShard) -> RecordSource:
        """As of ``ShardList``."""
        return WrittenRecords(path, label=shard.name)
