"""What packing, truncation and statistics need of a record: one row of numbers, and a digest of its content."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from unigen_ds.data.cache.array_cache import SHARED_FROM, SUFFIX, ArrayFile, load_or_fill
from unigen_ds.data.rules import TOUCH_BITS
from unigen_ds.data.samples.sample import Sample, Tally

KINDS = ("text", "conversation", "images")
"""What a record is, for ``train_dataloader.overflow``."""
NUM_DIGESTED = 6
"""Columns of ``Counts`` that ``record_digest`` has always contained."""
Array = NDArray[np.int64]


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
    """``TOUCH_BITS`` of the data rules that change the record."""
    unknown: Array
    """Text tokens that are the tokenizer's unknown token."""
    empty_texts: Array
    """Texts (captions, questions, answers) without any character but white space."""
    largest_image: Array
    """Tokens of the largest image."""
    other_targets: Array
    """Targets of a family's own loss terms."""

    def touched_by(self, rule: str) -> NDArray[np.bool_]:
        """[N] whether a data rule changes the record."""
        return (self.touched & TOUCH_BITS[rule]) != 0

    @property
    def targets(self) -> Array:
        """[N] of every loss term."""
        return self.text_targets + self.image_targets + self.other_targets

    @property
    def no_image_readable(self) -> bool:
        """There are images, and none can be read."""
        return 0 < int(self.images.sum()) == int(self.unreadable.sum())

    @property
    def all_touched(self) -> int:
        """``TOUCH_BITS`` of the rules that change any record."""
        return int(np.bitwise_or.reduce(self.touched, initial=0))

    def some(self, numbers: Array, folder: Path | None, key: Callable[[], str]) -> Counts:
        """Those of some records; of many in a file that all processes share, recognised by ``key()``."""
        if folder is None or len(numbers) < SHARED_FROM:
            return Counts(*(getattr(self, name)[numbers] for name in COLUMNS))

        def fill(new: ArrayFile) -> None:
            for name in COLUMNS:
                new.add(name, len(numbers))
                new.put(name, 0, getattr(self, name)[numbers])

        name = key()  # only now: it may be a digest of the data
        arrays = load_or_fill(folder / f"part-{name[:16]}{SUFFIX}", name, fill)
        return Counts(*(arrays[column] for column in COLUMNS))

    @classmethod
    def of(cls, rows: list[tuple[int, ...]]) -> Counts:
        table = np.asarray(rows, dtype=np.int64).reshape(-1, len(dataclasses.fields(cls)))
        return cls(*(np.ascontiguousarray(column) for column in table.T))

    @property
    def digest(self) -> str:
        """Changes with every length: a packing plan is a function of it."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.tokens, self.tiles):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


CONTENT = ("tokens", "tiles", "image_tokens", "text_targets", "image_targets", "other_targets")
"""Columns of what a sequence contains: 0 for a record that is left out."""
COLUMNS = tuple(field.name for field in dataclasses.fields(Counts))


def count(sample: Sample, *, unk_id: int | None = None, empty_texts: int = 0) -> tuple[int, ...]:
    """One row of ``Counts``. ``unk_id``: the tokenizer's id of unknown words, if it has one."""
    tokens, tally = 0, Tally(unk_id)
    for split in sample.splits:  # one pass: it is done for every record
        tokens += split.num_tokens
        split.count(tally)
    kind = "images" if tally.images else "text" if sample.plain else "conversation"
    return (
        tokens,
        tally.tiles,
        tally.image_tokens,
        tally.text_targets,
        tally.image_targets,
        tally.unreadable,
        tally.images,
        KINDS.index(kind),
        sample.touched,
        tally.unknown,
        empty_texts,
        tally.largest_image,
        tally.other_targets,
    )


def record_digest(content: bytes, counts: tuple[int, ...], marks: Sequence[object] = ()) -> int:
    """64 bits of BLAKE2b of one record: of its bytes, and of its counts, which follow the sizes of its images.

    ``marks``: the versions of the rules that change it; none where none does.
    """
    facts = repr(counts[:NUM_DIGESTED]) + (repr(marks) if marks else "")
    digest = hashlib.blake2b(facts.encode() + content, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
