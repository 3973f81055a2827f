"""Every record of a source planned once -> arrays of positions, lengths and counts, cached beside the data file.

What packing, truncation and statistics need of a record without reading it again. The cache is a file in
``.unigen_index/`` beside the data file (or in ``cache_dir`` where that folder cannot be written), named after a
fingerprint of data file, processor and format, and mapped into the memory of every process (``array_cache.py``).
Trade-off: the first start parses, tokenizes, counts and digests every record, in batches, in this process or by workers
(two cores do about 40,000 texts of 20 words a second; an image costs one header read), and writes at most 144 bytes a
record; a later start maps them.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from unigen_ds.core.errors import DataError
from unigen_ds.data.cache.array_cache import (
    SUFFIX,
    ArrayFile,
    Arrays,
    fingerprint,
    load_arrays,
    load_or_fill,
    load_or_write,
)
from unigen_ds.data.images.image_files import StoredImage
from unigen_ds.data.records.records import Layout, Record, Turn, unused_texts
from unigen_ds.data.records.unusable import (
    BadRecord,
    MalformedRecord,
    OnRecordError,
    as_array,
    from_array,
    unusable_error,
)
from unigen_ds.data.records.unused import unused_keys
from unigen_ds.data.samples.processor import ConversationProcessor
from unigen_ds.data.samples.sample import (
    COLUMNS,
    NUM_DIGESTED,
    RULE_VERSIONS,
    RULES,
    TOUCH_BITS,
    Array,
    Counts,
    Sample,
    count,
    record_digest,
    touching,
)
from unigen_ds.data.sources.base import FoundRecord, RecordSource, folder_of
from unigen_ds.system import dist
from unigen_ds.system.log import logger
from unigen_ds.system.workers import Workers

_FORMAT = "unigen-index-1"
"""Of the digest that checkpoints keep."""
_CACHE_FORMAT = "unigen-index-10"
_CONTENT_FORMAT = "unigen-content-1"
_UNUSED_KEYS = "unused_keys"
"""An array of the index: what a record has of other layouts (``unused.unused_keys``)."""
_UNUSED = "unused_texts"
"""An array of the index: texts of a record that it has as alternatives to the one that is used; where there are any."""
UNUSABLE = "unusable"
"""An array of the index: the records that cannot be trained on (``unusable.as_array``)."""
_PLANNED = (*COLUMNS, "records", _UNUSED, _UNUSED_KEYS)
"""Arrays of one value a record that planning fills."""
_DIGESTS = "digests"
"""An array of the index: the digest of its counts, then that of its records, 16 bytes each. For 10^8 records they
need seconds."""
_TOUCHED, _UNREADABLE = COLUMNS.index("touched"), COLUMNS.index("unreadable")
_MALFORMED = record_digest(b"", (0,) * len(COLUMNS))
_NOTHING = (*[0] * len(COLUMNS), _MALFORMED, 0, 0)
"""``_PLANNED`` of a malformed record."""
_CHUNK = 1024
_MOST_LINES = 32
"""Of ``UNUSABLE`` for a chunk: where more cannot be used, it is not a few that are wrong."""
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
    """Of data file, processor and counts."""
    folder: Path | None
    """Where it is cached."""
    layout: Layout
    records_digest: str
    """Of ``records``."""
    content: str
    """Digest of the data files."""
    unused: Array
    """``unused_keys`` of each record."""
    unused_texts: Array
    """Texts of each record that it has as alternatives to the one that is used."""
    lines: NDArray[np.uint8]
    """The first records that cannot be trained on (``unusable.as_array``)."""
    cache: Path | None
    """The file that it was read from; None: it was made by this start."""

    def __len__(self) -> int:
        return len(self.records)

    @cached_property
    def malformed(self) -> Array:
        """Numbers of the records that have no sample."""
        return np.flatnonzero((self.records == _MALFORMED) & (self.counts.tokens == 0))

    def unusable(self) -> list[BadRecord]:
        """All records that cannot be trained on; those after many without their reason."""
        known = {one.number: one for one in from_array(self.lines)}
        numbers = np.union1d(self.malformed, np.flatnonzero(self.counts.unreadable)).tolist()
        return [
            known.get(n) or BadRecord(n, *self.source.file_of(n), None, "as those before it", True) for n in numbers
        ]

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

    def prefix_digest(self, number: int, *facts: object) -> str:
        """``prefix_digest`` of its records."""
        return prefix_digest(self.records, number, *facts, known=self.records_digest)

    def read(self, index: int) -> FoundRecord:
        """A record. Raises ``DataError`` where it is no longer the one of the index."""
        counts = self.counts
        (entry,) = self.source.read(index, index + 1)
        row = tuple(int(getattr(counts, name)[index]) for name in COLUMNS[:NUM_DIGESTED])
        if record_digest(entry.content, row, int(counts.touched[index])) != self.records[index]:
            raise DataError(
                f"record {index} of data file {self.source.title} was changed during the run: it is not the one of the"
                " index",
                remedy="restore the file, then continue with --resume; --on-data-change continues with changed data",
            )
        return entry

    def content_digests(self) -> Array:
        """[N] 64 bits of the values of each record. Reads the source once (cached)."""
        key = fingerprint(_CONTENT_FORMAT, self.prefix_digest(len(self)))

        def fill(new: ArrayFile) -> None:
            new.add("digests", len(self))
            malformed = set(self.malformed.tolist())
            for start, entries in batches(self.source, (0, len(self))):
                values = [b"" if n in malformed else entry.values for n, entry in enumerate(entries, start)]
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
        report: bool = True,
        on_record_error: OnRecordError = "error",
    ) -> Index:
        """From the cache, or by planning every record (with ``num_workers`` processes) and caching the result.

        Several processes may start together: one plans, the others wait for its file where the file system has locks.
        Raises ``DataError`` where records are malformed and ``on_record_error`` is 'error'. An unreadable image is no
        error here. ``image_root``: None: the source's own; ``report``: what the source itself leaves out, in the log.
        """
        root = source.root if image_root is None else image_root
        layout = Layout(root) if layout is None else replace(layout, image_root=root)
        folder = source.index_folder(cache_dir)
        content = source.content_digest(folder)
        beneath = os.path.relpath(root, source.root)
        extra = (*source.cache_facts, *layout.facts)
        if source.several_folders and layout.folders:
            extra = (*extra, ("image_folders", RULE_VERSIONS["image_folders"]))
        key = fingerprint(content, beneath, processor.fingerprint, RULES, _CACHE_FORMAT, *extra)
        cache = None if folder is None else folder / f"{source.origin.name}-{key[:16]}{SUFFIX}"
        made = False

        def fill(new: ArrayFile) -> None:
            nonlocal made
            made = True
            plan_all(Plan(source, processor, layout), num_workers, new, on_record_error)

        arrays = load_or_fill(cache, key, fill)
        source.use({name: array for name, array in arrays.items() if name not in (*_PLANNED, _DIGESTS, UNUSABLE)})
        counts = Counts(*(arrays[name] for name in COLUMNS))
        of_counts, of_records = (part.tobytes().hex() for part in arrays[_DIGESTS].reshape(2, 16))
        for note in source.notes() if report and dist.env_rank() == 0 else ():
            logger().warning("%s: %s", source.title, note)
        # not of the key: the same data in another folder is the same data, and so is what no rule changes
        rules = touching(counts.all_touched)
        facts = (*source.identity(content), processor.fingerprint, _FORMAT, of_counts, *rules, *layout.facts)
        digest = fingerprint(*facts)
        index = cls(
            source, arrays["records"], counts, digest, folder, layout, of_records, content, arrays[_UNUSED_KEYS],
            arrays[_UNUSED], arrays[UNUSABLE], None if made else cache,
        )  # fmt: skip
        if on_record_error == "error" and index.malformed.size:
            if cache is not None:  # the code that reads it may be what is mended
                cache.unlink(missing_ok=True)
            raise unusable_error(index.unusable(), source.title, len(index))
        return index


def prefix_digest(records: Array, number: int, *facts: object, known: str | None = None) -> str:
    """Of the first ``number`` record digests and of ``facts``: the same for a longer file that begins with them.

    ``known``: the digest of all of them, where it is known.
    """
    if known is None or number != len(records):
        first = np.ascontiguousarray(records[:number], dtype="<i8")
        known = hashlib.blake2b(first.data, digest_size=16).hexdigest()
    return fingerprint(number, known, *facts)


def plan_all(plan: Plan, num_workers: int, new: ArrayFile, on_record_error: OnRecordError) -> None:
    """Fill the arrays of ``source.scan()``, ``_PLANNED``, ``UNUSABLE`` and ``_DIGESTS``.

    Raises ``DataError`` where malformed records are an error and the first are all malformed: the rest is not planned.
    """
    source, scanned = plan.source, {}
    for name, values in plan.source.scan().items():
        new.add(name, values.size, str(values.dtype), values.shape)
        new.put(name, 0, values.reshape(-1))
        scanned[name] = new.read(name)
    source.use(scanned)
    for name in _PLANNED:
        new.add(name, len(source))
    unusable = []
    for start, (*columns, lines) in plan_chunks(source, plan, num_workers):
        unusable.append(lines)
        number = len(columns[0])
        if not start and number < len(source) and on_record_error == "error" and (columns[-3] == _MALFORMED).all():
            raise unusable_error(from_array(lines), f"{source.title}, the beginning", number, number=number)
        for name, values in zip(_PLANNED, columns, strict=True):
            new.put(name, start, values)
    lines = np.concatenate(unusable)
    new.add(UNUSABLE, lines.size, "uint8")
    new.put(UNUSABLE, 0, lines)
    counts = Counts(*(new.read(name) for name in COLUMNS))
    records = np.ascontiguousarray(new.read("records"), dtype="<i8").data
    records_digest = hashlib.blake2b(records, digest_size=16).digest()
    new.add(_DIGESTS, 32, "uint8")
    new.put(_DIGESTS, 0, np.frombuffer(bytes.fromhex(counts.digest) + records_digest, np.uint8))


def plan_chunks(
    source: RecordSource, plan: Callable[[Chunk], tuple[NDArray[Any], ...]], num_workers: int
) -> Iterator[tuple[int, tuple[NDArray[Any], ...]]]:
    """The first record of each chunk of records, and what ``plan`` returns of the chunk; in order.

    ``plan`` is sent to a process once. ``num_workers``: processes that do it; 0: this one. A loading process, which can
    have none, does it itself.
    """
    chunks = [(i, min(i + _CHUNK, len(source))) for i in range(0, len(source), _CHUNK)]
    if num_workers == 0 or len(chunks) == 1 or multiprocessing.current_process().daemon:
        yield from ((chunk[0], plan(chunk)) for chunk in chunks)
        return
    workers = Workers(plan, chunks, min(num_workers, len(chunks)), ahead=2)
    try:
        for (start, _), columns in zip(chunks, workers, strict=True):
            yield start, columns
    finally:
        workers.close()


@dataclass(frozen=True)
class Plan:
    """Plans the records of a chunk."""

    source: RecordSource
    processor: ConversationProcessor
    layout: Layout

    def __call__(self, chunk: Chunk) -> tuple[NDArray[Any], ...]:
        """``_PLANNED`` of the records of a chunk, and ``UNUSABLE``. Texts that are read together are tokenized so."""
        rows: list[tuple[int, ...]] = []
        unusable: list[BadRecord] = []

        def leave_out(number: int, record: Record, reason: str, *, image: bool = False) -> None:
            unusable.append(BadRecord.of(number, *self.source.file_of(number), record, reason, image=image))

        for first, entries in batches(self.source, chunk):
            parsed: dict[int, tuple[FoundRecord, Record, list[Turn], bytes]] = {}
            for number, entry in enumerate(entries, first):
                record: Record = {}
                try:
                    if isinstance(entry, DataError):
                        raise entry
                    record = entry.record
                    turns = self.layout.at(folder_of(entry)).learned_turns(record, entry.where)
                    parsed[number] = (entry, record, turns, entry.content)
                except DataError as error:
                    leave_out(number, record, str(error))
            samples: dict[int, Sample] = {}
            try:
                together = self.processor.plan_many((turns, entry.where) for entry, _, turns, _ in parsed.values())
                samples = dict(zip(parsed, together, strict=True))
            except DataError:  # of one of them, which the model cannot take
                for number, (entry, record, turns, _) in parsed.items():
                    try:
                        samples[number] = self.processor.plan(turns, entry.where)
                    except DataError as error:
                        leave_out(number, record, str(error))
            for number in range(first, first + len(entries)):
                if (sample := samples.get(number)) is None:
                    rows.append(_NOTHING)
                    continue
                entry, record, turns, content = parsed[number]
                empty = sum(turn.kind == "text" and not turn.value.strip() for turn in turns)
                moved = TOUCH_BITS["image_folders"] * self._is_moved(entry, record)
                unk_id = getattr(self.processor.tokenizer, "unk_id", None)
                row = count(sample, unk_id=unk_id, empty_texts=empty, touched=moved)
                if row[_UNREADABLE]:
                    problem = next(split.error for split in sample.splits if split.error)
                    leave_out(number, record, f"{entry.where}: {problem}", image=True)
                record = self.layout.named(record, entry.where) if self.layout.columns else record
                unused = unused_keys(record, self.layout, getattr(entry, "unused", ()))
                rows.append((*row, record_digest(content, row, row[_TOUCHED]), unused_texts(record), unused))
        unusable.sort(key=lambda one: one.number)
        return *np.asarray(rows, dtype=np.int64).T, as_array(unusable[:_MOST_LINES])

    def _is_moved(self, entry: FoundRecord, record: Record) -> bool:
        """Whether the rule ``image_folders`` decides where an image of the record is: its path is relative, and its
        file is in another folder than the first one.
        """
        if folder_of(entry) is None or not self.layout.folders:
            return False
        turns = replace(self.layout, image_root=None).turns(record, entry.where)
        images = [turn.value for turn in turns if turn.kind == "image"]
        return any(not isinstance(image, StoredImage) and not os.path.isabs(image) for image in images)


def batches(source: RecordSource, chunk: Chunk) -> Iterator[tuple[int, Sequence[Any]]]:
    """The number of a record and the records from there on, as many at a time as the source reads together; in place
    of one that cannot be read its error.
    """
    start, stop = chunk
    for first in range(start, stop, source.batch):
        last = min(first + source.batch, stop)
        try:
            yield first, source.read(first, last)
        except MalformedRecord:
            yield first, [_read_alone(source, number) for number in range(first, last)]


def _read_alone(source: RecordSource, number: int) -> FoundRecord | DataError:
    try:
        return source.read(number, number + 1)[0]
    except MalformedRecord as error:
        return error


class TokenCache:
    """Ids of the texts of every record of a source, kept beside its index: a text is tokenized once, not in each epoch.

    A record's row is its checksum (a wrong id would be learned without notice), then of each text its length and ids.
    It is copied to loading processes by its path, and mapped there.
    """

    def __init__(self, path: Path, key: str, arrays: Arrays) -> None:
        self._path, self._key, self._starts, self._numbers = path, key, arrays["starts"], arrays["numbers"]

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenCache.open, (self._path, self._key)

    def of(self, index: int) -> list[list[int]]:
        """Ids of each text of a record. Raises ``DataError`` where the file was damaged."""
        row = self._numbers[self._starts[index] : self._starts[index + 1]]
        if not len(row) or int(row[0]) != _checksum(row[1:]):
            raise DataError(
                f"the cache of tokens {self._path} is damaged: record {index} is not what was written",
                remedy="delete the file: it is made again",
            )
        numbers, texts, at = row[1:].tolist(), [], 0
        while at < len(numbers):
            texts.append(numbers[at + 1 : at + 1 + numbers[at]])
            at += 1 + numbers[at]
        return texts

    @classmethod
    def open(cls, path: Path, key: str) -> TokenCache:
        """In another process. Raises ``DataError`` where the file is gone."""
        arrays = load_arrays(path, key)
        if arrays is None:
            raise DataError(f"the cache of tokens {path} is gone or damaged", remedy="start again: it is made again")
        return cls(path, key, arrays)

    @classmethod
    def build(cls, index: Index, processor: ConversationProcessor, *, num_workers: int = 0) -> TokenCache | None:
        """From its file, or by tokenizing every text once. None, with a warning, where there is no space for a file.

        Raises ``ConfigError`` for a processor that does not tokenize texts one by one.
        """
        next(processor.text_ids([]), None)  # refused before anything is read
        if index.folder is None:
            logger().warning("the tokens of %s cannot be cached: there is no folder for it", index.source.title)
            return None
        key = fingerprint(
            "unigen-tokens-1", index.content, type(processor).__qualname__, processor.tokenizer.fingerprint,
            RULES.special_tokens, index.layout.facts, *index.source.cache_facts,
        )  # fmt: skip
        path = index.folder / f"{index.source.origin.name}-tokens-{key[:16]}{SUFFIX}"

        def fill(new: ArrayFile) -> None:
            new.add("starts", len(index) + 1)
            new.add("numbers", None, "int32")
            end, malformed = 0, frozenset(index.malformed.tolist())
            plan = partial(_token_rows, index.source, processor, index.layout, malformed)
            for first, (lengths, numbers) in plan_chunks(index.source, plan, num_workers):
                new.put("starts", first + 1, end + np.cumsum(lengths))
                new.put("numbers", end, numbers)
                end += len(numbers)

        arrays = load_or_write(path, key, fill)
        return None if arrays is None else cls(path, key, arrays)


def _token_rows(
    source: RecordSource, processor: ConversationProcessor, layout: Layout, malformed: frozenset[int], chunk: Chunk
) -> tuple[NDArray[Any], ...]:
    """How many numbers each record of a chunk has, and the numbers; a malformed record has no texts."""
    rows: list[NDArray[np.int32]] = []
    for first, entries in batches(source, chunk):
        turns = [
            [] if n in malformed else layout.learned_turns(entry.record, entry.where)
            for n, entry in enumerate(entries, first)
        ]
        for texts in processor.text_ids(turns):
            row = np.asarray([0, *(number for ids in texts for number in (len(ids), *ids))], dtype=np.int32)
            row[0] = _checksum(row[1:])
            rows.append(row)
    return np.asarray([*map(len, rows)], dtype=np.int64), np.concatenate(rows)


def _checksum(numbers: NDArray[Any]) -> int:
    """31 bits of XXH32, so that it is a number of the array."""
    return xxhash.xxh32_intdigest(np.ascontiguousarray(numbers, dtype="<i4").data) >> 1
