"""Shards of a streamed data set: their list, and local copies of a limited number of bytes.

A shard is a file of any format that has files. Its name may be a path, a url of any protocol of ``fsspec``
(``https://``, ``hf://``, ``s3://``), a pattern or a range (``part-{000..127}.tar``), or follow from a data set of the
hub. Listing reads names, sizes and versions, no record. A shard is fetched whole and read at random like any local
file; those that were used longest ago are removed when another one needs the space. Which ones are here changes no
record. All processes of a node share the folder: a shard is fetched by the process that comes first, and one that is
being read is not removed. Both follow from locks of the kernel, which end with their process.

A user's own source may only be iterated (``IterableShards``): the records of a shard are iterated once and written as
lines of JSON; after that the shard is a file like any other.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from unigen_ds.config.paths import is_hub_name
from unigen_ds.config.registry import SOURCES, resolve
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.data.cache.array_cache import fingerprint
from unigen_ds.data.images.image_files import StoredImage
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
    requested_format,
    suffix_of,
)
from unigen_ds.data.sources.tables import HuggingFaceSource, chosen_split, download_first, is_saved
from unigen_ds.data.sources.text_files import JsonSource
from unigen_ds.data.sources.unpacked import require, write_where_space
from unigen_ds.system.files import delete_inside, quick_digest
from unigen_ds.system.log import logger

_T = TypeVar("_T")
_WHOLE = re.compile(r"hf://datasets/(?P<name>[^/@]+/[^/@]+)(?:@(?P<revision>refs/[^/]+/[^/]+|[^/]+))?/?")
"""A data set of the hub; a longer path is of files of one."""
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_COPY = re.compile(r"[0-9a-f]{16}-")
_PAGE = re.compile(rb"\s*<(!doctype\s+html|html)\b", re.IGNORECASE)
_VERSIONS = ("blob_id", "ETag", "etag", "md5Hash", "checksum", "LastModified", "Last-Modified", "mtime")
"""Facts of file systems that change with a file's content."""
_DIGESTED = 2
"""MiB of a local shard, at its beginning and its end, by which it is recognised: there may be thousands of shards."""
_SILENCE_S = 60.0
"""Seconds without a byte, or without a connection, after which a transfer over HTTP is interrupted."""
_LONGEST_WAIT_S = 30.0
_LONGEST_ASKED_S = 600.0
"""Wait that a server may ask for."""
_BYTES = "unigen:bytes"
"""Key of an image in the records of ``IterableShards``, as they are written."""


@dataclass(frozen=True)
class DataShard:
    """One file of a streamed data set."""

    name: str
    """Its path below the folder of all: in messages, and in the fingerprint of the data."""
    url: str
    size: int | None = None
    """Bytes; None: not known before it is fetched."""
    version: str | None = None
    """Changes with its content (an ETag, a digest); None: nothing of this kind is known."""

    @property
    def facts(self) -> tuple[object, ...]:
        """What the fingerprint of the data has of it."""
        return self.name, self.size, self.version

    @property
    def file_name(self) -> str:
        return re.sub(r"[^\w.\-]", "_", self.name.rpartition("/")[2])[-100:] or "records"

    @property
    def key(self) -> str:
        """The name of its copy: another version of the shard has another one."""
        return f"{fingerprint(*self.facts, *(() if self.version else (self.url,)))[:16]}-{self.file_name}"

    @property
    def copied(self) -> int:
        """Bytes that a copy needs, as far as it is known: a local file is linked."""
        return self.size or 0 if "://" in self.url else 0


# --- the list ---------------------------------------------------------------------------------------------------------


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


class WrittenRecords(JsonSource):
    """Records of ``IterableShards`` in a file of ``write_records``."""

    captions = "generate"

    def read(self, start: int, stop: int) -> Sequence[FoundRecord]:
        rows = []
        for number, entry in enumerate(super().read(start, stop), start=start):
            where = f"{self.label}, record {number}"

            def restore(pairs: list[tuple[str, Any]], where: str = where) -> Any:
                value = dict(pairs)
                if len(value) < len(pairs):
                    raise DataError(f"{where} has a key twice as text: {sorted(value)}", allowed="other names of keys")
                if set(value) == {_BYTES}:
                    with suppress(TypeError, ValueError):  # a key of the user's own
                        return StoredImage(where, base64.b64decode(value[_BYTES]))
                return (value["bytes"] or value["path"]) if set(value) == {"bytes", "path"} else value

            rows.append(Row(json.loads(entry.content, object_pairs_hook=restore), where))
        return rows


