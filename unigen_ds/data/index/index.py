"""Every record of a source planned once -> arrays of positions, lengths and counts, cached beside the data file.

What packing, truncation and statistics need of a record without reading it again. The cache is a file in
``.unigen_index/`` beside the data file (or in ``cache_dir`` where that folder cannot be written), named after a
fingerprint of data file, processor and format, and mapped into the memory of every process (``array_cache.py``).
Trade-off: the first start parses, tokenizes, counts and digests every record (two cores do about 40,000 texts of 20
words a second; an image costs one header read), and writes about 110 bytes a record; a later start maps them.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unigen_ds.core.errors import DataError, short_value
from unigen_ds.data.cache.array_cache import SUFFIX, ArrayFile, fingerprint, load_or_fill
from unigen_ds.data.records.records import Layout, Record, Turn, unused_texts
from unigen_ds.data.records.unusable import (
    BadRecord,
    MalformedRecord,
    OnRecordError,
    as_array,
    from_array,
    unusable_error,
    unused_keys,
)
from unigen_ds.data.samples.processor import ConversationProcessor
from unigen_ds.data.samples.sample import COLUMNS, NUM_DIGESTED, Array, Counts, Sample, count, record_digest
from unigen_ds.data.sources.base import RecordSource, Row
from unigen_ds.system import dist
from unigen_ds.system.log import logger
from unigen_ds.system.workers import Workers

_FORMAT = "unigen-index-1"
"""Version of the digest that checkpoints keep."""
_CACHE_FORMAT = "unigen-index-14"
_CONTENT_FORMAT = "unigen-content-1"
_UNUSED_KEYS = "unused_keys"
"""An array of the index: what a record has of other layouts (``unusable.unused_keys``)."""
_UNUSED_TEXTS = "unused_texts"
"""An array of the index: texts of a record that it has as alternatives to the one that is used; where there are any."""
UNUSABLE = "unusable"
"""An array of the index: the records that cannot be trained on (``unusable.as_array``)."""
_ARRAYS = (*COLUMNS, "records", _UNUSED_TEXTS, _UNUSED_KEYS)
"""Arrays of one value a record that planning fills."""
_UNREADABLE = COLUMNS.index("unreadable")
_NO_RECORD = record_digest(b"", (0,) * len(COLUMNS))
_NOTHING = (*[0] * len(COLUMNS), _NO_RECORD, 0, 0)
_CHUNK = 1024
Chunk = tuple[int, int]
"""First record, and the one after the last."""


@dataclass(frozen=True)
class Index:
    """Counts and digest of every record of one source, which knows where they are."""

    source: RecordSource
    records: Array
    """``record_digest`` of each."""
    counts: Counts
    digest: str
    """Digest of data file, processor and counts."""
    folder: Path | None
    layout: Layout
    unused_codes: Array
    unused_texts: Array
    """Texts of each record that it has as alternatives to the one that is used."""
    lines: NDArray[np.uint8]
    """The first records that cannot be trained on (``unusable.as_array``)."""
    cache: Path | None
    """The file that it was read from; None: it was made by this start."""

    def __len__(self) -> int:
        return len(self.records)

    @cached_property
    def malformed_numbers(self) -> Array:
        """Numbers of the records that have no sample."""
        return np.flatnonzero((self.records == _NO_RECORD) & (self.counts.tokens == 0))

    def unusable(self) -> list[BadRecord]:
        """All records that cannot be trained on; those after many without their reason."""
        by_number = {one.number: one for one in from_array(self.lines)}
        numbers = np.union1d(self.malformed_numbers, np.flatnonzero(self.counts.unreadable)).tolist()
        others = (BadRecord(n, *self.source.file_of(n), None, "as those before it") for n in numbers)
        return [by_number.get(one.number, one) for one in others]

    def forget_mended(self, processor: ConversationProcessor) -> bool:
        """Remove the file of an earlier start that has a record as unusable which can be used now. Whether it did."""
        if self.cache is None:
            return False
        plan = Plan(self.source, processor, self.layout)
        if all(len(plan((one.number, one.number + 1))[-1]) for one in self.unusable()):
            return False
        logger().info("%s: records that could not be used can be used now; all are read again.", self.source.title)
        self.cache.unlink(missing_ok=True)
        return True

    def read(self, index: int) -> Row:
        """A record. Raises ``DataError`` where it is no longer the one of the index."""
        counts = self.counts
        (entry,) = self.source.read(index, index + 1)
        row = tuple(int(getattr(counts, name)[index]) for name in COLUMNS[:NUM_DIGESTED])
        if record_digest(entry.content, row) != self.records[index]:
            raise DataError(
                f"record {index} of data file {self.source.title} was changed during the run: it is not the one of the"
                " index",
                remedy="restore the file, then continue with --resume; --on-data-change continues with changed data",
            )
        return entry

    def content_digests(self) -> Array:
        """[N] 64 bits of the values of each record. Reads the source once (cached)."""
        key = fingerprint(_CONTENT_FORMAT, prefix_digest(self.records, len(self)))

        def fill(new: ArrayFile) -> None:
            new.add("digests", len(self))
            numbers = set(self.malformed_numbers.tolist())
            for start, entries in batches(self.source, (0, len(self))):
                values = [b"" if n in numbers else entry.values for n, entry in enumerate(entries, start)]
                digests = b"".join(hashlib.blake2b(one, digest_size=8).digest() for one in values)
                new.put("digests", start, np.frombuffer(digests, dtype="<i8").astype(np.int64))

        cache = None if self.folder is None else self.folder / f"{self.source.origin.name}-content-{key[:16]}{SUFFIX}"
        return load_or_fill(cache, key, fill)["digests"]

    @classmethod
    def build(
        cls,
        source: RecordSource,
        processor: ConversationProcessor,
        *,
        image_root: Path | None = None,
        cache_dir: Path | None = None,
        num_workers: int = 0,
        layout: Layout | None = None,
        on_record_error: OnRecordError = "error",
    ) -> Index:
        """Read it from the cache, or plan every record (with ``num_workers`` processes) and cache the result. Raises
        ``DataError`` where records are malformed and ``on_record_error`` is 'error'. An unreadable image is no error
        here. ``image_root``: None: the source's own.
        """
        root = source.root if image_root is None else image_root
        layout = Layout(root) if layout is None else replace(layout, image_root=root)
        folder = source.index_folder(cache_dir)
        content = source.content_digest(folder)
        beneath = os.path.relpath(root, source.root)
        extra = (layout.folders, source.fingerprint, *layout.facts)
        key = fingerprint(content, beneath, processor.fingerprint, _CACHE_FORMAT, *extra)
        cache = None if folder is None else folder / f"{source.origin.name}-{key[:16]}{SUFFIX}"
        is_new = False

        def fill(new: ArrayFile) -> None:
            nonlocal is_new
            is_new = True
            plan_all(Plan(source, processor, layout), num_workers, new, on_record_error)

        arrays = load_or_fill(cache, key, fill)
        source.use({name: array for name, array in arrays.items() if name not in (*_ARRAYS, UNUSABLE)})
        counts = Counts(*(arrays[name] for name in COLUMNS))
        for note in source.notes if dist.env_rank() == 0 else ():
            logger().warning("%s: %s", source.title, note)
        # not of the key: the same data in another folder is the same data
        facts = (*source.identity(content), processor.fingerprint, _FORMAT, counts.digest, *layout.facts)
        digest = fingerprint(*facts, *["image_folders"] * (source.several_folders and layout.folders))
        index = cls(
            source, arrays["records"], counts, digest, folder, layout, arrays[_UNUSED_KEYS], arrays[_UNUSED_TEXTS],
            arrays[UNUSABLE], None if is_new else cache,
        )  # fmt: skip
        if on_record_error == "error" and index.malformed_numbers.size:
            if cache is not None:  # the code that reads it may be what is mended
                cache.unlink(missing_ok=True)
            raise unusable_error(index.unusable(), source.title, len(index))
        return index


def prefix_digest(records: Array, number: int, *facts: object) -> str:
    """Digest the first ``number`` record digests and ``facts``: the same for a longer file that begins with them."""
    first = np.ascontiguousarray(records[:number], dtype="<i8")
    return fingerprint(number, hashlib.blake2b(first.data, digest_size=16).hexdigest(), *facts)


def plan_all(plan: Plan, num_workers: int, new: ArrayFile, on_record_error: OnRecordError) -> None:
    """Fill the arrays of ``scan()``, ``_ARRAYS``, ``UNUSABLE``. Raises ``DataError`` where all first are malformed."""
    source, arrays = plan.source, {}
    for name, values in plan.source.scan().items():
        new.store(name, values)
        arrays[name] = new.read(name)
    source.use(arrays)
    for name in _ARRAYS:
        new.add(name, len(source))
    chunks = [(i, min(i + _CHUNK, len(source))) for i in range(0, len(source), _CHUNK)]
    # a loading process can have no processes of its own
    alone = num_workers == 0 or len(chunks) == 1 or multiprocessing.current_process().daemon
    results = map(plan, chunks) if alone else Workers(plan, chunks, min(num_workers, len(chunks)), ahead=2)
    unusable = []
    try:
        for (start, stop), (*columns, lines) in zip(chunks, results, strict=True):
            unusable.append(lines)
            number = stop - start
            if not start and number < len(source) and on_record_error == "error" and (columns[-3] == _NO_RECORD).all():
                raise unusable_error(from_array(lines), f"{source.title}, the beginning", number, number=number)
            for name, values in zip(_ARRAYS, columns, strict=True):
                new.put(name, start, values)
    finally:
        if isinstance(results, Workers):
            results.close()
    new.store(UNUSABLE, np.concatenate(unusable))


@dataclass(frozen=True)
class Plan:
    source: RecordSource
    processor: ConversationProcessor
    layout: Layout

    def __call__(self, chunk: Chunk) -> tuple[NDArray[Any], ...]:
        """``_ARRAYS`` of the records of a chunk, and ``UNUSABLE``. Texts that are read together are tokenized so."""
        rows: list[tuple[int, ...]] = []
        unusable: list[BadRecord] = []
        unk_id = getattr(self.processor.tokenizer, "unk_id", None)

        def leave_out(number: int, record: Record, reason: str) -> None:
            own = record.get("id")
            own = own if own is None or isinstance(own, (str, int)) else short_value(own)
            unusable.append(BadRecord(number, *self.source.file_of(number), own, reason))

        for first, entries in batches(self.source, chunk):
            turns: dict[int, list[Turn]] = {}
            for number, entry in enumerate(entries, first):
                record: Record = {}
                try:
                    if isinstance(entry, DataError):
                        raise entry
                    record = entry.record
                    turns[number] = self.layout.at(entry).learned_turns(record, entry.where)
                except DataError as error:
                    leave_out(number, record, str(error))
            samples: dict[int, Sample] = {}
            try:
                together = self.processor.plan_many((of, entries[number - first].where) for number, of in turns.items())
                samples = dict(zip(turns, together, strict=True))
            except DataError:  # of one of them, which the model cannot take
                for number, of in turns.items():
                    entry = entries[number - first]
                    try:
                        samples[number] = self.processor.plan(of, entry.where)
                    except DataError as error:
                        leave_out(number, entry.record, str(error))
            for number, entry in enumerate(entries, first):
                if (sample := samples.get(number)) is None:
                    rows.append(_NOTHING)
                    continue
                empty = sum(turn.kind == "text" and not turn.value.strip() for turn in turns[number])
                row = count(sample, unk_id=unk_id, empty_texts=empty)
                if row[_UNREADABLE]:
                    problem = next(split.error for split in sample.splits if split.error)
                    leave_out(number, entry.record, f"{entry.where}: {problem}")
                record = self.layout.rename_keys(entry.record, entry.where) if self.layout.columns else entry.record
                code = unused_keys(record, self.layout, entry.unused)
                rows.append((*row, record_digest(entry.content, row), unused_texts(record), code))
        unusable.sort(key=lambda one: one.number)
        return *np.asarray(rows, dtype=np.int64).T, as_array(unusable[:32])  # more of a chunk are not a few mistakes


def batches(source: RecordSource, chunk: Chunk) -> Iterator[tuple[int, Sequence[Any]]]:
    """The first number and records, as many as the source reads together; an error in place of an unreadable one."""
    start, stop = chunk
    for first in range(start, stop, source.batch):
        last = min(first + source.batch, stop)
        try:
            yield first, source.read(first, last)
        except MalformedRecord:
            entries: list[Row | DataError] = []
            for number in range(first, last):
                try:
                    entries += source.read(number, number + 1)
                except MalformedRecord as error:
                    entries.append(error)
            yield first, entries
