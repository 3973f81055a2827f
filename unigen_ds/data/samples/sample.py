"""A sample as splits, before any tensor exists: enough to compute its length, shorten it, drop parts, and pack it; and
what packing, truncation and statistics need of many: a row of numbers and a digest of each.

A split is one text, one image, one row of numbers: whatever a kind of model reads or learns as a unit (``Split``).
Splits of texts and images are in ``splits.py``; a family may have others (``families/nanovlm/processor.py``).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from unigen_ds.core.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[np.int64]
IGNORED = -100
"""A label: nothing is to be predicted."""
KINDS = ("text", "conversation", "images")
"""What a record is, for ``train_dataloader.overflow``."""
NUM_DIGESTED = 6
"""Columns of ``Counts`` that ``record_digest`` contains."""


class Tally:
    """Sums over the splits of one record; ``count`` makes a row of ``Counts`` of it."""

    def __init__(self, unk_id: int | None = None) -> None:
        self.unk_id = unk_id
        self.tiles = self.image_tokens = self.text_targets = self.image_targets = self.unreadable = 0
        self.images = self.unknown = self.other_targets = 0


class LoadedSplit(Protocol):
    """A split with its tensors."""

    def place(self, builder: Any, position: int) -> int:
        """Add it to the batch that ``builder`` (``Processor.builder``) makes. ``position``: the next rotary position of
        its document; returns the one after it.
        """


class Split:
    """One unit of a sample: an immutable value, small enough to keep for every sample of a window. Subclass it as a
    frozen dataclass. ``data`` calls these methods and depends on no subclass. The first four are called while the
    records are counted, for every record.
    """

    error: Any = ""
    """Why it cannot be loaded; its sample is then left out, and counted as skipped."""
    drawn: Any = False
    """Whether it is a picture that the model learns to draw: previews and metrics of pictures ask for it."""

    @property
    def num_tokens(self) -> int:
        """Its length in a sequence, at least 1. Where nothing is a token, 1 for each unit that fills a sequence."""
        raise NotImplementedError

    def count(self, tally: Tally) -> None:
        """Add its targets, and what it has of images."""

    @property
    def num_encoded(self) -> int:
        """Images that a vision tower must encode for it."""
        return 0

    @property
    def source(self) -> str:
        """The file that it is loaded from; '' where there is none."""
        return ""

    def shortened(self, num_tokens: int) -> Split | None:
        """Return at most its first ``num_tokens``, fewer than it has, without a last target that is not in them. None:
        it cannot be shortened, and is left out.
        """
        return None

    def part(self, start: int, stop: int) -> Split:
        """Tokens ``start .. stop`` of it, every target in exactly one part. Raises ``DataError`` where it has none."""
        raise DataError(
            f"a {type(self).__name__} cannot be divided", remedy="train_dataloader.overflow='skip' or 'truncate'"
        )

    @property
    def condition(self) -> str | None:
        """The kind of condition that dropout may remove (a key of ``Processor.dropout``); None: it always stays."""
        return None

    def dropped(self) -> LoadedSplit | None:
        """What replaces it where condition dropout removes it."""
        return None

    def load(self, processor: Any, key: tuple[object, ...] | None) -> LoadedSplit:
        """The split with its tensors: decoded, with its noise drawn. Every random number is keyed by ``key``; None: for
        inference, where nothing is random. Raises ``UnreadableImage`` where its sample must be left out.
        """
        raise NotImplementedError

    def pixels(self, processor: Any) -> Tensor:
        """The record's picture of a ``drawn`` split, ``[C, H, W]`` in [-1, 1]. Raises ``UnreadableImage``."""
        raise NotImplementedError

    def picture_size(self, processor: Any) -> tuple[int, int]:
        """(height, width) in pixels of the picture of a ``drawn`` split."""
        height, width = self.pixels(processor).shape[1:]
        return height, width


@dataclass(frozen=True)
class Sample:
    """One record, as splits."""

    splits: tuple[Split, ...]
    plain: bool = field(default=False, compare=False, repr=False)
    """A document, not a conversation. Not in the ``repr``, of which the digest of a user's own data set is made."""

    @property
    def num_tokens(self) -> int:
        return sum(split.num_tokens for split in self.splits)

    def truncate(self, seq_length: int) -> Sample:
        """A text is shortened, an image is kept whole or removed with all after it; the last token predicts nothing."""
        splits: list[Split] = []
        space = seq_length
        for split in self.splits:
            if split.num_tokens <= space:
                splits.append(split)
                space -= split.num_tokens
                continue
            if (first := split.shortened(space)) is not None:
                splits.append(first)
            break
        return replace(self, splits=tuple(splits))

    def part(self, start: int, stop: int) -> Sample:
        """Tokens ``start .. stop`` of a record of texts."""
        parts, first = [], 0
        for split in self.splits:
            begin, end = max(start - first, 0), min(stop - first, split.num_tokens)
            if (begin, end) == (0, split.num_tokens):
                parts.append(split)
            elif begin < end:
                parts.append(split.part(begin, end))
            first += split.num_tokens
        return replace(self, splits=tuple(parts))


