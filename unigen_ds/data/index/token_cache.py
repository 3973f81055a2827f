"""Ids of the texts of every record, kept beside its index: a record is tokenized once, not in each epoch.

In: an index and the processor of its records. Out: for a record, the ids of its texts in the order in which the
processor asks for them. The file is made and mapped as that of the index (``array_cache.py``): one process makes it
while others wait, it is complete or absent after a kill, and all processes share its pages. Trade-off: 4 bytes a token
on the disk and one more pass over the texts, once; later a record costs a copy of its ids instead of its tokenization.
Each record has a checksum of its own, since a wrong id would be learned without notice.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from unigen_ds.core.errors import DataError
from unigen_ds.data.cache.array_cache import SUFFIX, ArrayFile, Arrays, fingerprint, load_arrays, load_or_write
from unigen_ds.data.index.index import Chunk, Index, batches, planned, turns_to_learn
from unigen_ds.data.records.records import Layout
from unigen_ds.data.rules import RULES
from unigen_ds.data.samples.processor import ConversationProcessor
from unigen_ds.data.sources.base import RecordSource
from unigen_ds.system.log import logger

_FORMAT = "unigen-tokens-1"


class TokenCache:
    """Of one source. It is copied to loading processes by its path, and mapped there."""

    def __init__(self, path: Path, key: str, arrays: Arrays) -> None:
        self._path, self._key, self._starts, self._numbers = path, key, arrays["starts"], arrays["numbers"]

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenCache.open, (self._path, self._key)

    def of(self, index: int) -> list[list[int]]:
        """Ids of each text of a record. Raises ``DataError`` where the file was damaged."""
        row = self._numbers[self._starts[index] : self._starts[index + 1]]
        numbers = row[1:].tolist()
        if not len(row) or int(row[0]) != _checksum(row[1:]):
            raise DataError(
                f"the cache of tokens {self._path} is damaged: record {index} is not what was written",
                remedy="delete the file: it is made again",
            )
        texts, at = [], 0
        while at < len(numbers):
            length = numbers[at]
            texts.append(numbers[at + 1 : at + 1 + length])
            at += 1 + length
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
            _FORMAT, index.content, type(processor).__qualname__, processor.tokenizer.fingerprint,
            RULES.special_tokens, index.layout.facts, *index.source.cache_facts,
        )  # fmt: skip
        path = index.folder / f"{index.source.origin.name}-tokens-{key[:16]}{SUFFIX}"

        def fill(new: ArrayFile) -> None:
            new.add("starts", len(index) + 1)
            new.add("numbers", None, "int32")
            end = 0
            plan = _TokenPlan(index.source, processor, index.layout, frozenset(index.malformed.tolist()))
            for first, (lengths, numbers) in planned(index.source, plan, num_workers):
                new.put("starts", first + 1, end + np.cumsum(lengths))
                new.put("numbers", end, numbers)
                end += len(numbers)

        arrays = load_or_write(path, key, fill)
        return None if arrays is None else cls(path, key, arrays)


def _checksum(numbers: NDArray[Any]) -> int:
    """31 bits of XXH32, so that it is a number of the array."""
    return xxhash.xxh32_intdigest(np.ascontiguousarray(numbers, dtype="<i4").data) >> 1


@dataclass(frozen=True)
class _TokenPlan:
    """Tokenizes records."""

    source: RecordSource
    processor: ConversationProcessor
    layout: Layout
    malformed: frozenset[int]
    """Numbers of the records that have no texts."""

    def __call__(self, chunk: Chunk) -> tuple[NDArray[Any], ...]:
        """How many numbers each record has, and the numbers: its checksum, then of each text the length and ids."""
        rows: list[NDArray[np.int32]] = []
        for first, entries in batches(self.source, chunk):
            turns = [
                [] if n in self.malformed else turns_to_learn(entry.record, entry.where, self.layout)
                for n, entry in enumerate(entries, first)
            ]
            for texts in self.processor.text_ids(turns):
                row = np.asarray([0, *(number for ids in texts for number in (len(ids), *ids))], dtype=np.int32)
                row[0] = _checksum(row[1:])
                rows.append(row)
        return np.asarray([*map(len, rows)], dtype=np.int64), np.concatenate(rows)
