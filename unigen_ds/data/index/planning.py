"""A source -> every record parsed, tokenized, counted and digested once: in batches, in this process or by workers."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from unigen_ds.core.errors import DataError
from unigen_ds.data.cache.array_cache import NewArrays
from unigen_ds.data.images.stored_image import StoredImage
from unigen_ds.data.records.data_file import MalformedRecord
from unigen_ds.data.records.records import Layout, unused_texts
from unigen_ds.data.records.turn import Turn
from unigen_ds.data.records.unusable import BadRecord, OnRecordError, as_array, from_array, unusable_error
from unigen_ds.data.records.unused import unused_keys
from unigen_ds.data.rules import TOUCH_BITS, marks
from unigen_ds.data.samples.counts import COLUMNS, count, record_digest
from unigen_ds.data.samples.processor import ConversationProcessor
from unigen_ds.data.samples.sample import Sample
from unigen_ds.data.sources.base import FoundRecord, RecordSource, folder_of
from unigen_ds.system.workers import Workers

_CHUNK = 1024
_TOUCHED = COLUMNS.index("touched")
UNUSED_KEYS = "unused_keys"
"""An array of the index: what a record has of other layouts (``unused.unused_keys``)."""
UNUSED = "unused_texts"
"""An array of the index: texts of a record that it has as alternatives to the one that is used; where there are any."""
Chunk = tuple[int, int]
"""First record, and the one after the last."""
UNUSABLE = "unusable"
"""An array of the index: the records that cannot be trained on (``unusable.as_array``)."""
FILLED = (*COLUMNS, "records", UNUSED, UNUSED_KEYS)
"""Arrays of one value a record that planning fills."""
_UNREADABLE = COLUMNS.index("unreadable")
_MALFORMED = record_digest(b"", (0,) * len(COLUMNS))
_NOTHING = (*[0] * len(COLUMNS), _MALFORMED, 0, 0)
"""``FILLED`` of a malformed record."""
_MOST_LINES = 32
"""Of ``UNUSABLE`` for a chunk: where more cannot be used, it is not a few that are wrong."""


def is_malformed(records: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[N] of the arrays ``records`` and ``tokens`` of an index."""
    return (records == _MALFORMED) & (tokens == 0)


class ChunkPlan(Protocol):
    """What is done for each chunk of records: it is sent to a process once."""

    @property
    def source(self) -> RecordSource: ...
    def chunk(self, chunk: Chunk) -> tuple[NDArray[Any], ...]:
        """What is found of the records of a chunk."""
        ...


def plan_all(
    source: RecordSource,
    processor: ConversationProcessor,
    layout: Layout,
    num_workers: int,
    new: NewArrays,
    on_record_error: OnRecordError = "error",
) -> None:
    """Fill the arrays of ``source.scan()``, ``records`` (digests) and those of ``Counts``, one value a record, and
    ``UNUSABLE``. ``num_workers``: as of ``planned``.

    Raises ``DataError`` where malformed records are an error and the first are all malformed: the rest is not planned.
    """
    found = {}
    for name, values in source.scan().items():
        new.add(name, values.size, str(values.dtype), values.shape)
        new.put(name, 0, values.reshape(-1))
        found[name] = new.read(name)
    source.use(found)
    for name in FILLED:
        new.add(name, len(source))
    unusable = []
    for start, (*columns, lines) in planned(Plan(source, processor, layout), num_workers):
        unusable.append(lines)
        number = len(columns[0])
        if not start and number < len(source) and on_record_error == "error" and (columns[-3] == _MALFORMED).all():
            raise unusable_error(from_array(lines), f"{source.title}, the beginning", number, number=number)
        for name, values in zip(FILLED, columns, strict=True):
            new.put(name, start, values)
    lines = np.concatenate(unusable)
    new.add(UNUSABLE, lines.size, "uint8")
    new.put(UNUSABLE, 0, lines)


def planned(plan: ChunkPlan, num_workers: int) -> Iterator[tuple[int, tuple[NDArray[Any], ...]]]:
    """The first record of each chunk, and what ``plan`` finds of the chunk; in order.

    ``num_workers``: processes that do it; 0: this one. A loading process, which can have none, does it itself.
    """
    chunks = [(i, min(i + _CHUNK, len(plan.source))) for i in range(0, len(plan.source), _CHUNK)]
    if num_workers == 0 or len(chunks) == 1 or multiprocessing.current_process().daemon:
        for chunk in chunks:
            yield chunk[0], plan.chunk(chunk)
        return
    setting = f"index_workers of {plan.source.title}"
    workers = Workers(plan.chunk, chunks, min(num_workers, len(chunks)), ahead=2, setting=setting)
    try:
        for (start, _), columns in zip(chunks, workers, strict=True):
            yield start, columns
    finally:
        workers.close()