def num_pieces(num_tokens: Any, seq_length: int) -> Any:
    """Pieces of a record of ``num_tokens`` (a number, or an array of them)."""
    return -(-num_tokens // seq_length)


def piece_bounds(num_tokens: Any, seq_length: int, piece: Any) -> tuple[Any, Any]:
    """First token of a piece of a record, and the first one after it. Numbers, or arrays of them. Every piece is full
    but the last; where that would be a single token (an end that predicts nothing), it gets the token before it too.
    """

    def start(number: Any) -> Any:
        single = (num_tokens % seq_length == 1) & (number == num_pieces(num_tokens, seq_length) - 1) & (seq_length > 1)
        return np.minimum(number * seq_length - single * (number > 0), num_tokens)

    return start(piece), start(piece + 1)


def unit_tokens(num_tokens: int, piece: int, seq_length: int) -> int:
    """Tokens of a drawn unit of a record of ``num_tokens``: of one of its pieces, or (-1) of the truncated record."""
    if piece < 0:
        return min(num_tokens, seq_length)
    start, stop = piece_bounds(num_tokens, seq_length, piece)
    return int(stop - start)


# --- what is known of all records ---------------------------------------------------------------------------------


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
    images: Array
    """Images, readable or not; one that is seen in two ways counts twice."""
    kind: Array
    """0 plain text, 1 a conversation of texts, 2 a record with images (``KINDS``)."""
    unknown: Array
    """Text tokens that are the tokenizer's unknown token."""
    empty_texts: Array
    """Texts (captions, questions, answers) without any character but white space."""
    other_targets: Array
    """Targets of a family's own loss terms."""

    @property
    def targets(self) -> Array:
        """[N] of every loss term."""
        return self.text_targets + self.image_targets + self.other_targets

    @classmethod
    def of(cls, rows: list[tuple[int, ...]]) -> Counts:
        table = np.asarray(rows, dtype=np.int64).reshape(-1, len(COLUMNS))
        return cls(*(np.ascontiguousarray(column) for column in table.T))

    @property
    def digest(self) -> str:
        """Changes with every length: a packing plan is a function of it."""
        return hashlib.blake2b(self.tokens.tobytes() + self.tiles.tobytes(), digest_size=16).hexdigest()


CONTENT = ("tokens", "tiles", "image_tokens", "text_targets", "image_targets", "other_targets")
"""Columns of what a sequence contains: 0 for a record that is left out."""
COLUMNS = tuple(column.name for column in fields(Counts))


def count(sample: Sample, *, unk_id: int | None = None, empty_texts: int = 0) -> tuple[int, ...]:
    """One row of ``Counts``. ``unk_id``: the tokenizer's id of unknown words, if it has one."""
    tokens, tally = 0, Tally(unk_id)
    for split in sample.splits:  # one pass: it is done for every record
        tokens += split.num_tokens
        split.count(tally)
    kind = "images" if tally.images else "text" if sample.plain else "conversation"
    return (
        tokens, tally.tiles, tally.image_tokens, tally.text_targets, tally.image_targets, tally.unreadable,
        tally.images, KINDS.index(kind), tally.unknown, empty_texts, tally.other_targets,
    )  # fmt: skip


def record_digest(content: bytes, counts: tuple[int, ...]) -> int:
    """64 bits of BLAKE2b of one record: of its bytes, and of its counts, which follow the sizes of its images."""
    digest = hashlib.blake2b(repr(counts[:NUM_DIGESTED]).encode() + content, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class TextTokenizer(Protocol):
    """What the data package needs of a tokenizer: text to ids, and five special ids."""

    bos_id: int
    eos_id: int
    pad_id: int
    image_start_id: int
    image_end_id: int

    def encode(self, text: str) -> list[int]:
        """Ids of a text that a user wrote: ordinary text, whatever it spells."""

    def decode(self, ids: list[int]) -> str:
        """Text of ids, special tokens left out."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever ``encode`` may return other ids."""
