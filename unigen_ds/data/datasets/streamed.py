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
from unigen_ds.data.samples.processor import ConversationProcessor
from unigen_ds.data.samples.sample import RULE_VERSIONS, RULES
from unigen_ds.data.sources.base import Arrays, FoundRecord, RecordSource
from unigen_ds.data.sources.find import DataPath
from unigen_ds.data.sources.shard_files import DataShard, ShardList, Spool
from unigen_ds.data.sources.unpacked import format_size
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

    def keep(self, shard: int, value: _T, *, records: int) -> None:
        """``value`` is forgotten after others were used."""
        self._values[shard] = records, value
        while len(self._values) > self._number and sum(number for number, _ in self._values.values()) > _KEPT_RECORDS:
            self._values.popitem(last=False)


class StreamedShards:
    """The shards of a data set, and the index of each.

    Copies are below ``cache_dir``, beside local data, or in the user's cache. Raises ``DataError`` and ``ConfigError``
    as ``ShardList``.

    Args:
        data_path, format: of the data set.
        processor: plans the records.
        cache_dir: of the data set.
        layout: without ``captions`` that of the format.
        settings: of the config.
        facts: what else decides which samples there are (filters), for the fingerprint.
        build: further arguments of ``Index.build``.
    """

    def __init__(
        self,
        data_path: DataPath,
        processor: ConversationProcessor,
        *,
        format: str | Mapping[str, Any] | None,
        cache_dir: Path | None,
        layout: Layout,
        settings: Streaming,
        facts: Sequence[object],
        **build: Any,
    ) -> None:
        limit = int(settings.cache_gib * (1 << 30))
        self.listed = listed = ShardList(
            data_path,
            format=format,
            storage_options=settings.storage_options,
            attempts=settings.attempts,
            limit=limit,
        )
        folder = cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unigen_ds"
        if listed.root is not None:
            beside = cache_folder(Path(listed.shards[0].url), cache_dir)
            if beside is None:
                raise DataError(
                    f"the folder {listed.root} cannot be written, and no other one is given for what is streamed",
                    remedy="cache_dir=FOLDER of the data set",
                )
            folder = beside
        self.spool = Spool(folder / "streamed", limit=limit, attempts=settings.attempts, fetch=listed.fetch)
        self.processor, self.settings, self._facts, self._build_options = processor, settings, tuple(facts), build
        self._layout = replace(layout, captions=layout.captions or listed.captions)
        self.mixed = min(settings.mixed_shards, len(self))
        """Shards whose records are shuffled together."""
        self._recent: Recent[Index] = Recent(2 * settings.mixed_shards + 1)
        self._ahead: set[int] = set()
        self._reported: set[int] = set()
        self.fetches_ahead = False
        """Whether ``prepare`` does anything: a run needs the records soon, a tool that only plans does not."""
        by_size = sorted(listed.shards, key=lambda shard: shard.copied, reverse=True)[: 2 * self.mixed]
        total = sum(shard.copied for shard in by_size)
        if total > limit:
            raise DataError(
                f"streaming.mixed_shards={settings.mixed_shards} uses {len(by_size)} shards at a time (those that are"
                f" mixed, and the next ones), which have up to {format_size(total)} (the largest: {by_size[0].name},"
                f" {format_size(by_size[0].copied)}); streaming.cache_gib keeps {format_size(limit)}",
                remedy="a larger cache_gib, or fewer mixed_shards",
            )

    def __len__(self) -> int:
        return len(self.listed.shards)

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
        listed, own_folders = self.listed, tuple[object, ...]()
        if self._layout.folders and any(Path(shard.url).parent != listed.root for shard in listed.shards):
            own_folders = (("image_folders", RULE_VERSIONS["image_folders"]),) if listed.root is not None else ()
        shards = [shard.facts for shard in listed.shards]
        facts = (*listed.facts, *self._layout.facts, *self._facts, *own_folders)
        return fingerprint(_FORMAT, shards, self.settings.mixed_shards, self.processor.fingerprint, RULES, *facts)

    def index(self, shard: int) -> Index:
        """Of a shard, from the cache or by fetching and planning it. Raises ``DataError`` where that is impossible."""
        index = self._recent.get(shard)
        if index is None:
            index = self._build(shard, self.processor)
            self._recent.keep(shard, index, records=len(index))
            self._ahead.discard(shard)
        return index

    def prepare(self, shards: Sequence[int]) -> None:
        """Fetch and plan some shards in the background. What fails is tried again, and reported, when it is needed."""
        new = [shard for shard in shards if shard not in self._ahead and self._recent.get(shard) is None]
        if not new or not self.fetches_ahead:
            return
        self._ahead.update(new)
        processor = copy.deepcopy(self.processor)  # a tokenizer is set before each call

        def work() -> None:
            for shard in new:
                try:
                    self.spool.fetch(self.listed.shards[shard])  # also where its index is known
                    self._build(shard, processor)  # whose file the next one that asks for it waits for
                except Exception as error:
                    logger().debug("shard %d was not prepared: %s", shard, error)

        threading.Thread(target=work, name="streamed-shards", daemon=True).start()

    def _build(self, shard: int, processor: ConversationProcessor) -> Index:
        report = parent_process() is None and shard not in self._reported
        self._reported.add(shard)
        source = ShardSource(self.listed.shards[shard], self.listed, self.spool, own_folder=self._layout.folders)
        return Index.build(source, processor, layout=self._layout, report=report, **self._build_options)