@dataclass(frozen=True)
class Plan:
    """Plans records."""

    source: RecordSource
    processor: ConversationProcessor
    layout: Layout

    def chunk(self, chunk: Chunk) -> tuple[NDArray[Any], ...]:
        """``FILLED`` of the records of a chunk, and ``UNUSABLE``."""
        rows: list[tuple[int, ...]] = []
        unusable: list[BadRecord] = []
        for first, entries in batches(self.source, chunk):
            rows += self._batch(first, entries, unusable)
        unusable.sort(key=lambda one: one.number)
        return *np.asarray(rows, dtype=np.int64).T, as_array(unusable[:_MOST_LINES])

    def _batch(
        self, first: int, entries: Sequence[FoundRecord | DataError], unusable: list[BadRecord]
    ) -> Iterator[tuple[int, ...]]:
        """``FILLED`` of each of some records, of which ``first`` is the first; ``unusable`` gets what cannot be used.
        Their texts are tokenized in one call.
        """
        processor = self.processor
        unk_id = getattr(processor.tokenizer, "unk_id", None)
        parsed = [self._parsed(number, entry, unusable) for number, entry in enumerate(entries, first)]
        good = [(number, one) for number, one in enumerate(parsed, first) if one is not None]
        samples: dict[int, Sample | None] = {}
        try:
            together = processor.plan_many((turns, entry.where) for _, (entry, _, turns, _) in good)
            samples = {number: sample for (number, _), sample in zip(good, together, strict=True)}
        except DataError:  # of one of them
            samples = {number: self._planned(number, one, unusable) for number, one in good}
        for number, found in enumerate(parsed, first):
            if found is None or (sample := samples[number]) is None:
                yield _NOTHING
                continue
            entry, record, turns, content = found
            empty = 0
            for turn in turns:
                if turn.kind == "text" and not turn.value.strip():
                    empty += 1
            row = count(sample, unk_id=unk_id, empty_texts=empty)
            if self._moved(entry, record):
                row = (*row[:_TOUCHED], row[_TOUCHED] | TOUCH_BITS["image_folders"], *row[_TOUCHED + 1 :])
            if row[_UNREADABLE]:
                error = next(split.error for split in sample.splits if split.error)
                unusable.append(self._unusable(number, record, f"{entry.where}: {error}", image=True))
            digest = record_digest(content, row, marks(row[_TOUCHED]))
            if self.layout.columns:
                record = self.layout.named(record, entry.where)
            texts = unused_texts(record) if "captions" in record or "instruction_list" in record else 0
            yield *row, digest, texts, unused_keys(record, self.layout, getattr(entry, "unused", ()))

    def _parsed(self, number: int, entry: FoundRecord | DataError, unusable: list[BadRecord]) -> _Parsed | None:
        """None: it is malformed."""
        record: Mapping[str, Any] = {}
        try:
            if isinstance(entry, DataError):
                raise entry
            record = entry.record
            return entry, record, learnt(record, entry.where, self.layout.at(folder_of(entry))), entry.content
        except DataError as error:
            unusable.append(self._unusable(number, record, str(error)))
            return None

    def _unusable(self, number: int, record: Mapping[str, Any], reason: str, *, image: bool = False) -> BadRecord:
        return BadRecord.of(number, *self.source.file_of(number), record, reason, image=image)

    def _planned(self, number: int, parsed: _Parsed, unusable: list[BadRecord]) -> Sample | None:
        """None: the model cannot take it."""
        entry, record, turns, _ = parsed
        try:
            return self.processor.plan(turns, entry.where)
        except DataError as error:
            unusable.append(self._unusable(number, record, str(error)))
            return None

    def _moved(self, entry: FoundRecord, record: Mapping[str, Any]) -> bool:
        """Whether the rule ``image_folders`` decides where an image of the record is: its path is relative, and its
        file is in another folder than the first one.
        """
        if folder_of(entry) is None or not self.layout.folders:
            return False
        turns = replace(self.layout, image_root=None).turns(record, entry.where)
        return any(is_relative(turn) for turn in turns)


def is_relative(turn: Turn) -> bool:
    """Whether it is an image with a relative path; of turns that were parsed without a folder."""
    return turn.kind == "image" and not isinstance(turn.value, StoredImage) and not os.path.isabs(turn.value)


_Parsed = tuple[FoundRecord, Mapping[str, Any], list[Turn], bytes]
"""A record, its values, its turns, and what its digest is of."""


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
            yield first, [_alone(source, number) for number in range(first, last)]


def _alone(source: RecordSource, number: int) -> FoundRecord | DataError:
    try:
        return source.read(number, number + 1)[0]
    except MalformedRecord as error:
        return error


def learnt(record: Mapping[str, Any], where: object, layout: Layout) -> list[Turn]:
    """The turns of one record. Raises ``DataError`` with file and line where it is malformed."""
    turns = layout.turns(record, where)
    for turn in turns:
        if turn.is_target:
            return turns
    if any(turn.role == "assistant" for turn in turns):
        raise DataError(f"{where}: every assistant message has the weight 0: nothing to learn from")
    raise DataError(f"{where}: conversations has no assistant turn: nothing to learn from")
