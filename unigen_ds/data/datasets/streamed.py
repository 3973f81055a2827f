"""A streamed data set: its shards, of which each is planned when it is reached, and read from a local copy.

A record's number is ``shard * SPAN + its position in the shard``, so it names the record whatever else was read. The
index of a shard (lengths, digests, positions) is an ``Index`` like that of a data file, cached by the shard's name,
size and version: it stays when the shard itself is removed, so a resume, or a later pass, plans without fetching
anything.
"""

from __future__ import annotations

import copy
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from pydantic import Field

from unigen_ds.config.section import Section
from unigen_ds.config.values import Number
from unigen_ds.core.errors import DataError
from unigen_ds.data.cache.array_cache import cache_folder, fingerprint
from unigen_ds.data.index.index import Index
from unigen_ds.data.records.records import Layout
from unigen_ds.data.records.unusable import OnRecordError
from unigen_ds.data.samples.processor import ConversationProcessor
from unigen_ds.data.samples.sample import RULE_VERSIONS, RULES
from unigen_ds.data.sources.base import Arrays, FoundRecord, RecordSource
from unigen_ds.data.sources.find import DataPath
from unigen_ds.data.sources.shards.shard_list import ShardList, list_shards
from unigen_ds.data.sources.shards.spool import DataShard, Spool, shown
from unigen_ds.system.files import quick_digest
from unigen_ds.system.log import logger

SPAN = 10**9
"""Numbers of records of a shard: more than it has."""
_FORMAT = "unigen-streamed-1"
_RECORDS, _DIGEST = "shard_records", "shard_digest"
"""Arrays of a shard's index: how many records it has, and the quick digest of its file."""
_DIGESTED = 8
"""MiB of a copy that are compared when it is opened."""
_KEPT_RECORDS = 1 << 20
_T = TypeVar("_T")


class Streaming(Section):
    """How a data set is streamed."""

    cache_gib: Number = Field(
        default=32.0, gt=0, description="GiB of shards that are kept on the disk of a node; others are fetched again"
    )
    mixed_shards: int = Field(
        default=4, ge=1, description="shards whose records are shuffled together; another number is another order"
    )
    attempts: int = Field(default=5, ge=1, description="attempts of fetching a shard, before the run ends")
    storage_options: Mapping[str, Any] = Field(
        default={}, description="arguments of the file system of `fsspec`: keys, endpoints"
    )

    @property
    def limit(self) -> int:
        """``cache_gib`` in bytes."""
        return int(self.cache_gib * (1 << 30))


class ShardSource(RecordSource):
    """The records of one shard. It is fetched when the first one is read: an index from the cache needs nothing.

    ``own_folder``: relative image paths start at the folder of a local shard, not of the first one.
    """

    def __init__(self, shard: DataShard, listed: ShardList, spool: Spool, *, own_folder: bool = False) -> None:
        super().__init__(Path(shard.file_name), label=shard.name, folder=spool.index_folder)
        self.shard, self.spool, self._listed = shard, spool, listed
        self._moved = listed.root is not None and own_folder and Path(shard.url).parent != listed.root
        self.captions, self.batch = listed.captions, listed.batch  # type: ignore[misc]
        self._arrays: Arrays = {}
        self._opened: tuple[Path, int, RecordSource] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    @property
    def title(self) -> str:
        return f"shard {self.shard.name}"

    @property
    def files(self) -> Sequence[Path]:
        return ()

    @property
    def root(self) -> Path:
        return Path(self.shard.url).parent if self._moved else self._listed.root or self.spool.folder

    @property
    def cache_facts(self) -> tuple[object, ...]:
        return (*self._listed.facts, *(("image_folders",) if self._moved else ()))

    def index_folder(self, cache_dir: Path | None) -> Path:
        """That of the spool."""
        return self.spool.index_folder

    def content_digest(self, folder: Path | None) -> str:
        """Of what is known without reading it."""
        return fingerprint(_FORMAT, *self.shard.facts)

    def scan(self) -> Arrays:
        with self._reading() as source:
            arrays = source.scan()
            source.use(arrays)
            if len(source) >= SPAN:
                raise DataError(f"{self.title} has {len(source):,} records", allowed=f"fewer than {SPAN:,} in a shard")
            digest = np.frombuffer(bytes.fromhex(quick_digest(source.origin, blocks=_DIGESTED)), np.uint8)
            return {**arrays, _RECORDS: np.asarray([len(source)], np.int64), _DIGEST: digest}

    def use(self, arrays: Arrays) -> None:
        self._arrays, self._opened = arrays, None

    def __len__(self) -> int:
        return int(self._arrays[_RECORDS][0])

    def read(self, start: int, stop: int) -> Sequence[FoundRecord]:
        with self._reading() as source:
            return source.read(start, stop)

    def notes(self) -> Sequence[str]:
        return () if self._opened is None else self._opened[2].notes()

    @contextmanager
    def _reading(self) -> Iterator[RecordSource]:
        """The source of the copy, which stays there until the context ends. Raises ``DataError`` for another file."""
        with self.spool.reading(self.shard) as path:
            inode = path.stat().st_ino
            try:
                if self._opened is None or self._opened[:2] != (path, inode):
                    self._opened = path, inode, self._open(path)
                yield self._opened[2]
            except DataError as error:
                raise error.at(self.title) from error

    def _open(self, path: Path) -> RecordSource:
        source = self._listed.open(path, self.shard)
        if self._arrays:
            if bytes.fromhex(quick_digest(source.origin, blocks=_DIGESTED)) != self._arrays[_DIGEST].tobytes():
                raise DataError(
                    "its content is not that of its index: the shard changed",
                    remedy="restore it, then continue with --resume; --on-data-change continues with changed data;"
                    f" where only the copy {path} is damaged, remove that",
                )
            source.use({name: array for name, array in self._arrays.items() if name not in (_RECORDS, _DIGEST)})
        return source


