"""Every record of a source planned once -> arrays of positions, lengths and counts, cached beside the data file.

What packing, truncation and statistics need of a record without reading it again. The cache is a file in
``.unigen_index/`` beside the data file (or in ``cache_dir`` where that folder cannot be written), named after a
fingerprint of data file, processor and format, and mapped into the memory of every process (``array_cache.py``).
Trade-off: the first start plans every record (two cores do about 40,000 texts of 20 words a second; an image costs one
header read) and writes at most 144 bytes a record; a later start maps them.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from unigen_ds.core.errors import DataError
from unigen_ds.data.cache.array_cache import SUFFIX, NewArrays, filled, fingerprint
from unigen_ds.data.index.planning import FILLED, UNUSABLE, UNUSED, UNUSED_KEYS, Plan, batches, is_malformed, plan_all
from unigen_ds.data.records.records import Layout
from unigen_ds.data.records.unusable import BadRecord, OnRecordError, from_array, unusable_error
from unigen_ds.data.records.unused import unused_line, unused_of
from unigen_ds.data.rules import RULES, marks
from unigen_ds.data.samples.counts import COLUMNS, NUM_DIGESTED, Array, Counts, record_digest
from unigen_ds.data.samples.processor import ConversationProcessor
from unigen_ds.data.sources.base import FoundRecord, RecordSource
from unigen_ds.data.sources.json_lines import JsonSource
from unigen_ds.system import dist
from unigen_ds.system.log import logger

_FORMAT = "unigen-index-1"
"""Of the digest that checkpoints keep."""
_CACHE_FORMAT = "unigen-index-10"
_CONTENT_FORMAT = "unigen-content-1"
_DIGESTS = "digests"
"""An array of the index: the digest of its counts, then that of its records, 16 bytes each. For 10^8 records they
need seconds."""


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
    lines: NDArray[np.uint8]
    """The first records that cannot be trained on (``unusable.as_array``)."""
    on_record_error: OnRecordError
    cache: Path | None
    """The file that it was read from; None: it was made by this start."""

    def __len__(self) -> int:
        return len(self.records)

    @cached_property
    def malformed(self) -> Array:
        """Numbers of the records that have no sample."""
        return np.flatnonzero(is_malformed(self.records, self.counts.tokens))

    @cached_property
    def left_out(self) -> Array:
        """Numbers of the records that ``on_record_error`` leaves out."""
        unreadable = np.flatnonzero(self.counts.unreadable)
        return np.union1d(self.malformed, unreadable) if self.on_record_error == "skip" else self.malformed

    def unusable(self) -> list[BadRecord]:
        """All records that cannot be trained on; those after many without their reason."""
        known = {one.number: one for one in from_array(self.lines)}
        numbers = np.union1d(self.malformed, np.flatnonzero(self.counts.unreadable)).tolist()
        return [
            known.get(n) or BadRecord(n, *self.source.file_of(n), None, "as those before it", True) for n in numbers
        ]

    def is_mended(self, processor: ConversationProcessor) -> bool:
        """Whether a record that could not be used when the index was made, at an earlier start, can be used now."""
        if self.cache is None:
            return False
        plan = Plan(self.source, processor, self.layout)
        return any(not len(plan.chunk((one.number, one.number + 1))[-1]) for one in self.unusable())

    def prefix_digest(self, number: int, *facts: object) -> str:
        """``prefix_digest`` of its records."""
        return prefix_digest(self.records, number, *facts, known=self.records_digest)

    def read(self, index: int) -> FoundRecord:
        """A record. Raises ``DataError`` where it is no longer the one of the index."""
        counts = self.counts
        (entry,) = self.source.read(index, index + 1)
        row = tuple(int(getattr(counts, name)[index]) for name in COLUMNS[:NUM_DIGESTED])
        if record_digest(entry.content, row, marks(int(counts.touched[index]))) != self.records[index]:
            raise DataError(
                f"record {index} of data file {self.source.title} was changed during the run: it is not the one of the"
                " index",
                remedy="restore the file, then continue with --resume; --on-data-change continues with changed data",
            )
        return entry

    def content_digests(self) -> Array:
        """[N] 64 bits of the values of each record. Reads the source once (cached)."""
        key = fingerprint(_CONTENT_FORMAT, self.prefix_digest(len(self)))

        def fill(new: NewArrays) -> None:
            new.add("digests", len(self))
            malformed = set(self.malformed.tolist())
            for start, entries in batches(self.source, (0, len(self))):
                values = [b"" if n in malformed else entry.values for n, entry in enumerate(entries, start)]
                found = b"".join(hashlib.blake2b(one, digest_size=8).digest() for one in values)
                new.put("digests", start, np.frombuffer(found, dtype="<i8").astype(np.int64))

        cache = None if self.folder is None else self.folder / f"{self.source.origin.name}-content-{key[:16]}{SUFFIX}"
        return filled(cache, key, fill)["digests"]

    @classmethod
    def build(
        cls,
        given: Path | RecordSource,
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
        error here. ``given``: a source, or the path of a JSON file; ``image_root``: None: the source's own;
        ``report``: what of the records is not learned as intended, in the log.
        """
        source = given if isinstance(given, RecordSource) else JsonSource(given)
        root = source.root if image_root is None else image_root
        layout = Layout(root) if layout is None else replace(layout, image_root=root)
        folder = source.index_folder(cache_dir)
        content = source.content_digest(folder)
        beneath = os.path.relpath(root, source.root)
        moved = (("image_folders", RULES.image_folders),) if source.several_folders and layout.folders else ()
        extra = (*source.cache_facts, *layout.facts, *moved)
        key = fingerprint(content, beneath, processor.fingerprint, RULES, _CACHE_FORMAT, *extra)
        cache = None if folder is None else folder / f"{source.origin.name}-{key[:16]}{SUFFIX}"
        made = False

        def fill(new: NewArrays) -> None:
            nonlocal made
            made = True
            plan_all(source, processor, layout, num_workers, new, on_record_error)
            new.add(_DIGESTS, 32, "uint8")
            new.put(_DIGESTS, 0, _digests(new))

        arrays = filled(cache, key, fill)
        source.use({name: found for name, found in arrays.items() if name not in (*FILLED, _DIGESTS, UNUSABLE)})
        counts = Counts(*(arrays[name] for name in COLUMNS))
        of_counts, of_records = (part.tobytes().hex() for part in arrays[_DIGESTS].reshape(2, 16))
        if report:
            _report(source, counts, on_record_error, arrays[UNUSED], arrays[UNUSED_KEYS])
        # not of the key: the same data in another folder is the same data, and so is what no rule changes
        touching = marks(counts.all_touched)
        facts = (*source.identity(content), processor.fingerprint, _FORMAT, of_counts, *touching, *layout.facts)
        digest = fingerprint(*facts)
        index = cls(
            source, arrays["records"], counts, digest, folder, layout, of_records, content, arrays[UNUSED_KEYS],
            arrays[UNUSABLE], on_record_error, None if made else cache,
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


def _digests(new: NewArrays) -> NDArray[np.uint8]:
    """``_DIGESTS`` of a filled index."""
    counts = Counts(*(new.read(name) for name in COLUMNS))
    records = np.ascontiguousarray(new.read("records"), dtype="<i8").data
    records_digest = hashlib.blake2b(records, digest_size=16).digest()
    return np.frombuffer(bytes.fromhex(counts.digest) + records_digest, np.uint8)


def _report(source: RecordSource, counts: Counts, on_error: OnRecordError, unused: Array, keys: Array) -> None:
    """How much of the data will not be learned as intended."""
    if dist.env_rank() != 0:
        return
    path = source.title
    for note in source.notes():
        logger().warning("%s: %s", path, note)
    if keys.any():
        logger().warning("%s: %s", path, unused_line(unused_of(keys)))
    if unused.any():
        logger().warning(
            "%d records of %s have several texts to choose from; one of each is used, always the same, and %d are not",
            int((unused > 0).sum()), path, int(unused.sum()),
        )  # fmt: skip
    empty, unknown = int((counts.empty_texts > 0).sum()), int(counts.unknown.sum())
    if empty:
        logger().warning("%d of %d records of %s have an empty text (a caption, a question or an answer)",
                         empty, len(counts.tokens), path)  # fmt: skip
    if unknown:
        texts = int(counts.tokens.sum() - counts.image_tokens.sum())
        logger().warning(
            "%d of %d text tokens of %s (%.2g %%) are words that the tokenizer does not have (<unk>)",
            unknown, texts, path, 100 * unknown / texts,
        )  # fmt: skip
    broken = int((counts.unreadable > 0).sum())
    if broken and on_error == "error":
        logger().warning(
            "%d of %d records of %s have an image that cannot be read; they become counted skips",
            broken, len(counts.tokens), path,
        )  # fmt: skip
