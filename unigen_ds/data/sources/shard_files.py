"""Shards of a streamed data set: their list, and the local copies of those that are not local.

A shard is a file of any format that has files. Its name may be a path, a url of any protocol of ``fsspec``
(``https://``, ``hf://``, ``s3://``), a pattern or a range (``part-{000..127}.tar``), or follow from a data set of the
hub. Listing reads names, sizes and versions, no record. A shard is fetched whole and read at random like any local
file. All processes of a node share the folder of the copies: the process that comes first fetches a shard.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from unigen_ds.config.paths import download_remedy, is_hub_name
from unigen_ds.config.registry import SOURCES, resolve
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.data.cache.array_cache import cache_folder, fingerprint
from unigen_ds.data.sources.base import RecordSource
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
from unigen_ds.data.sources.tables import HuggingFaceSource, choose_split, is_saved
from unigen_ds.data.sources.unpacked import require, write_where_space
from unigen_ds.system.files import delete_inside, hold_lock, quick_digest
from unigen_ds.system.log import logger

_LONGEST_WAIT_S = 30.0
_T = TypeVar("_T")
_WHOLE = re.compile(r"hf://datasets/(?P<name>[^/@]+/[^/@]+)(?:@(?P<revision>refs/[^/]+/[^/]+|[^/]+))?/?")
"""A data set of the hub; a longer path is of files of one."""
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_VERSIONS = ("blob_id", "ETag", "etag", "md5Hash", "checksum", "LastModified", "Last-Modified", "mtime")
"""Facts of file systems that change with a file's content."""
_SILENCE_S = 60.0
"""Seconds without a byte, or without a connection, after which a transfer over HTTP is interrupted."""


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
    def is_local(self) -> bool:
        return "://" not in self.url

    @property
    def file_name(self) -> str:
        return re.sub(r"[^\w.\-]", "_", self.name.rpartition("/")[2])[-100:] or "records"

    def is_whole(self, file: Path) -> bool:
        """Whether ``file`` is the shard, as far as its size shows it."""
        try:
            status = file.stat()  # once: another process may be replacing a damaged copy
        except (FileNotFoundError, NotADirectoryError):
            return False
        return stat.S_ISREG(status.st_mode) and self.size in (None, status.st_size)