class Recent(Generic[_T]):
    """What was made of the shards that were used last: at least ``number`` of them, and all up to 2^20 records."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._values: OrderedDict[int, tuple[int, _T]] = OrderedDict()

    def get(self, shard: int) -> _T | None:
        """None: it is not kept."""
        if shard not in self._values:
            return None
        self._values.move_to_end(shard)
        return self._values[shard][1]

    def keep(self, shard: int, value: _T, *, records: int) -> _T:
        """``value``, which is forgotten after others were used."""
        self._values[shard] = records, value
        while len(self._values) > self._number and sum(number for number, _ in self._values.values()) > _KEPT_RECORDS:
            self._values.popitem(last=False)
        return value


class StreamedShards:
    """The shards of a data set, and the index of each.

    Copies are below ``cache_dir``, beside local data, or in the user's cache. Raises ``DataError`` and ``ConfigError``
    as ``list_shards``.

    Args:
        data_path, format: of the data set.
        processor, image_root, num_workers, on_record_error: as of ``Index.build``.
        layout: without ``captions`` that of the format.
        settings: of the config.
        facts: what else decides which samples there are (filters), for the fingerprint.
    """

    def __init__(
        self,
        data_path: DataPath,
        processor: ConversationProcessor,
        *,
        format: str | Mapping[str, Any] | None,
        cache_dir: Path | None,
        layout: Layout,
        image_root: Path | None,
        num_workers: int,
        settings: Streaming,
        facts: Sequence[object],
        on_record_error: OnRecordError,
    ) -> None:
        self.listed = list_shards(
            data_path,
            format=format,
            storage_options=settings.storage_options,
            attempts=settings.attempts,
            limit=settings.limit,
        )
        folder = self._copies_folder(cache_dir)
        self.spool = Spool(folder, limit=settings.limit, attempts=settings.attempts, fetch=self.listed.fetch)
        self.processor, self.settings, self._facts = processor, settings, tuple(facts)
        self._layout = replace(layout, captions=layout.captions or self.listed.captions)
        self._image_root, self._num_workers, self._on_record_error = image_root, num_workers, on_record_error
        self._recent: Recent[Index] = Recent(2 * settings.mixed_shards + 1)
        self._ahead: dict[int, Future[Index | None]] = {}
        self._process = os.getpid()
        self._reported: set[int] = set()
        self.fetches_ahead = False
        """Whether ``prepare`` does anything: a run needs the records soon, a tool that only plans does not."""
        self._check_limit()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ahead": {}, "fetches_ahead": False}

    def __len__(self) -> int:
        return len(self.listed.shards)

    def _copies_folder(self, cache_dir: Path | None) -> Path:
        folder = cache_dir
        if self.listed.root is not None:
            folder = cache_folder(Path(self.listed.shards[0].url), cache_dir)
            if folder is None:
                raise DataError(
                    f"the folder {self.listed.root} cannot be written, and no other one is given for what is streamed",
                    remedy="cache_dir=FOLDER of the data set",
                )
        elif folder is None:
            folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unigen_ds"
        return folder / "streamed"

    def _check_limit(self) -> None:
        """Raise ``DataError`` where the shards that are shuffled together, and the next ones, exceed the limit."""
        by_size = sorted(self.listed.shards, key=lambda shard: shard.copied, reverse=True)
        largest = [shard.copied for shard in by_size[: 2 * self.mixed]]
        if sum(largest) > self.settings.limit:
            raise DataError(
                f"streaming.mixed_shards={self.settings.mixed_shards} uses {len(largest)} shards at a time (those that"
                f" are mixed, and the next ones), which have up to {shown(sum(largest))}"
                f" (the largest: {by_size[0].name}, {shown(largest[0])});"
                f" streaming.cache_gib keeps {shown(self.settings.limit)}",
                remedy="a larger cache_gib, or fewer mixed_shards",
            )

    @property
    def mixed(self) -> int:
        """Shards whose records are shuffled together."""
        return min(self.settings.mixed_shards, len(self))

    @property
    def measured(self) -> str:
        """The part that a start measures: lengths, images, and all that it reports of records are of it."""
        return f"shard {self.listed.shards[0].name} (1 of {len(self):,})"

    def titled(self, name: str) -> str:
        """How messages call what is measured of the data set ``name``."""
        return f"{name}, {self.measured}" if len(self) > 1 else name

    @property
    def size(self) -> int | None:
        """Bytes of all; None: not known."""
        sizes = [shard.size for shard in self.listed.shards]
        return None if None in sizes else sum(size or 0 for size in sizes)

    @property
    def fingerprint(self) -> str:
        """Changes with every name, size and version of a shard, and with what decides how they are read and mixed."""
        shards = [shard.facts for shard in self.listed.shards]
        facts = (*self.listed.facts, *self._layout.facts, *self._facts, *self._folders)
        return fingerprint(_FORMAT, shards, self.settings.mixed_shards, self.processor.fingerprint, RULES, *facts)

    @property
    def _folders(self) -> tuple[object, ...]:
        """That images of local shards in different folders start beside each; nothing where it changes none."""
        if not self._layout.folders or self.listed.root is None:
            return ()
        moved = any(Path(shard.url).parent != self.listed.root for shard in self.listed.shards)
        return (("image_folders", RULE_VERSIONS["image_folders"]),) if moved else ()

    def index(self, shard: int) -> Index:
        """Of a shard, from the cache or by fetching and planning it. Raises ``DataError`` where that is impossible."""
        index = self._recent.get(shard)
        if index is None:
            ahead = self._ahead.pop(shard, None)
            if ahead is not None and self._process == os.getpid():  # a process that was forked has no thread
                index = ahead.result()
            index = index or self._build(shard, self.processor)
            self._recent.keep(shard, index, records=len(index))
        return index

    def find(self, number: int) -> tuple[Index, int]:
        """The index that has a record, and the record's position there."""
        shard, position = divmod(number, SPAN)
        return self.index(shard), position

    def prepare(self, shards: Sequence[int]) -> None:
        """Fetch and plan some shards in the background. What fails is tried again, and reported, when it is needed."""
        self._ahead = {shard: ahead for shard, ahead in self._ahead.items() if not ahead.done() or shard in shards}
        new: dict[int, Future[Index | None]] = {
            shard: Future() for shard in shards if shard not in self._ahead and self._recent.get(shard) is None
        }
        if not new or not self.fetches_ahead:
            return
        processor = copy.deepcopy(self.processor)  # a tokenizer is set before each call
        self._ahead |= new

        def work() -> None:
            for shard, ahead in new.items():
                try:
                    # also where its index is known; not kept while it is built: who builds it fetches it, too
                    self.spool.fetch(self.listed.shards[shard])
                    ahead.set_result(self._build(shard, processor))
                except BaseException as error:
                    logger().debug("shard %d was not prepared: %s", shard, error)
                    ahead.set_result(None)

        threading.Thread(target=work, name="streamed-shards", daemon=True).start()

    def _build(self, shard: int, processor: ConversationProcessor) -> Index:
        report = parent_process() is None and shard not in self._reported
        self._reported.add(shard)
        own_folder = self._layout.folders
        source = ShardSource(self.listed.shards[shard], self.listed, self.spool, own_folder=own_folder)
        return Index.build(
            source,
            processor,
            image_root=self._image_root,
            num_workers=self._num_workers,
            layout=self._layout,
            report=report,
            on_record_error=self._on_record_error,
        )