def write_records(records: Iterable[Mapping[str, Any]], target: Path, *, name: str, limit: int) -> None:
    """The records of shard ``name`` as a file of at most ``limit`` bytes. Raises ``DataError`` for others."""
    with target.open("wb") as stream:
        for number, record in enumerate(records):
            where = f"{name}, record {number}"

            if not isinstance(record, Mapping):
                raise DataError(f"{where}: it is a {type(record).__name__}", allowed="a mapping")
            try:
                line = json.dumps(dict(record), ensure_ascii=False, default=_base64)
            except (TypeError, ValueError, RecursionError) as error:
                raise DataError(
                    f"{where} cannot be written: {error}",
                    allowed="texts, numbers, lists, mappings, and images as bytes",
                    remedy="of the package datasets: cast_column('image', Image(decode=False))",
                ) from error
            stream.write(line.encode("utf-8", "surrogatepass") + b"\n")
            if stream.tell() > limit:
                raise DataError(
                    f"shard {name} has more than {limit:,} bytes after {number:,} records, as many as"
                    " streaming.cache_gib keeps",
                    remedy="smaller shards, or a larger streaming.cache_gib",
                )


def _base64(value: Any) -> dict[str, str]:
    """What JSON can write of a value that it cannot."""
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError(f"it has a {type(value).__name__}")
    return {_BYTES: base64.b64encode(value).decode()}


