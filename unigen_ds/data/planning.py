"""A data file -> every record parsed, tokenized, counted and digested once: in batches, by threads or processes."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO

import numpy as np

from unigen_ds.core.cores import num_cores
from unigen_ds.core.errors import DataError
from unigen_ds.data.counts import COLUMNS, Array, count, record_digest
from unigen_ds.data.formats import Place, Turn, load_record, parse_record, scan
from unigen_ds.data.processor import ConversationProcessor

_CHUNK = 2048
_BATCH = 256
"""Records that are read and tokenized together: enough for the speed, few enough for memory."""
_THREADS = 4
"""Threads that plan records at most: the work beside tokenizing, about a fifth, is done by one thread at a time."""
_TOUCHED = COLUMNS.index("touched")
_Chunk = tuple[Path, Path, Array, Array]
"""Data file, folder of the images, offsets and lengths of some records."""


def plan_all(path: Path, processor: ConversationProcessor, root: Path, num_workers: int) -> dict[str, Array]:
    """Arrays ``offsets``, ``lengths``, ``records`` (digests) and those of ``Counts``, one value a record.

    ``num_workers``: processes; 0: threads of this one. Raises ``DataError`` for the first malformed record.
    """
    with _no_collections():
        return _planned(path, processor, root, num_workers)


def _planned(path: Path, processor: ConversationProcessor, root: Path, num_workers: int) -> dict[str, Array]:
    offsets, lengths = scan(path)
    chunks = [(path, root, offsets[i : i + _CHUNK], lengths[i : i + _CHUNK]) for i in range(0, len(offsets), _CHUNK)]
    if num_workers > 0 and len(chunks) > 1:
        # spawn: this process may hold threads (OpenMP, a tokenizer's pool) that do not survive a fork
        pool = ProcessPoolExecutor(num_workers, mp_context=multiprocessing.get_context("spawn"))
        with pool:
            parts = list(pool.map(partial(_plan_chunk, processor), chunks))
    else:
        parts = _plan_in_threads(processor, chunks)
    columns = np.concatenate([part for part, _ in parts]).T
    counts = {name: np.ascontiguousarray(column) for name, column in zip(COLUMNS, columns, strict=True)}
    records = np.concatenate([digests for _, digests in parts])
    return {"offsets": offsets, "lengths": lengths, "records": records, **counts}


def _plan_in_threads(processor: ConversationProcessor, chunks: Sequence[_Chunk]) -> list[tuple[Array, Array]]:
    """``_plan_chunk`` of each, in order: while one thread tokenizes, which needs no lock, another parses and counts.

    Each thread has a processor of its own, since a tokenizer is set before each call. Within a batch a tokenizer uses
    one core then: its own threads cost a third more for texts of a few words.
    """
    number = min(len(chunks), _THREADS, num_cores())
    if number < 2 or not hasattr(processor.tokenizer, "encode_texts"):
        return [_plan_chunk(processor, chunk) for chunk in chunks]
    idle: SimpleQueue[ConversationProcessor] = SimpleQueue()
    idle.put(processor)
    for _ in range(number - 1):
        idle.put(copy.deepcopy(processor))

    def plan(chunk: _Chunk) -> tuple[Array, Array]:
        own = idle.get()
        try:
            return _plan_chunk(own, chunk)
        finally:
            idle.put(own)

    with _environment("TOKENIZERS_PARALLELISM", "false"), ThreadPoolExecutor(number) as pool:
        return list(pool.map(plan, chunks))


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


def _plan_chunk(processor: ConversationProcessor, chunk: _Chunk) -> tuple[Array, Array]:
    """Counts [N, columns] and digests [N] of the records of a chunk."""
    path, root, offsets, lengths = chunk
    spans = list(zip(offsets.tolist(), lengths.tolist(), strict=True))
    rows: list[tuple[int, ...]] = []
    digests: list[int] = []
    with path.open("rb") as stream:
        for first in range(0, len(spans), _BATCH):
            batch = spans[first : first + _BATCH]
            raws = _read(stream, batch)
            locations = [Place(path, offset) for offset, _ in batch]
            for row, digest in _plan_batch(raws, locations, processor, root):
                rows.append(row)
                digests.append(digest)
    return np.asarray(rows, dtype=np.int64), np.asarray(digests, dtype=np.int64)


def _plan_batch(
    raws: Sequence[bytes], locations: Sequence[Place], processor: ConversationProcessor, root: Path
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Counts and digest of each of some records; their texts are tokenized in one call."""
    unk_id = getattr(processor.tokenizer, "unk_id", None)
    records = [record_turns(raw, location, root) for raw, location in zip(raws, locations, strict=True)]
    samples = processor.plan_many(zip(records, locations, strict=True))
    for raw, turns, sample in zip(raws, records, samples, strict=True):
        empty = 0
        for turn in turns:
            if turn.kind == "text" and not turn.value.strip():
                empty += 1
        row = count(sample, unk_id=unk_id, empty_texts=empty)
        yield row, record_digest(raw, row, processor.rules.marks(row[_TOUCHED]))


def _read(stream: BinaryIO, spans: Sequence[tuple[int, int]]) -> list[bytes]:
    """The bytes of records that follow each other, in one call: threads wait for each other at each."""
    start, (last, length) = spans[0][0], spans[-1]
    stream.seek(start)
    block = stream.read(last + length - start)
    return [block[offset - start : offset - start + length] for offset, length in spans]


def record_turns(raw: bytes, location: Place, root: Path) -> list[Turn]:
    """The turns of one record. Raises ``DataError`` with file and line where it is malformed."""
    record = load_record(raw, location)
    turns = parse_record(record, location, image_root=root)
    for turn in turns:
        if turn.role == "assistant":
            return turns
    raise DataError(f"{location}: conversations has no assistant turn: nothing to learn from")
