"""A source -> every record parsed, tokenized, counted and digested once: in batches, by threads or processes."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

import numpy as np

from unigen_ds.core.cores import num_cores
from unigen_ds.core.errors import DataError
from unigen_ds.data.counts import COLUMNS, Array, count, record_digest
from unigen_ds.data.processor import ConversationProcessor
from unigen_ds.data.records import Layout, Turn, unused_texts
from unigen_ds.data.sources.base import FoundRecord, RecordSource

_CHUNK = 2048
_THREADS = 4
"""Threads that plan records at most: the work beside tokenizing, about a fifth, is done by one thread at a time."""
_TOUCHED = COLUMNS.index("touched")
UNUSED = "unused_texts"
"""An array of the index: texts of a record that it has as alternatives to the one that is used; where there are any."""
_Chunk = tuple[int, int]
"""First record, and the one after the last."""
_Planned = tuple[Array, Array, Array]
"""Counts [N, columns], digests [N] and unused texts [N] of the records of a chunk."""


def plan_all(
    source: RecordSource, processor: ConversationProcessor, layout: Layout, num_workers: int
) -> dict[str, Array]:
    """The arrays of ``source.scan()``, ``records`` (digests) and those of ``Counts``, one value a record.

    ``num_workers``: processes; 0: threads of this one. Raises ``DataError`` for the first malformed record.
    """
    with _no_collections():
        return _planned(_Plan(source, processor, layout), num_workers)


def _planned(plan: _Plan, num_workers: int) -> dict[str, Array]:
    arrays = plan.source.scan()
    plan.source.use(arrays)
    chunks = [(i, min(i + _CHUNK, len(plan.source))) for i in range(0, len(plan.source), _CHUNK)]
    if num_workers > 0 and len(chunks) > 1:
        # spawn: this process may hold threads (OpenMP, a tokenizer's pool) that do not survive a fork
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(num_workers, mp_context=spawn, initializer=_adopt, initargs=(plan,)) as pool:
            parts = list(pool.map(_plan_adopted, chunks))
    else:
        parts = _plan_in_threads(plan, chunks)
    columns = np.concatenate([part for part, _, _ in parts]).T
    counts = {name: np.ascontiguousarray(column) for name, column in zip(COLUMNS, columns, strict=True)}
    records = np.concatenate([digests for _, digests, _ in parts])
    unused = np.concatenate([found for _, _, found in parts])
    return {**arrays, "records": records, **counts, **({UNUSED: unused} if unused.any() else {})}


_adopted: _Plan | None = None
"""In a process that plans: what it was started with."""


def _adopt(plan: _Plan) -> None:
    global _adopted
    _adopted = plan


def _plan_adopted(chunk: _Chunk) -> _Planned:
    assert _adopted is not None
    return _adopted.chunk(chunk)


def _plan_in_threads(plan: _Plan, chunks: Sequence[_Chunk]) -> list[_Planned]:
    """``_Plan.chunk`` of each, in order: while one thread tokenizes, which needs no lock, another parses and counts.

    Each thread has a processor of its own, since a tokenizer is set before each call. Within a batch a tokenizer uses
    one core then: its own threads cost a third more for texts of a few words.
    """
    number = min(len(chunks), _THREADS, num_cores())
    if number < 2 or not hasattr(plan.processor.tokenizer, "encode_texts"):
        return [plan.chunk(chunk) for chunk in chunks]
    idle: SimpleQueue[_Plan] = SimpleQueue()
    idle.put(plan)
    for _ in range(number - 1):
        idle.put(replace(plan, processor=copy.deepcopy(plan.processor)))

    def planned(chunk: _Chunk) -> _Planned:
        own = idle.get()
        try:
            return own.chunk(chunk)
        finally:
            idle.put(own)

    with _environment("TOKENIZERS_PARALLELISM", "false"), ThreadPoolExecutor(number) as pool:
        return list(pool.map(planned, chunks))


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


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@dataclass(frozen=True)
class _Plan:
    """What plans records: it is sent to a process once."""

    source: RecordSource
    processor: ConversationProcessor
    layout: Layout

    def chunk(self, chunk: _Chunk) -> _Planned:
        """Counts and digests of the records of a chunk."""
        rows: list[tuple[int, ...]] = []
        digests: list[int] = []
        unused: list[int] = []
        start, stop = chunk
        for first in range(start, stop, self.source.batch):
            entries = self.source.read(first, min(first + self.source.batch, stop))
            for row, digest, number in self._batch(entries):
                rows.append(row)
                digests.append(digest)
                unused.append(number)
        return tuple(np.asarray(found, dtype=np.int64) for found in (rows, digests, unused))  # type: ignore[return-value]

    def _batch(self, entries: Sequence[FoundRecord]) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """Counts, digest and unused texts of each of some records; their texts are tokenized in one call."""
        processor = self.processor
        unk_id = getattr(processor.tokenizer, "unk_id", None)
        records = [entry.record for entry in entries]
        turns_of = [learnt(record, entry.where, self.layout) for record, entry in zip(records, entries, strict=True)]
        samples = processor.plan_many((turns, entry.where) for turns, entry in zip(turns_of, entries, strict=True))
        for entry, record, turns, sample in zip(entries, records, turns_of, samples, strict=True):
            empty = 0
            for turn in turns:
                if turn.kind == "text" and not turn.value.strip():
                    empty += 1
            row = count(sample, unk_id=unk_id, empty_texts=empty)
            digest = record_digest(entry.content, row, processor.rules.marks(row[_TOUCHED]))
            yield row, digest, unused_texts(record) if "captions" in record or "instruction_list" in record else 0


def learnt(record: Mapping[str, Any], where: object, layout: Layout) -> list[Turn]:
    """The turns of one record. Raises ``DataError`` with file and line where it is malformed."""
    turns = layout.turns(record, where)
    for turn in turns:
        if turn.role == "assistant":
            return turns
    raise DataError(f"{where}: conversations has no assistant turn: nothing to learn from")