class ShardList:
    """The shards of ``data_path``, and how each is fetched and opened.

    Raises ``DataError`` where there is none, or where they cannot be listed; ``ConfigError`` for an unknown format, and
    for one that has no shards. ``limit``: bytes of a shard of ``IterableShards`` at most.
    """

    root: Path | None = None
    """The folder that relative image paths start from; None: there is none."""

    def __init__(
        self,
        data_path: DataPath,
        *,
        format: str | Mapping[str, Any] | None,
        storage_options: Mapping[str, Any],
        attempts: int,
        limit: int,
    ) -> None:
        self._storage, self._limit, self.notes = dict(storage_options), limit, list[str]()
        paths, spec = requested_format(data_path, format)
        cls, options = resolve(SOURCES, spec, where="format") if spec else (None, {})
        self._iterated: IterableShards | None = None
        self._cls: type[RecordSource] = WrittenRecords
        self.facts: tuple[object, ...]
        """What decides besides the shards how records are read."""
        if cls is not None and issubclass(cls, IterableShards):
            self._iterated = cls(Path(str(paths[0])), **options)
            self.shards = self._iterated_shards(self._iterated)
            self.facts = (self._iterated.fingerprint,)
        else:
            self._cls, self._options, self.shards = self._files(paths, cls, options, attempts)
            self.facts = (self._cls.__name__, sorted(self._options.items()))
        self.captions, self.batch = self._cls.captions, self._cls.batch

    def _iterated_shards(self, source: IterableShards) -> tuple[DataShard, ...]:
        kind, names = type(source).__name__, source.shards()
        self.notes.append(
            f"{kind} is iterated, and has no version: records that change are noticed only when they are read again"
        )
        if names is None:
            self.notes.append(
                f"the shards of {kind} are unknown: all its records are one shard, which is read to its end and stored"
                " before the first record is used"
            )
            names = ["all"]
        if not names or len(set(names)) < len(names) or not all(isinstance(name, str) and name for name in names):
            raise DataError(f"{kind}.shards() is {list(names)!r}", allowed="names, each once, or None")
        return tuple(DataShard(name, f"{kind}://{name}") for name in names)

    def _files(
        self, paths: Sequence[str | Path], cls: type | None, options: Mapping[str, Any], attempts: int
    ) -> tuple[type[RecordSource], Mapping[str, Any], tuple[DataShard, ...]]:
        """The format of the files, its settings, and the files."""
        first = str(paths[0])
        whole = _WHOLE.fullmatch(first)
        if whole or cls is HuggingFaceSource:
            name, revision = (whole["name"], whole["revision"]) if whole else (first, None)
            settings = {"revision": revision, "token": self._storage.get("token"), **options}
            # the package makes several attempts of its own
            urls = attempted(f"listing the data set {name}", min(attempts, 2), lambda: _files_of_hub(name, **settings))
            cls, options = None, {}
        else:
            what = f"listing {', '.join(map(str, paths))}"
            urls = attempted(what, attempts, lambda: self._urls(paths, cls))
        if not urls:
            raise DataError("data_path has no file")

        def look(url: str, name: str) -> DataShard:
            what = f"looking for shard {name} at {url}"
            return attempted(what, attempts, lambda: DataShard(name, url, *self._facts_of(url)))

        with ThreadPoolExecutor(16) as pool:
            shards = tuple(pool.map(look, urls, _names(urls)))
        self.root = None if "://" in urls[0] else Path(urls[0]).parent
        if unversioned := sum(shard.version is None for shard in shards):
            self.notes.append(
                f"{unversioned} of {len(urls)} shards have no version (an ETag, a digest) at their server: a shard that"
                " changes with the same size is noticed only when one of its records is found to be another"
            )
        return cls or _format_of(urls), options, shards

    def _urls(self, paths: Sequence[str | Path], cls: type | None) -> list[str]:
        """Paths and urls of the files, numbers in their names by their value."""
        urls: list[str] = []
        for text in (text for one in paths for text in _ranges(str(one))):
            if "://" not in text:
                of_format = cls or _format_of_local(Path(text))
                urls += [str(file.resolve()) for path in matching(text) for file in files_of(path, of_format)]
                continue
            filesystem, path = self._filesystem(text)
            if PATTERN.search(path):
                names = filesystem.glob(path)
            elif text.startswith("http") or not filesystem.isdir(path):
                names = [path]
            else:
                names = [name for name in filesystem.find(path) if suffix_of(Path(name)) in by_suffix()]
            if not names:
                raise DataError(f"no file matches {text}")
            urls += [filesystem.unstrip_protocol(name) for name in sorted(names, key=by_numbers)]
        return urls

    def _filesystem(self, url: str) -> tuple[Any, str]:
        """The file system of a url, and its path there. Raises ``DataError`` where a package is missing."""
        fsspec = require("fsspec.core", f"the url {url}")
        settings = dict(self._storage)
        if url.startswith("http"):
            aiohttp = require("aiohttp", f"the url {url}")
            limits = aiohttp.ClientTimeout(total=None, sock_connect=_SILENCE_S, sock_read=_SILENCE_S)
            settings.setdefault("client_kwargs", {"timeout": limits})
        try:
            filesystem, path = fsspec.url_to_fs(url, **settings)
        except (ImportError, ValueError) as error:  # a package of the protocol, or no such protocol
            raise DataError(
                f"{url}: {error}", remedy="install the package that it names, or use another protocol"
            ) from error
        return filesystem, str(path)

    def _facts_of(self, url: str) -> tuple[int | None, str | None]:
        """Size and version of a file, as far as its server has them. Raises where it does not exist."""
        filesystem, path = self._filesystem(url)
        info = filesystem.info(path)
        if "file" in filesystem.protocol:
            if info["type"] != "file":
                raise FileNotFoundError(path)
            return info["size"], quick_digest(Path(path), blocks=_DIGESTED)
        lfs = info.get("lfs")
        digest = lfs.get("sha256") if isinstance(lfs, Mapping) else getattr(lfs, "sha256", None)
        version = next((value for value in (digest, *map(info.get, _VERSIONS)) if value), None)
        return info.get("size"), None if version is None else str(version)

    def fetch(self, shard: DataShard, target: Path) -> None:
        """Make ``target`` the file of a shard: a link to a local file. Raises anything where that fails."""
        if self._iterated is not None:
            write_records(self._iterated.records(shard.name), target, name=shard.name, limit=self._limit)
            return
        if "://" not in shard.url:
            if not os.path.isfile(shard.url):
                raise FileNotFoundError(shard.url)
            target.unlink(missing_ok=True)
            target.symlink_to(shard.url)
            return
        filesystem, path = self._filesystem(shard.url)
        is_http = shard.url.startswith("http")
        headers = {**filesystem.kwargs.get("headers", {}), "Accept-Encoding": "identity"} if is_http else None
        filesystem.get_file(path, str(target), **({"headers": headers} if headers else {}))
        with target.open("rb") as stream:
            if is_http and _PAGE.match(stream.read(512)):
                raise OSError("the server answers with an HTML page (a document of HTML must be a local file)")
        if (now := self._facts_of(shard.url)) != (shard.size, shard.version):
            raise OSError(
                f"it changed: size and version are {now}, and were {(shard.size, shard.version)} when the shards were"
                " listed"
            )

    def open(self, path: Path, shard: DataShard) -> RecordSource:
        """Return the records of a copy of a shard."""
        if self._iterated is not None:
            return WrittenRecords(path, label=shard.name)
        return open_file(path, self._cls, self._options, None, label=shard.name)