class ShardList:
    """The shards of ``data_path``, their copies, and how each is opened.

    Copies are below ``cache_dir``, beside local data, or in the user's cache. Raises ``DataError`` where there is no
    shard, or where they cannot be listed; ``ConfigError`` for an unknown format, and for one that has no shards.
    ``storage_options``: of the file system of ``fsspec``; ``attempts``: of listing or fetching a shard.
    """

    def __init__(
        self,
        data_path: DataPath,
        *,
        format: str | Mapping[str, Any] | None,
        cache_dir: Path | None,
        storage_options: Mapping[str, Any],
        attempts: int,
    ) -> None:
        self._storage, self._attempts = dict(storage_options), attempts
        paths, spec = requested_format(data_path, format)
        cls, options = resolve(SOURCES, spec, where="format") if spec else (None, {})
        whole = _WHOLE.fullmatch(str(paths[0]))
        if whole or cls is HuggingFaceSource:
            name, revision = (whole["name"], whole["revision"]) if whole else (str(paths[0]), None)
            settings = {"revision": revision, "token": self._storage.get("token"), **options}
            attempts_of_hub = min(attempts, 2)  # the package makes several attempts of its own
            urls = retry(f"listing the data set {name}", attempts_of_hub, lambda: _files_of_hub(name, **settings))
            cls, options = None, {}
        else:
            urls = retry(f"listing {', '.join(map(str, paths))}", attempts, lambda: self._urls(paths, cls))
        if not urls:
            raise DataError("data_path has no file")

        def look(url: str, name: str) -> DataShard:
            what = f"looking for shard {name} at {url}"
            return retry(what, attempts, lambda: DataShard(name, url, *self._facts_of(url)))

        with ThreadPoolExecutor(16) as pool:
            self.shards = tuple(pool.map(look, urls, _names(urls)))
        self.root = Path(urls[0]).parent if self.shards[0].is_local else None
        """The folder that relative image paths start from; None: there is none."""
        if cls is None:
            suffixes = {suffix_of(Path(url.partition("?")[0])) for url in urls}
            kinds = {by_suffix().get(suffix) for suffix in suffixes}
            if len(kinds) != 1 or None in kinds:
                raise DataError(
                    f"the shards have the suffixes {', '.join(sorted(suffixes))}",
                    allowed=f"one format for all of them: {', '.join(sorted(by_suffix()))} (and .gz, .zst)",
                    remedy="format='...' names it; a data set of single image files is read without streaming",
                )
            cls = SOURCES.module_dict[kinds.pop()]
        self._cls: type[RecordSource] = cls
        self._options = options
        self.facts: tuple[object, ...] = (self._cls.__name__, sorted(options.items()))
        """What decides besides the shards how records are read."""
        self.captions, self.batch = self._cls.captions, self._cls.batch
        folder = cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unigen_ds"
        if self.root is not None:
            folder = cache_folder(Path(urls[0]), cache_dir) or folder
        self.folder, self.index_folder = folder / "streamed", folder / "streamed" / "index"
        try:
            self.index_folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"the folder {self.folder} for streamed shards cannot be made: {error.strerror}"
            raise DataError(problem, remedy="cache_dir=FOLDER of the data set: a folder that can be written") from error

    def _urls(self, paths: Sequence[str | Path], cls: type | None) -> list[str]:
        """Paths and urls of the files, numbers in their names by their value."""
        urls: list[str] = []
        for text in (text for one in paths for text in _ranges(str(one))):
            if "://" not in text:
                is_folder = cls is None and Path(text).is_dir()
                of_format = SOURCES.module_dict[one_format([Path(text)])] if is_folder else cls or RecordSource
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
            remedy = "install the package that it names, or use another protocol"
            raise DataError(f"{url}: {error}", remedy=remedy) from error
        return filesystem, str(path)

    def _facts_of(self, url: str) -> tuple[int | None, str | None]:
        """Size and version of a file, as far as its server has them. Raises where it does not exist."""
        filesystem, path = self._filesystem(url)
        info = filesystem.info(path)
        if "file" in filesystem.protocol:
            if info["type"] != "file":
                raise FileNotFoundError(path)
            return info["size"], quick_digest(Path(path), blocks=2)  # of its ends alone: there may be thousands
        lfs = info.get("lfs")
        digest = lfs.get("sha256") if isinstance(lfs, Mapping) else getattr(lfs, "sha256", None)
        version = next((value for value in (digest, *map(info.get, _VERSIONS)) if value), None)
        return info.get("size"), None if version is None else str(version)

    def file_of(self, shard: DataShard) -> Path:
        """The file of a shard, which is fetched where there is no copy. Raises ``DataError`` where that fails."""
        if shard.is_local:
            if not shard.is_whole(Path(shard.url)):
                raise DataError(
                    f"shard {shard.name}: {shard.url} is no longer the file that was listed",
                    remedy="restore it, then continue with --resume; --on-data-change continues with changed data",
                )
            return Path(shard.url)
        key = fingerprint(*shard.facts, *(() if shard.version else (shard.url,)))[:16]
        file = self.folder / "shards" / f"{key}-{shard.file_name}" / shard.file_name
        if shard.is_whole(file):  # without waiting for others
            return file
        file.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(file.with_name(f".{file.name}.lock")):
            if shard.is_whole(file):  # another process was first
                return file
            if os.path.lexists(file):
                logger().warning("shard %s: its copy %s is damaged, and is fetched again", shard.name, file)
                with suppress(OSError):
                    delete_inside(file, file.parent)
            what = f"fetching shard {shard.name} from {shard.url}"

            def write(target: Path) -> None:
                retry(what, self._attempts, lambda: self._fetch(shard, target))

            write_where_space(file, shard.size or 0, write, f"shard {shard.name} cannot be stored in {self.folder}")
        return file

    def _fetch(self, shard: DataShard, target: Path) -> None:
        """Copy a shard. Raises anything where that fails, or where it is another file than the one of the list."""
        filesystem, path = self._filesystem(shard.url)
        settings: dict[str, Any] = {}
        if shard.url.startswith("http"):
            settings["headers"] = {**filesystem.kwargs.get("headers", {}), "Accept-Encoding": "identity"}
        filesystem.get_file(path, str(target), **settings)
        facts, was = self._facts_of(shard.url), (shard.size, shard.version)
        if any(old not in (None, new) for old, new in zip(was, facts, strict=True)):  # a list need not have both
            raise OSError(f"it changed: size and version are {facts}, and were {was} when the shards were listed")
        if not shard.is_whole(target):
            raise OSError(f"it has {target.stat().st_size:,} bytes, and was listed with {shard.size}")

    def open(self, shard: DataShard) -> RecordSource:
        """Return the records of a shard, whose file is fetched where it is not here."""
        return open_file(self.file_of(shard), self._cls, self._options, self.index_folder, label=shard.name)


