"""A streamed data set: its shards, of which each is planned when it is reached, and read from a local file.

A record's number is ``shard * SPAN + its position in the shard``, so it names the record whatever else was read. The
index of a shard (lengths, digests, positions) is an ``Index`` like that of a data file, cached by the shard's name,
size and version, so a resume plans without fetching anything.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from pydantic import Field

from unigen_ds.config.section import Section
from unigen_ds.core.errors import DataError
from unigen_ds.data.cache.array_cache import fingerprint
from unigen_ds.data.index.index import Index
from unigen_ds.data.records.records import Layout
from unigen_ds.data.samples.processor import ConversationProcessor
from unigen_ds.data.sources.base import Arrays, RecordSource, Row
from unigen_ds.data.sources.find import DataPath
from unigen_ds.data.sources.shard_files import DataShard, ShardList
from unigen_ds.system.files import quick_digest
from unigen_ds.system.log import logger

_MOST_RECORDS = 1 << 20
SPAN = 10**9
"""Numbers of records of a shard: more than it has."""
_FORMAT = "unigen-streamed-1"
_RECORDS, _DIGEST = "shard_records", "shard_digest"
"""Arrays of a shard's index: how many records it has, and the quick digest of its file."""
_DIGEST_MIB = 8
"""MiB of a copy that are compared when it is opened."""
_T = TypeVar("_T", bound=Sized)


class Streaming(Section):
    """How a data set is streamed."""

    mixed_shards: int = Field(default=4, ge=1)
    """Shards whose records are shuffled together; another number is another order."""
    attempts: int = Field(default=5, ge=1)
    """Attempts of fetching a shard, before the run ends."""
    storage_options: Mapping[str, Any] = Field(default={})
    """Arguments of the file system of `fsspec`: keys, endpoints."""


class ShardSource(RecordSource):
    """The records of one shard, fetched for the first. ``own_folder``: image paths start at that of a local shard."""

    def __init__(self, shard: DataShard, shard_list: ShardList, *, own_folder: bool = False) -> None:
        super().__init__(Path(shard.file_name), label=shard.name, folder=shard_list.index_folder)
        self.shard, self._shard_list = shard, shard_list
        self._moved = shard_list.root is not None and own_folder and Path(shard.url).parent != shard_list.root
        self.captions, self.batch = shard_list.captions, shard_list.batch  # type: ignore[misc]
        self._arrays: Arrays = {}
        self._records: tuple[int, RecordSource] | None = None
        """The inode of the shard's file, and its records."""

    @property
    def title(self) -> str:
        return f"shard {self.shard.name}"

    @property
    def files(self) -> Sequence[Path]:
        return ()

    @property
    def root(self) -> Path:
        return Path(self.shard.url).parent if self._moved else self._shard_list.root or self._shard_list.folder

    @property
    def fingerprint(self) -> str:
        return fingerprint(*self._shard_list.facts)

    def index_folder(self, cache_dir: Path | None) -> Path:
        return self._shard_list.index_folder

    def content_digest(self, folder: Path | None) -> str:
        """Digest of what is known of the shard without reading it."""
        return fingerprint(_FORMAT, *self.shard.facts)

    def scan(self) -> Arrays:
        with self._reading() as source:
            arrays = source.scan()
            source.use(arrays)
            self.notes = source.notes
            if len(source) >= SPAN:
                raise DataError(f"{self.title} has {len(source):,} records", allowed=f"fewer than {SPAN:,} in a shard")
            digest = np.frombuffer(bytes.fromhex(quick_digest(source.origin, blocks=_DIGEST_MIB)), np.uint8)
            return {**arrays, _RECORDS: np.asarray([len(source)], np.int64), _DIGEST: digest}

    def use(self, arrays: Arrays) -> None:
        self._arrays, self._records = arrays, None

    def __len__(self) -> int:
        return int(self._arrays[_RECORDS][0])

    def read(self, start: int, stop: int) -> Sequence[Row]:
        with self._reading() as source:
            return source.read(start, stop)

    @contextmanager
    def _reading(self) -> Iterator[RecordSource]:
        """The source of the shard's file. Raises ``DataError`` where it is another file than that of the index."""
        inode = self._shard_list.file_of(self.shard).stat().st_ino
        try:
            if self._records is None or self._records[0] != inode:
                self._records = inode, self._open()
            yield self._records[1]
        except DataError as error:
            raise error.at(self.title) from error

    def _open(self) -> RecordSource:
        source = self._shard_list.open(self.shard)
        if self._arrays:
            if bytes.fromhex(quick_digest(source.origin, blocks=_DIGEST_MIB)) != self._arrays[_DIGEST].tobytes():
                raise DataError(
                    "its content is not that of its index: the shard changed",
                    remedy="restore it, then continue with --resume; --on-data-change continues with changed data;"
                    f" where only the copy {source.origin} is damaged, remove that",
                )
            source.use({name: array for name, array in self._arrays.items() if name not in (_RECORDS, _DIGEST)})
        return source