def _files_of_hub(name: str, *, split: str | None = None, config: str | None = None, **settings: Any) -> list[str]:
    """The files of a split of what ``load_dataset`` finds by ``name``, without loading them."""
    if is_saved(Path(name)):
        raise ConfigError(
            f"{name} is a folder of save_to_disk, whose files are read at random",
            remedy="leave streaming out; or name its files: data_path='FOLDER/*.arrow'",
        )
    what = f"the Hugging Face data set {name!r}"
    datasets = require("datasets", what)
    settings = {key: value for key, value in settings.items() if value is not None}
    try:
        builder = datasets.load_dataset_builder(name, config, **settings)
        files = getattr(builder.config, "data_files", None) or {}
    except (FileNotFoundError, ValueError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "LocalEntryNotFoundError" in text:  # the hub did not answer: another attempt may succeed
            raise ConnectionError(text) from None
        remedy = download_first(name) if is_hub_name(name) else None
        raise DataError(f"{what} cannot be listed: {text}", remedy=remedy) from error
    return [str(file) for file in files[chosen_split(split, list(map(str, files)), what)]]


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
        raise DataError(
            f"folder {path} is read as {kind!r}",
            allowed="files of one format for a streamed data set; an image folder is read without streaming",
            remedy="data_path='FOLDER/*.parquet' (of a folder of save_to_disk: '*.arrow'), or format='parquet'",
        )
    return cls


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


def _format_of(urls: Sequence[str]) -> type[RecordSource]:
    """The format of all files, by their suffixes."""
    known = by_suffix()
    suffixes = {suffix_of(Path(url.partition("?")[0])) for url in urls}
    kinds = {known.get(suffix) for suffix in suffixes}
    if len(kinds) != 1 or None in kinds:
        raise DataError(
            f"the shards have the suffixes {', '.join(sorted(suffixes))}",
            allowed=f"one format for all of them: {', '.join(sorted(known))} (and .gz, .zst)",
            remedy="format='...' names it; a data set of single image files is read without streaming",
        )
    cls: type[RecordSource] = SOURCES.module_dict[kinds.pop()]
    return cls


# --- the copies -------------------------------------------------------------------------------------------------------


class Spool:
    """The folder of the copies.

    Args:
        folder: shared by the processes of a node.
        limit: bytes that are kept; what is being used is never removed, so it may be more for a while.
        attempts: of fetching a shard.
        fetch: as of ``ShardList``.
    """

    def __init__(self, folder: Path, *, limit: int, attempts: int, fetch: Callable[[DataShard, Path], None]) -> None:
        self.folder, self.limit, self.attempts, self._fetch = folder, limit, attempts, fetch
        self.index_folder, self._shards, self._locks = folder / "index", folder / "shards", folder / "locks"
        try:
            for part in (self.index_folder, self._shards, self._locks):
                part.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                f"the folder {folder} for streamed shards cannot be made: {error.strerror}",
                remedy="cache_dir=FOLDER of the data set: a folder that can be written",
            ) from error

    @contextmanager
    def reading(self, shard: DataShard) -> Iterator[Path]:
        """The file of a shard, fetched if it is not here; it is kept until the context ends.

        Raises ``DataError`` where it cannot be fetched.
        """
        file = self._shards / shard.key / shard.file_name
        while True:
            with self._locked(shard.key, fcntl.LOCK_SH):
                if _is_whole(file, shard):
                    os.utime(file.parent)  # used now
                    yield file
                    return
            self.fetch(shard)

    def fetch(self, shard: DataShard) -> None:
        """Make a copy of a shard where there is none. Raises ``DataError`` where it cannot be fetched."""
        file = self._shards / shard.key / shard.file_name
        if _is_whole(file, shard):  # without waiting for those who read it
            return
        with self._locked(shard.key, fcntl.LOCK_EX):
            if _is_whole(file, shard):
                return
            if os.path.lexists(file):
                logger().warning("shard %s: its copy %s is damaged, and is fetched again", shard.name, file)
            with suppress(OSError):
                delete_inside(file.parent, self._shards)  # of a process that was killed
            self._make_space(shard)
            file.parent.mkdir(parents=True, exist_ok=True)
            what = f"fetching shard {shard.name} from {shard.url}"

            def fetch(target: Path) -> None:
                self._fetch(shard, target)
                if not _is_whole(target, shard):
                    raise OSError(f"it has {target.stat().st_size:,} bytes, and was listed with {shard.size}")

            def write(target: Path) -> None:
                attempted(what, self.attempts, lambda: fetch(target))

            write_where_space(file, shard.copied, write, f"shard {shard.name} cannot be stored in {self.folder}")

    def _make_space(self, shard: DataShard) -> None:
        """Remove the copies that were used longest ago, as far as the limit requires. Called with the shard's lock."""
        copies = list[tuple[float, int, Path]]()
        for path in filter(lambda path: _COPY.match(path.name), self._shards.iterdir()):  # another name is a user's
            with suppress(OSError):  # removed meanwhile
                size = sum(file.lstat().st_size for file in path.rglob("*"))
                copies.append((path.stat().st_mtime, size, path))
        total = sum(size for _, size, _ in copies) + shard.copied
        for _, size, folder in sorted(copies):
            if total <= self.limit:
                break
            with self._locked(folder.name, fcntl.LOCK_EX | fcntl.LOCK_NB) as locked:
                if locked:  # else somebody reads it, or fetches it
                    total -= size
                    with suppress(OSError):
                        delete_inside(folder, self._shards)

    @contextmanager
    def _locked(self, name: str, kind: int) -> Iterator[bool]:
        """A lock of the kernel for a shard; its value: whether it is held. It ends with the process."""
        with (self._locks / name).open("a") as stream:
            try:
                fcntl.flock(stream.fileno(), kind)
            except BlockingIOError:
                yield False
                return
            except OSError as error:
                raise DataError(
                    f"the folder {self.folder} for streamed shards has no locks: {error.strerror}",
                    remedy="cache_dir=FOLDER of the data set: a folder of a local disk",
                ) from error
            try:
                yield True
            finally:  # explicitly: a process that was started meanwhile has the same open file
                fcntl.flock(stream.fileno(), fcntl.LOCK_UN)


