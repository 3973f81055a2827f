"""Every record planned once -> arrays of byte ranges, lengths and counts, cached beside the data file.

What packing, truncation and statistics need to know of a record without reading it again. The cache is an ``.npz`` in
``.unigen_index/`` beside the data file (or in ``cache_dir`` where that folder cannot be written), named after a
fingerprint of data file, processor and format. Trade-off: the first start plans every record (about 50,000 short
texts a second and process; an image costs one header read), every later start reads 72 bytes a record.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import hashlib
import multiprocessing
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from unigen_ds.core import dist
from unigen_ds.core.cores import num_cores
from unigen_ds.core.errors import DataError
from unigen_ds.core.files import quick_digest, write_atomic
from unigen_ds.core.log import logger
from unigen_ds.data.content import content_digest
from unigen_ds.data.data_file import check_data_file
from unigen_ds.data.formats import Place, Turn, load_record, parse_record, read_bytes, scan
from unigen_ds.data.processor import UnifiedProcessor
from unigen_ds.data.rules import TOUCH_BITS, DataRules
from unigen_ds.data.samples import ImageSplit, Sample, TextSplit, TokenSplit

FOLDER = ".unigen_index"
_FORMAT = "unigen-index-1"
"""Of the digest that checkpoints keep."""
_CACHE_FORMAT = "unigen-index-5"
_CHUNK = 2048
_BATCH = 256
"""Records that are read and tokenized together: enough for the speed, few enough for memory."""
KINDS = ("text", "conversation", "images")
"""What a record is, for ``train_dataloader.overflow``."""
_DIGESTED = 6
"""Columns of ``Counts`` that ``record_digest`` has always contained."""

_THREADS = 4
"""Threads that plan records at most: what is not tokenizing, about a fifth of the work, is done by one at a time."""

Array = NDArray[np.int64]
_Chunk = tuple[Path, Path, Array, Array]
"""Data file, folder of the images, offsets and lengths of some records."""


@dataclass(frozen=True)
class Counts:
    """Per record [N]: lengths and targets of the whole, untruncated sample."""

    tokens: Array
    tiles: Array
    """Images that a vision tower or the VAE encodes as conditions."""
    image_tokens: Array
    text_targets: Array
    image_targets: Array
    unreadable: Array
    """Images whose header could not be read."""
    images: Array
    """Images, readable or not; one that is seen in two ways counts twice."""
    kind: Array
    """0 plain text, 1 a conversation of texts, 2 a record with images (``KINDS``)."""
    touched: Array
    """``TOUCH_BITS`` of the data rules that change the record in one of their versions."""
    unknown: Array
    """Text tokens that are the tokenizer's unknown word."""
    empty_texts: Array
    """Texts (captions, questions, answers) without any character but white space."""
    largest_image: Array
    """Tokens of the largest image."""

    def touched_by(self, rule: str) -> NDArray[np.bool_]:
        """[N] whether a data rule changes the record."""
        return (self.touched & TOUCH_BITS[rule]) != 0

    @property
    def no_image_readable(self) -> bool:
        """There are images, and none can be read."""
        return 0 < int(self.images.sum()) == int(self.unreadable.sum())

    @property
    def all_touched(self) -> int:
        """``TOUCH_BITS`` of the rules that change any record."""
        return int(np.bitwise_or.reduce(self.touched, initial=0))

    @classmethod
    def of(cls, rows: list[tuple[int, ...]]) -> Counts:
        table = np.asarray(rows, dtype=np.int64).reshape(-1, len(dataclasses.fields(cls)))
        return cls(*(np.ascontiguousarray(column) for column in table.T))

    @property
    def digest(self) -> str:
        """Changes with every length: a packing plan is a function of it."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.tokens, self.tiles):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


_COLUMNS = dataclasses.fields(Counts)
_TOUCHED = [field.name for field in _COLUMNS].index("touched")


def count(sample: Sample, *, unk_id: int | None = None, empty_texts: int = 0) -> tuple[int, ...]:
    """One row of ``Counts``. ``unk_id``: the tokenizer's id of unknown words, if it has one."""
    tokens = image_tokens = text_targets = image_targets = unreadable = images = unknown = largest = 0
    for split in sample.splits:  # one pass: it is done for every record
        length = split.num_tokens
        tokens += length
        if isinstance(split, (TextSplit, TokenSplit)):
            text_targets += split.num_targets
            unknown += 0 if unk_id is None else split.ids.count(unk_id)
            continue
        images += 1
        image_tokens += length
        unreadable += bool(split.error)
        largest = max(largest, length)
        if isinstance(split, ImageSplit) and split.kind == "noise":
            image_targets += length - 2
    kind = "images" if images else "text" if sample.plain else "conversation"
    return (
        tokens,
        sample.num_tiles if images else 0,
        image_tokens,
        text_targets,
        image_targets,
        unreadable,
        images,
        KINDS.index(kind),
        sample.touched,
        unknown,
        empty_texts,
        largest,
    )


