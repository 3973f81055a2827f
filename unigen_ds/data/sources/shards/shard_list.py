"""What a config calls its streamed data -> the list of its shards, and how each is fetched and opened.

A shard is a file of any format that has files: Parquet, JSON lines, tar, Arrow, CSV, text. Its name may be a path, a
url of any protocol that ``fsspec`` knows (``https://``, ``hf://``, ``s3://``), a pattern or a range
(``part-{000..127}.tar``), or follow from a Hugging Face data set. Listing reads names, sizes and versions, no record.

A user's own source may only be iterated (``IterableShards``): the records of a shard are iterated once and written into
the spool, as lines of JSON with images in base64; after that the shard is a file like any other. So its position is
exact, whatever the iteration could do.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from unigen_ds.config.paths import is_hub_name
from unigen_ds.config.registry import SOURCES, resolve
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.data.images.image_files import StoredImage
from unigen_ds.data.records.records import Captions
from unigen_ds.data.sources.base import FoundRecord, RecordSource, Row
from unigen_ds.data.sources.find import (
    PATTERN,
    DataPath,
    by_numbers,
    by_suffix,
    files_of,
    matching,
    one_format,
    open_file,
    requested,
    suffix_of,
)
from unigen_ds.data.sources.huggingface import HuggingFaceSource, chosen_split, download_first, is_saved
from unigen_ds.data.sources.json_lines import JsonSource
from unigen_ds.data.sources.shards.spool import DataShard, Missing, attempted
from unigen_ds.data.sources.shards.transfer import DIGESTED, copy_of, filesystem_of, looked_at, refused
from unigen_ds.data.sources.unpacked import needed
from unigen_ds.system.files import quick_digest

_WHOLE = re.compile(r"hf://datasets/(?P<name>[^/@]+/[^/@]+)(?:@(?P<revision>refs/[^/]+/[^/]+|[^/]+))?/?")
"""A data set of the hub; a longer path is of files of one."""
_LISTED_TOGETHER = 16
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


class ShardList:
    """The shards of a data set. A subclass fetches and opens one."""

    shards: Sequence[DataShard]
    facts: tuple[object, ...]
    """What decides besides the shards how records are read."""
    root: Path | None = None
    """The folder that relative image paths start from; None: there is none."""
    captions: Captions | None = None
    batch: int = RecordSource.batch
    notes: Sequence[str] = ()
    """What of it is not exact, or not known, for the log."""

    def fetch(self, shard: DataShard, target: Path) -> None:
        """As of ``Spool``."""
        raise NotImplementedError(f"{type(self).__name__}.fetch")

    def open(self, path: Path, shard: DataShard) -> RecordSource:
        """Return the records of a copy of a shard."""
        raise NotImplementedError(f"{type(self).__name__}.open")


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
    paths, spec = requested(data_path, format)
    cls, options = resolve(SOURCES, spec, where="format") if spec else (None, {})
    if cls is not None and issubclass(cls, IterableShards):
        return IteratedShards(cls(Path(str(paths[0])), **options), limit=limit)
    hub, revision = _hub_name(paths, cls)
    if hub is not None:
        settings = {"revision": revision, "token": storage_options.get("token"), **options}
        few = min(attempts, 2)  # the package makes several of its own
        urls = attempted(f"listing the data set {hub}", few, lambda: _of_hub(hub, **settings))
        cls, options = None, {}
    else:
        what = f"listing {', '.join(map(str, paths))}"
        urls = attempted(what, attempts, lambda: refused(lambda: _urls(paths, cls, storage_options)))
    return ShardFiles(urls, cls, options, storage_options=storage_options, attempts=attempts)


def _hub_name(paths: Sequence[str | Path], cls: type | None) -> tuple[str | None, str | None]:
    """(name, revision) where it is a data set of the hub as a whole, or what ``load_dataset`` calls one."""
    text = str(paths[0])
    if cls is HuggingFaceSource and is_saved(Path(text)):
        raise ConfigError(
            f"{text} is a folder of save_to_disk, whose files are read at random",
            remedy="leave streaming out; or name its files: data_path='FOLDER/*.arrow'",
        )
    if whole := _WHOLE.fullmatch(text):
        return whole["name"], whole["revision"]
    return (text, None) if cls is HuggingFaceSource else (None, None)


def _of_hub(name: str, *, split: str | None = None, config: str | None = None, **settings: Any) -> list[str]:
    """The files of a data set's split, without loading them."""
    what = f"the Hugging Face data set {name!r}"
    datasets = needed("datasets", what)
    settings = {key: value for key, value in settings.items() if value is not None}
    try:
        builder = datasets.load_dataset_builder(name, config, **settings)
        files = getattr(builder.config, "data_files", None) or {}
    except (FileNotFoundError, ValueError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "LocalEntryNotFoundError" in text:  # the hub did not answer: another attempt may succeed
            raise
        remedy = download_first(name) if is_hub_name(name) else None
        raise DataError(f"{what} cannot be listed: {text}", remedy=remedy) from error
    return [str(file) for file in files[chosen_split(split, list(map(str, files)), what)]]


def _urls(paths: Sequence[str | Path], cls: type | None, options: Mapping[str, Any]) -> list[str]:
    """Paths and urls of the files, numbers in their names by their value."""
    urls: list[str] = []
    for text in (text for one in paths for text in _ranges(str(one))):
        if "://" in text:
            urls += _remote(text, options)
        else:
            of_format = cls or _format_of_local(Path(text))
            urls += [str(file.resolve()) for path in matching(text) for file in files_of(path, of_format)]
    return urls


def _ranges(text: str) -> list[str]:
    """``part-{08..11}.tar`` as four names."""
    match = _RANGE.search(text)
    if match is None:
        return [text]
    first, last = match[1], match[2]
    numbers = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return [one for number in numbers for one in _ranges(text[: match.start()] + number + text[match.end() :])]


def _format_of_local(path: Path) -> type:
    """The format whose files a folder has."""
    if not path.is_dir():
        return RecordSource  # a file is itself
    kind = one_format([path])
    cls: type[RecordSource] = SOURCES.module_dict[kind]
    if not cls.suffixes:
        saved = f"of a folder of save_to_disk its shards: data_path='{path}/*.arrow'" if is_saved(path) else None
        raise DataError(
            f"folder {path} is read as {kind!r}",
            allowed="files of one format for a streamed data set; an image folder is read without streaming",
            remedy=saved or "data_path='FOLDER/*.parquet', or format='parquet'",
        )
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


class ShardFiles(ShardList):
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
        if not urls:
            raise DataError("data_path has no file")
        self._storage = dict(storage_options)
        self._cls, self._options = cls or _one_format(urls), dict(options)

        def look(url: str, name: str) -> DataShard:
            return attempted(f"looking for shard {name} at {url}", attempts, lambda: self._look(url, name))

        with ThreadPoolExecutor(_LISTED_TOGETHER) as pool:
            self.shards = tuple(pool.map(look, urls, _names(urls)))
        self.facts = (self._cls.__name__, sorted(self._options.items()))
        self.captions = getattr(self._cls, "captions", None)
        self.batch = getattr(self._cls, "batch", RecordSource.batch)
        self.root = None if "://" in urls[0] else Path(urls[0]).parent
        if unversioned := sum(shard.version is None for shard in self.shards):
            self.notes = (
                f"{unversioned} of {len(urls)} shards have no version (an ETag, a digest) at their server: a shard that"
                " changes with the same size is noticed only when one of its records is found to be another",
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


# --- records that only an iteration returns -------------------------------------------------------------------

_BYTES = "unigen:bytes"


class IterableShards(RecordSource):
    """Records without random access. A subclass is registered in ``SOURCES`` and used with ``streaming=True``.

    ``path`` is the ``data_path`` of the config; further arguments of ``__init__`` are settings, which belong to the
    fingerprint of the data.
    """

    def shards(self) -> Sequence[str] | None:
        """Names of the parts that can be iterated on their own, always the same ones. None: they are unknown, and all
        records are one shard.
        """
        return None

    def records(self, shard: str) -> Iterable[Mapping[str, Any]]:
        """The records of a shard, in any layout, always the same ones in the same order. An image is its bytes, or
        ``{'bytes': ..., 'path': ...}``. Errors are tried again.
        """
        raise NotImplementedError(f"{type(self).__name__}.records")

    def index_folder(self, cache_dir: Path | None) -> Path | None:
        """Raises ``ConfigError``: there is no index of the whole."""
        raise ConfigError(
            f"{type(self).__name__} can only be iterated", remedy="streaming=True of UnifiedGenerationDataset"
        )


def write_records(records: Iterable[Mapping[str, Any]], target: Path, *, name: str, limit: int) -> None:
    """The records of shard ``name`` as a file of at most ``limit`` bytes. Raises ``DataError`` for others."""
    written = 0
    with target.open("wb") as stream:
        for number, record in enumerate(records):
            if not isinstance(record, Mapping):
                raise DataError(f"{name}, record {number}: it is a {type(record).__name__}", allowed="a mapping")
            line = json.dumps(_written(record, f"{name}, record {number}"), ensure_ascii=False).encode() + b"\n"
            written += len(line)
            if written > limit:
                raise DataError(
                    f"shard {name} has more than {limit:,} bytes after {number:,} records, as many as"
                    " streaming.cache_gib keeps",
                    remedy="smaller shards, or a larger streaming.cache_gib",
                )
            stream.write(line)


def _written(value: Any, where: str) -> Any:
    """What JSON can write."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        if set(value) == {"bytes", "path"}:
            return value["path"] if value["bytes"] is None else _written(value["bytes"], where)
        if len({str(key) for key in value}) < len(value) or _BYTES in value:
            raise DataError(f"{where} has a key twice as text, or the key {_BYTES!r}", allowed="other names of keys")
        return {str(key): _written(one, f"{where}: {key}") for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_written(one, where) for one in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise DataError(
        f"{where} is a {type(value).__name__}",
        allowed="texts, numbers, lists, mappings, and images as bytes",
        remedy="of the package datasets: cast_column('image', Image(decode=False))",
    )


class WrittenRecords(JsonSource):
    """A file of ``write_records``."""

    captions = "generate"

    def read(self, start: int, stop: int) -> Sequence[FoundRecord]:
        rows = []
        for number, entry in enumerate(super().read(start, stop), start=start):
            where = f"{self.label}, record {number}"
            rows.append(Row(_restored(entry.record, where), where))
        return rows


def _restored(value: Any, where: str) -> Any:
    """``_written``'s inverse, with images in place of bytes."""
    if isinstance(value, dict):
        if set(value) == {_BYTES}:
            return StoredImage(where, base64.b64decode(value[_BYTES]))
        return {key: _restored(one, f"{where}: {key}") for key, one in value.items()}
    return [_restored(one, where) for one in value] if isinstance(value, list) else value


class IteratedShards(ShardList):
    """Shards of a component of a user."""

    captions, batch = WrittenRecords.captions, WrittenRecords.batch

    def __init__(self, source: IterableShards, *, limit: int) -> None:
        self._source, self._limit = source, limit
        kind, names = type(source).__name__, source.shards()
        self.notes = (
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
        self.shards = tuple(DataShard(name, f"{kind}://{name}") for name in names)
        self.facts = (source.fingerprint,)

    def fetch(self, shard: DataShard, target: Path) -> None:
        write_records(self._source.records(shard.name), target, name=shard.name, limit=self._limit)

    def open(self, path: Path, shard: DataShard) -> RecordSource:
        return WrittenRecords(path, label=shard.name)