def _files_of_hub(name: str, *, split: str | None = None, config: str | None = None, **settings: Any) -> list[str]:
    """The files of a split of what ``load_dataset`` finds by ``name``, without loading them."""
    if is_saved(Path(name)):
        problem = f"{name} is a folder of save_to_disk, whose files are read at random"
        raise ConfigError(problem, remedy="leave streaming out; or name its files: data_path='FOLDER/*.arrow'")
    what = f"the Hugging Face data set {name!r}"
    datasets = require("datasets", what)
    settings = {key: value for key, value in settings.items() if value is not None}
    try:
        files = getattr(datasets.load_dataset_builder(name, config, **settings).config, "data_files", None) or {}
    except (FileNotFoundError, ValueError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "LocalEntryNotFoundError" in text:  # the hub did not answer: another attempt may succeed
            raise ConnectionError(text) from None
        remedy = download_remedy(name, data=True) if is_hub_name(name) else None
        raise DataError(f"{what} cannot be listed: {text}", remedy=remedy) from error
    return [str(file) for file in files[choose_split(split, list(map(str, files)), what)]]


def _ranges(text: str) -> list[str]:
    """``part-{08..11}.tar`` as four names."""
    match = _RANGE.search(text)
    if match is None:
        return [text]
    first, last = match[1], match[2]
    numbers = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return [one for number in numbers for one in _ranges(text[: match.start()] + number + text[match.end() :])]


def _names(urls: Sequence[str]) -> list[str]:
    """Return each shard's path below the folder that all have in common, so that data may be moved."""
    paths = [re.sub(r"^\w+://[^/]*", "", url).partition("?")[0] if "://" in url else url for url in urls]
    if len(paths) == 1:
        return [PurePosixPath(paths[0]).name]
    top = os.path.commonpath([os.path.dirname(path) or "/" for path in paths])
    names = [os.path.relpath(path, top) for path in paths]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"shard {twice} is there more than once", remedy="name each file once in data_path")
    return names


def retry(what: str, attempts: int, act: Callable[[], _T]) -> _T:
    """Return ``act()``, which is repeated after an error that may pass. Raises ``DataError`` after the last attempt."""
    for attempt in range(1, attempts + 1):
        try:
            return act()
        except DataError:
            raise
        except Exception as error:  # every protocol has errors of its own
            # the HTTP file system reports a lost connection as a missing file; only the cause shows which it is
            cause = error.__cause__ or error
            status = getattr(cause, "status", None) or getattr(getattr(cause, "response", None), "status_code", None)
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                raise
            if status in (401, 403, 404, 410) or isinstance(cause, PermissionError | FileNotFoundError):
                why = f"it does not exist, or may not be read ({status or type(cause).__name__})"
                raise DataError(f"{what}: {why}", remedy="check its name, and who may read it") from error
            problem = (str(cause).splitlines() or [type(cause).__name__])[0]
            if attempt == attempts:
                raise DataError(
                    f"{what} failed in {attempts} attempts: {problem}",
                    remedy="check the network and the shard, then continue with --resume: nothing of the run is lost",
                ) from error
        wait = min(2.0 ** (attempt - 1), _LONGEST_WAIT_S)
        logger().warning("%s: attempt %d of %d failed (%s); the next in %g s", what, attempt, attempts, problem, wait)
        time.sleep(wait)
    raise AssertionError("attempts is at least 1")