def _is_whole(file: Path, shard: DataShard) -> bool:
    """Whether a copy is there, as far as its size shows it."""
    try:
        status = file.stat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and shard.size in (None, status.st_size)


def attempted(what: str, attempts: int, act: Callable[[], _T]) -> _T:
    """``act()``, again after an error, with a message that counts.

    Raises ``DataError`` after the last attempt, or at once where a file does not exist or may not be read.
    """
    for attempt in range(1, attempts + 1):
        try:
            return act()
        except DataError:
            raise
        except Exception as error:  # every protocol has errors of its own
            # the HTTP file system reports a lost connection as a missing file; only the cause shows which it is
            cause = error.__cause__ or error
            response = getattr(cause, "response", None)
            status = getattr(cause, "status", None) or getattr(response, "status_code", None)
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                raise
            if status in (401, 403) or isinstance(error, PermissionError):
                raise DataError(f"{what}: access is refused", remedy="check who may read it") from error
            if status in (404, 410) or isinstance(cause, FileNotFoundError):
                raise DataError(f"{what}: it does not exist", remedy="check its name, and who may read it") from error
            problem = (str(cause).splitlines() or [type(cause).__name__])[0]
            if attempt == attempts:
                raise DataError(
                    f"{what} failed in {attempts} attempts: {problem}",
                    remedy="check the network and the shard, then continue with --resume: nothing of the run is lost",
                ) from error
            headers = getattr(cause, "headers", None) or getattr(response, "headers", None) or {}
            asked = str(headers.get("Retry-After", ""))
            wait = min(float(asked), _LONGEST_ASKED_S) if asked.isdecimal() else 0.0
        wait = max(min(2.0 ** (attempt - 1), _LONGEST_WAIT_S), wait)
        logger().warning(
            "%s: attempt %d of %d failed (%s); the next one follows in %g s", what, attempt, attempts, problem, wait
        )
        time.sleep(wait)
    raise AssertionError("attempts is at least 1")