class Recent(Generic[_T]):
    """``make(shard)`` of the shards that were used last: at least ``number`` of them, and all up to 2^20 records."""

    def __init__(self, number: int, make: Callable[[int], _T]) -> None:
        self._number, self._make = number, make
        self._values: OrderedDict[int, _T] = OrderedDict()

    def __getitem__(self, shard: int) -> _T:
        if shard not in self._values:
            self._values[shard] = self._make(shard)
            while len(self._values) > self._number and sum(map(len, self._values.values())) > _MOST_RECORDS:
                self._values.popitem(last=False)
        self._values.move_to_end(shard)
        return self._values[shard]


class StreamedShards:
    """The shards of a data set, and the index of each. Raises ``DataError`` and ``ConfigError`` as ``ShardList``.
    ``layout``: without ``captions`` that of the format. ``facts``: what else decides which samples there are (filters),
    for the fingerprint. ``build``: further arguments of ``Index.build``.
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
        options: dict[str, Any] = {"storage_options": settings.storage_options, "attempts": settings.attempts}
        self.shard_list = ShardList(data_path, format=format, cache_dir=cache_dir, **options)
        self.processor, self.settings, self._facts, self._build_options = processor, settings, tuple(facts), build
        self._layout = replace(layout, captions=layout.captions or self.shard_list.captions)
        self.num_mixed = min(settings.mixed_shards, len(self))
        self.indexes: Recent[Index] = Recent(2 * settings.mixed_shards + 1, self._build)
        """The index of each shard, from the cache, or made of the fetched shard, which may raise ``DataError``."""
        self._ahead: set[int] = set()
        self.fetches_ahead = False
        """Whether ``prepare`` does anything: a run needs the records soon, a tool that only plans does not."""

    def __len__(self) -> int:
        return len(self.shard_list.shards)

    @property
    def measured_part(self) -> str:
        """The part that a start measures: all that it reports of records is of it."""
        return f"shard {self.shard_list.shards[0].name} (1 of {len(self):,})"

    def title(self, name: str) -> str:
        """How messages call what is measured of the data set ``name``."""
        return f"{name}, {self.measured_part}" if len(self) > 1 else name

    @property
    def size(self) -> int | None:
        """Bytes of all; None: not known."""
        sizes = [shard.size for shard in self.shard_list.shards]
        return None if None in sizes else sum(size or 0 for size in sizes)

    @property
    def fingerprint(self) -> str:
        """Changes with every name, size and version of a shard, and with what decides how they are read and mixed."""
        shard_list, layout = self.shard_list, self._layout
        facts = (*shard_list.facts, layout.folders, *layout.facts, *self._facts)
        shards = [shard.facts for shard in shard_list.shards]
        return fingerprint(_FORMAT, shards, self.settings.mixed_shards, self.processor.fingerprint, *facts)

    def prepare(self, shards: Sequence[int]) -> None:
        """Fetch and plan shards in the background, each once. What fails is tried again, and reported, when needed."""
        new = [shard for shard in shards if shard not in self._ahead]
        if not new or not self.fetches_ahead:
            return
        self._ahead.update(new)
        processor = copy.deepcopy(self.processor)  # a tokenizer is set before each call

        def work() -> None:
            for shard in new:
                try:
                    self.shard_list.file_of(self.shard_list.shards[shard])  # also where its index is known
                    self._build(shard, processor)  # whose file the next one that asks for it waits for
                except Exception as error:
                    logger().debug("shard %d was not prepared: %s", shard, error)

        threading.Thread(target=work, name="streamed-shards", daemon=True).start()

    def _build(self, shard: int, processor: ConversationProcessor | None = None) -> Index:
        source = ShardSource(self.shard_list.shards[shard], self.shard_list, own_folder=self._layout.folders)
        return Index.build(source, processor or self.processor, layout=self._layout, **self._build_options)
