"""Every record planned once -> arrays of byte ranges, lengths and counts, cached beside the data file.

What packing, truncation and statistics need of a record without reading it again. The cache is an ``.npz`` in
``.unigen_index/`` beside the data file (or in ``cache_dir`` where that folder cannot be written), named after a
fingerprint of data file, processor and format. Trade-off: the first start plans every record (two cores do about
40,000 texts of 20 words a second; an image costs one header read), every later start reads 120 bytes a record.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from unigen_ds.core import dist
from unigen_ds.core.errors import DataError
from unigen_ds.core.files import quick_digest
from unigen_ds.core.log import logger
from unigen_ds.data.array_cache import cache_folder, cached, fingerprint
from unigen_ds.data.content import content_digest
from unigen_ds.data.counts import COLUMNS, NUM_DIGESTED, Array, Counts, record_digest
from unigen_ds.data.data_file import check_data_file
from unigen_ds.data.formats import Place, load_record, read_bytes
from unigen_ds.data.planning import plan_all
from unigen_ds.data.processor import ConversationProcessor
from unigen_ds.data.rules import DataRules

_FORMAT = "unigen-index-1"
"""Of the digest that checkpoints keep."""
_CACHE_FORMAT = "unigen-index-6"
_CONTENT_FORMAT = "unigen-content-1"


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
        row = tuple(int(getattr(counts, name)[index]) for name in COLUMNS[:NUM_DIGESTED])
        if record_digest(raw, row, rules.marks(int(counts.touched[index]))) != self.records[index]:
            raise DataError(
                f"record {index} of data file {path} was changed during the run: it is not the one of the index",
                remedy="restore the file, then continue with --resume; --on-data-change continues with changed data",
            )
        return raw, Place(path, offset)

    def content_digests(self, path: Path) -> Array:
        """[N] 64 bits of the values of each record. Reads the file once (cached)."""
        key = fingerprint(_CONTENT_FORMAT, prefix_digest(self.records, len(self)))

        def make() -> dict[str, Array]:
            found = []
            with path.open("rb") as stream:
                for offset, length in zip(self.offsets.tolist(), self.lengths.tolist(), strict=True):
                    stream.seek(offset)
                    record = load_record(stream.read(length), Place(path, offset))
                    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
                    found.append(hashlib.blake2b(text.encode(), digest_size=8).digest())
            return {"digests": np.frombuffer(b"".join(found), dtype="<i8").astype(np.int64)}

        cache = None if self.folder is None else self.folder / f"{path.name}-content-{key[:16]}.npz"
        return cached(cache, key, make)["digests"]

    @classmethod
    def build(
        cls,
        path: Path,
        processor: ConversationProcessor,
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
            return plan_all(path, processor, root, num_workers)

        arrays = cached(cache, key, make)
        counts = Counts(*(arrays[name] for name in COLUMNS))
        if cache is not None and counts.no_image_readable:  # a wrong folder, most likely: look again next time
            cache.unlink(missing_ok=True)
        _report(path, counts, cache)
        # not of the key: the same data in another folder is the same data, and so is what no rule changes; and of a
        # quick digest, as older checkpoints keep it: a change that it misses shows in the digests of the records
        marks = rules.marks(counts.all_touched)
        digest = fingerprint(quick_digest(path), processor.fingerprint, _FORMAT, counts.digest, *marks)
        return cls(arrays["offsets"], arrays["lengths"], arrays["records"], counts, digest, folder)


def prefix_digest(records: Array, number: int, *facts: object) -> str:
    """Of the first ``number`` record digests and of ``facts``: the same for a longer file that begins with them."""
    first = np.ascontiguousarray(records[:number], dtype="<i8")
    return fingerprint(number, hashlib.blake2b(first.tobytes(), digest_size=16).hexdigest(), *facts)


def _report(path: Path, counts: Counts, cache: Path | None) -> None:
    """How much of the data will not be learned as intended."""
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