def record_digest(content: bytes, counts: tuple[int, ...], marks: Sequence[object] = ()) -> int:
    """64 bits of BLAKE2b of one record: of its bytes, and of its counts, which follow the sizes of its images.

    ``marks``: the versions of the rules that change it; none where none does.
    """
    facts = repr(counts[:_DIGESTED]) + (repr(marks) if marks else "")
    digest = hashlib.blake2b(facts.encode() + content, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def prefix_digest(records: Array, number: int, *facts: object) -> str:
    """Of the first ``number`` record digests and of ``facts``: a longer file that begins with them gives it as well."""
    first = np.ascontiguousarray(records[:number], dtype="<i8")
    return fingerprint(number, hashlib.blake2b(first.tobytes(), digest_size=16).hexdigest(), *facts)


@dataclass(frozen=True)
class Index:
    """Byte range, counts and digest of every record of one data file."""

    offsets: Array
    lengths: Array
    records: Array
    """``record_digest`` of each."""
    counts: Counts
    digest: str
    """Of data file, processor and counts."""
    folder: Path | None
    """Where it is cached."""

    def __len__(self) -> int:
        return len(self.offsets)

    def read(self, path: Path, index: int, rules: DataRules) -> tuple[bytes, Place]:
        """The bytes of a record, and where it is. Raises ``DataError`` where they are no longer those of the index."""
        offset, counts = int(self.offsets[index]), self.counts
        raw = read_bytes(path, offset, int(self.lengths[index]))
        row = tuple(int(getattr(counts, field.name)[index]) for field in _COLUMNS[:_DIGESTED])
        if record_digest(raw, row, rules.marks(int(counts.touched[index]))) != self.records[index]:
            raise DataError(
                f"record {index} of data file {path} was changed during the run: it is not the one of the index",
                remedy="restore the file, then continue with --resume; --on-data-change continues with changed data",
            )
        return raw, Place(path, offset)

    @classmethod
    def build(
        cls,
        path: Path,
        processor: UnifiedProcessor,
        *,
        image_root: Path | None = None,
        cache_dir: Path | None = None,
        num_workers: int = 0,
    ) -> Index:
        """From the cache, or by planning every record (with ``num_workers`` processes) and caching the result.

        Several processes may start together: one plans, the others wait for its file where the file system has locks.
        Raises ``DataError`` for a malformed record. An unreadable image is no error here.
        """
        check_data_file(path)
        root = path.parent if image_root is None else image_root
        rules = processor.rules
        folder = cache_folder(path, cache_dir)
        content = content_digest(path, folder)
        key = fingerprint(content, os.path.relpath(root, path.parent), processor.fingerprint, rules, _CACHE_FORMAT)
        cache = None if folder is None else folder / f"{path.name}-{key[:16]}.npz"

        def make() -> dict[str, Array]:
            return _plan_all(path, processor, root, num_workers)

        arrays = cached(cache, key, make)
        counts = Counts(*(arrays[field.name] for field in dataclasses.fields(Counts)))
        if cache is not None and counts.no_image_readable:  # a wrong folder, most likely: look again next time
            cache.unlink(missing_ok=True)
        _report(path, counts, cache)
        # not of the key: the same data at another place is the same data, and so is what no rule changes; and of a
        # quick digest, as older checkpoints keep it: a change that it misses shows in the digests of the records
        marks = rules.marks(counts.all_touched)
        digest = fingerprint(quick_digest(path), processor.fingerprint, _FORMAT, counts.digest, *marks)
        return cls(arrays["offsets"], arrays["lengths"], arrays["records"], counts, digest, folder)


def fingerprint(*facts: object) -> str:
    """BLAKE2b-128 of the texts of ``facts``, hex."""
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def cache_folder(path: Path, cache_dir: Path | None) -> Path | None:
    """The folder for cached arrays of a data file: beside it, else ``cache_dir``, else none (with a warning).

    A folder beside it that is there but read-only is the last choice: it may hold what somebody else prepared.
    """
    beside = path.parent / FOLDER
    for folder in (beside, cache_dir):
        if folder is None:
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    if beside.is_dir():
        return beside
    logger().warning(
        "the index of %s cannot be cached: its folder is not writable and no cache_dir is given; "
        "every start plans all records again",
        path,
    )
    return None


def cached(cache: Path | None, key: str, make: Callable[[], Mapping[str, Array]]) -> dict[str, Array]:
    """The arrays of ``cache`` where it holds those of ``key``, else those of ``make``, which are then written there."""
    if cache is None:
        return dict(make())
    found = _stored(cache, key)
    if found is not None:
        return found
    with _locked(cache):
        found = _stored(cache, key)  # another process may have been first
        if found is None:
            found = dict(make())
            try:
                write_atomic(cache, lambda temporary: _write(temporary, key, found or {}))
            except OSError as error:  # a full disk costs time at the next start, not this run
                logger().warning("index cache %s cannot be written: %s", cache, error)
    return found


def _write(path: Path, key: str, arrays: Mapping[str, Array]) -> None:
    with path.open("wb") as stream:  # a path would get a suffix of NumPy's own
        np.savez(stream, key=np.asarray(key), **arrays)  # type: ignore[arg-type]


def _stored(cache: Path, key: str) -> dict[str, Array] | None:
    if not cache.exists():
        return None
    try:
        with np.load(cache, allow_pickle=False) as stored:
            if str(stored["key"]) != key:
                return None
            return {name: stored[name] for name in stored.files if name != "key"}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        logger().warning("index cache %s is damaged and is built anew: %s: %s", cache, type(error).__name__, error)
        return None


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """Hold the lock file of ``cache``; without locks on this system or file system: go on without."""
    try:
        import fcntl  # not on every system

        stream = cache.with_name(f".{cache.name}.lock").open("w")
    except (ImportError, OSError):
        yield
        return
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError:
            logger().debug("no file locks at %s", cache.parent)
        yield


def _plan_all(path: Path, processor: UnifiedProcessor, root: Path, num_workers: int) -> dict[str, Array]:
    with _no_collections():
        return _planned(path, processor, root, num_workers)


def _planned(path: Path, processor: UnifiedProcessor, root: Path, num_workers: int) -> dict[str, Array]:
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
    counts = {field.name: np.ascontiguousarray(column) for field, column in zip(_COLUMNS, columns, strict=True)}
    records = np.concatenate([digests for _, digests in parts])
    return {"offsets": offsets, "lengths": lengths, "records": records, **counts}


def _plan_in_threads(processor: UnifiedProcessor, chunks: Sequence[_Chunk]) -> list[tuple[Array, Array]]:
    """``_plan_chunk`` of each, in order: while one thread tokenizes, which needs no lock, another parses and counts.

    Each thread has a processor of its own, since a tokenizer is set before each call. Within a batch a tokenizer uses
    one core then: its own threads cost a third more for texts of a few words.
    """
    number = min(len(chunks), _THREADS, num_cores())
    if number < 2 or not hasattr(processor.tokenizer, "encode_texts"):
        return [_plan_chunk(processor, chunk) for chunk in chunks]
    idle: SimpleQueue[UnifiedProcessor] = SimpleQueue()
    for _ in range(number):
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
    """Planning leaves no cycles; looking for them among all objects of the process takes a third of its time."""
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


def _report(path: Path, counts: Counts, cache: Path | None) -> None:
    """What of the data will not be learned as meant, in numbers."""
    if dist.env_rank() != 0:
        return
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
    if broken:
        logger().warning(
            "%d of %d records of %s have an image that cannot be read; they become counted skips%s",
            broken,
            len(counts.tokens),
            path,
            f" (after repairing them, delete {cache})" if cache else "",
        )


def _plan_chunk(processor: UnifiedProcessor, chunk: _Chunk) -> tuple[Array, Array]:
    """Counts [N, columns] and digests [N] of the records of a chunk."""
    path, root, offsets, lengths = chunk
    spans = list(zip(offsets.tolist(), lengths.tolist(), strict=True))
    rows: list[tuple[int, ...]] = []
    digests: list[int] = []
    with path.open("rb") as stream:
        for first in range(0, len(spans), _BATCH):
            batch = spans[first : first + _BATCH]
            raws = _read(stream, batch)
            places = [Place(path, offset) for offset, _ in batch]
            for row, digest in _plan_batch(raws, places, processor, root):
                rows.append(row)
                digests.append(digest)
    return np.asarray(rows, dtype=np.int64), np.asarray(digests, dtype=np.int64)


def _plan_batch(
    raws: Sequence[bytes], places: Sequence[Place], processor: UnifiedProcessor, root: Path
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Counts and digest of each of some records; their texts are tokenized in one call."""
    unk_id = getattr(processor.tokenizer, "unk_id", None)
    records = [record_turns(raw, place, root) for raw, place in zip(raws, places, strict=True)]
    samples = processor.plan_many(zip(records, places, strict=True))
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


def record_turns(raw: bytes, place: Place, root: Path) -> list[Turn]:
    """The turns of one record. Raises ``DataError`` with file and line where it is malformed."""
    record = load_record(raw, place)
    turns = parse_record(record, place, image_root=root)
    for turn in turns:
        if turn.role == "assistant":
            return turns
    raise DataError(f"{place}: conversations has no assistant turn: nothing to learn from")
