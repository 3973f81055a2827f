"""A source -> every record parsed, tokenized, counted and digested once: in batches, by processes or threads."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from unigen_ds.core.cores import TOKENIZERS, num_cores
from unigen_ds.core.errors import DataError
from unigen_ds.core.variables import environment
from unigen_ds.data.array_cache import NewArrays
from unigen_ds.data.counts import COLUMNS, count, record_digest
from unigen_ds.data.processor import ConversationProcessor
from unigen_ds.data.records import Layout, unused_texts
from unigen_ds.data.rules import TOUCH_BITS
from unigen_ds.data.sources.base import FoundRecord, RecordSource, folder_of
from unigen_ds.data.stored_image import StoredImage
from unigen_ds.data.turn import Turn
from unigen_ds.data.unused import unused_keys
from unigen_ds.data.worker_process import start_worker

_CHUNK = 1024
_THREADS = 4
"""Threads that plan records at most: all but tokenizing is done by one thread at a time."""
_PROCESSES = 8
"""Forks of this process that plan records at most."""
_FORKED_FROM = 8192
"""Records from which on forks plan them: they plan twice as many a second on two cores, and need 0.05 s to start."""
_TOUCHED = COLUMNS.index("touched")
UNUSED_KEYS = "unused_keys"
"""An array of the index: what a record has of other layouts (``unused.unused_keys``)."""
UNUSED = "unused_texts"
"""An array of the index: texts of a record that it has as alternatives to the one that is used; where there are any."""
Chunk = tuple[int, int]
"""First record, and the one after the last."""
FILLED = (*COLUMNS, "records", UNUSED, UNUSED_KEYS)
"""Arrays of one value a record that planning fills."""


class ChunkPlan(Protocol):
    """What is done for each chunk of records: it is sent to a process once."""

    @property
    def source(self) -> RecordSource: ...
    @property
    def processor(self) -> ConversationProcessor: ...
    def chunk(self, chunk: Chunk) -> tuple[NDArray[Any], ...]:
        """What is found of the records of a chunk."""
        ...

    def again(self) -> ChunkPlan:
        """The same for another thread."""
        ...


def plan_all(
    source: RecordSource, processor: ConversationProcessor, layout: Layout, num_workers: int, new: NewArrays
) -> None:
    """Fill the arrays of ``source.scan()``, ``records`` (digests) and those of ``Counts``, one value a record.

    ``num_workers``: as of ``planned``. Raises ``DataError`` for the first malformed record.
    """
    found = {}
    for name, values in source.scan().items():
        new.add(name, values.size, str(values.dtype), values.shape)
        new.put(name, 0, values.reshape(-1))
        found[name] = new.read(name)
    source.use(found)
    for name in FILLED:
        new.add(name, len(source))
    for start, columns in planned(_Plan(source, processor, layout), num_workers):
        for name, values in zip(FILLED, columns, strict=True):
            new.put(name, start, values)


def planned(plan: ChunkPlan, num_workers: int) -> Iterator[tuple[int, tuple[NDArray[Any], ...]]]:
    """The first record of each chunk, and what ``plan`` finds of the chunk; in order.

    ``num_workers``: new processes; 0: forks of this one where that is safe and there are many records, else threads.
    Raises ``DataError`` for the first malformed record.
    """
    chunks = [(i, min(i + _CHUNK, len(plan.source))) for i in range(0, len(plan.source), _CHUNK)]
    starts = [start for start, _ in chunks]
    forks = min(num_cores(), _PROCESSES, len(chunks)) if len(plan.source) >= _FORKED_FROM and _may_fork() else 0
    if num_workers > 0 and len(chunks) > 1:
        yield from zip(starts, _plan_in_processes(plan, chunks, num_workers, "spawn"), strict=True)
    elif forks > 1:
        with environment({TOKENIZERS: "false"}):  # as start_worker
            yield from zip(starts, _plan_in_processes(plan, chunks, forks, "fork"), strict=True)
    else:
        with _no_collections():
            yield from zip(starts, _plan_in_threads(plan, chunks), strict=True)


_adopted: ChunkPlan | None = None
"""In a process that plans: what it was started with."""


def _may_fork() -> bool:
    """Whether a fork of this process can plan: another thread may hold a lock that the fork would wait for.

    One that tqdm starts with the first progress bar of a process, and again with a later one, is ended.
    """
    for thread in threading.enumerate():
        if type(thread).__module__ == "tqdm._monitor":
            thread.exit()  # type: ignore[attr-defined]
    alone = threading.active_count() == 1 and threading.current_thread() is threading.main_thread()
    return alone and sys.platform == "linux" and not multiprocessing.current_process().daemon


def _plan_in_processes(
    plan: ChunkPlan, chunks: Sequence[Chunk], number: int, how: str
) -> Iterator[tuple[NDArray[Any], ...]]:
    """``plan.chunk`` of each, in order. ``how``: ``fork`` or ``spawn``, as of ``multiprocessing``."""
    context = multiprocessing.get_context(how)
    try:
        with ProcessPoolExecutor(number, mp_context=context, initializer=_adopt, initargs=(plan,)) as pool:
            yield from pool.map(_plan_adopted, chunks)
    except BrokenProcessPool as error:
        raise DataError(
            f"{plan.source.title}: a process that plans its records ended before it was done",
            remedy="the system kills processes when memory is full (see dmesg): fewer CPU cores (taskset) need less;"
            " then start again",
        ) from error


def _adopt(plan: ChunkPlan) -> None:
    global _adopted
    _adopted = plan
    start_worker()
    gc.disable()  # as _no_collections


def _plan_adopted(chunk: Chunk) -> tuple[NDArray[Any], ...]:
    assert _adopted is not None
    return _adopted.chunk(chunk)


def _plan_in_threads(plan: ChunkPlan, chunks: Sequence[Chunk]) -> Iterator[tuple[NDArray[Any], ...]]:
    """``plan.chunk`` of each, in order: while one thread tokenizes, which needs no lock, another parses and counts.

    Each thread has a processor of its own, since a tokenizer is set before each call. Within a batch a tokenizer uses
    one core then: its own threads cost a third more for texts of a few words.
    """
    number = min(len(chunks), _THREADS, num_cores())
    if number < 2 or not hasattr(plan.processor.tokenizer, "encode_texts"):
        yield from map(plan.chunk, chunks)
        return
    idle: SimpleQueue[ChunkPlan] = SimpleQueue()
    idle.put(plan)
    for _ in range(number - 1):
        idle.put(plan.again())

    def found(chunk: Chunk) -> tuple[NDArray[Any], ...]:
        own = idle.get()
        try:
            return own.chunk(chunk)
        finally:
            idle.put(own)

    with environment({TOKENIZERS: os.environ.get(TOKENIZERS, "false")}), ThreadPoolExecutor(number) as pool:
        yield from pool.map(found, chunks)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Planning leaves no cycles; looking for them among all objects of the process needs a third of its time."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


@dataclass(frozen=True)
class _Plan:
    """Plans records."""

    source: RecordSource
    processor: ConversationProcessor
    layout: Layout

    def again(self) -> _Plan:
        return replace(self, processor=copy.deepcopy(self.processor))

    def chunk(self, chunk: Chunk) -> tuple[NDArray[Any], ...]:
        """``FILLED`` of the records of a chunk."""
        rows: list[tuple[int, ...]] = []
        for entries in batches(self.source, chunk):
            rows += self._batch(entries)
        numbers = np.fromiter(chain.from_iterable(rows), np.int64)  # a fifth of the time of asarray(rows)
        return tuple(numbers.reshape(len(rows), -1).T)

    def _batch(self, entries: Sequence[FoundRecord]) -> Iterator[tuple[int, ...]]:
        """``FILLED`` of each of some records; their texts are tokenized in one call."""
        processor = self.processor
        unk_id, marks = getattr(processor.tokenizer, "unk_id", None), processor.rules.marks
        records = [entry.record for entry in entries]
        layouts = [self.layout.at(folder_of(entry)) for entry in entries]
        turns_of = list(map(learnt, records, (entry.where for entry in entries), layouts))
        samples = processor.plan_many(zip(turns_of, (entry.where for entry in entries), strict=True))
        for entry, record, turns, sample in zip(entries, records, turns_of, samples, strict=True):
            empty = 0
            for turn in turns:
                if turn.kind == "text" and not turn.value.strip():
                    empty += 1
            row = count(sample, unk_id=unk_id, empty_texts=empty)
            if self._moved(entry, record):
                row = (*row[:_TOUCHED], row[_TOUCHED] | TOUCH_BITS["image_folders"], *row[_TOUCHED + 1 :])
            digest = record_digest(entry.content, row, marks(row[_TOUCHED]))
            if self.layout.columns:
                record = self.layout.named(record, entry.where)
            texts = unused_texts(record) if "captions" in record or "instruction_list" in record else 0
            yield *row, digest, texts, unused_keys(record, self.layout, getattr(entry, "unused", ()))

    def _moved(self, entry: FoundRecord, record: Mapping[str, Any]) -> bool:
        """Whether the rule ``image_folders`` decides where an image of the record is: its path is relative, and its
        file is in another folder than the first one.
        """
        if folder_of(entry) is None or self.layout.folders is None:
            return False
        turns = replace(self.layout, image_root=None).turns(record, entry.where)
        return any(is_relative(turn) for turn in turns)


def is_relative(turn: Turn) -> bool:
    """Whether it is an image with a relative path; of turns that were parsed without a folder."""
    return turn.kind == "image" and not isinstance(turn.value, StoredImage) and not os.path.isabs(turn.value)


def batches(source: RecordSource, chunk: Chunk) -> Iterator[Sequence[FoundRecord]]:
    """The records of a chunk, as many at a time as the source reads together."""
    start, stop = chunk
    for first in range(start, stop, source.batch):
        yield source.read(first, min(first + source.batch, stop))


def learnt(record: Mapping[str, Any], where: object, layout: Layout) -> list[Turn]:
    """The turns of one record. Raises ``DataError`` with file and line where it is malformed."""
    turns = layout.turns(record, where)
    for turn in turns:
        if turn.is_target:
            return turns
    if any(turn.role == "assistant" for turn in turns):
        raise DataError(f"{where}: every assistant message has the weight 0: nothing to learn from")
    raise DataError(f"{where}: conversations has no assistant turn: nothing to learn from")
