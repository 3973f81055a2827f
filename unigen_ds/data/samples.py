"""A sample as splits, before any tensor exists: enough to know its length, cut it, drop parts of it, and pack it.

Token layout of a split, as in BAGEL's public packing code:

* text: ``[begin, ids..., end]``; with loss, place i predicts ``(ids + [end])[i]``; the end input itself predicts
  nothing. Causal.
* image: ``[image_start, patches..., image_end]``, one rotary position for all of it. ``vit`` (understanding) and
  ``vae`` (clean latent) are FULL and advance the position by one; ``noise`` (generation target) does not advance it.
* tokens: ids as a user's own data set gives them, with explicit labels. Causal.
* tiles: an image of a vision-language model, cut into tiles, with a token before each. Causal, as text is.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
from torch import Tensor

from unigen_ds.data.rules import CURRENT, TOUCH_BITS
from unigen_ds.data.transforms import ImageContent

ImageKind = Literal["vit", "vae", "noise"]
IGNORED = -100
"""A label: nothing is to be predicted."""
END = -1
"""As ``TextSplit.following``: the end token."""


@dataclass(frozen=True)
class TextSplit:
    """A text, or a part of one; ``ids`` without begin and end. ``droppable``: condition dropout may remove it."""

    ids: tuple[int, ...]
    loss: bool
    droppable: bool = False
    begins: bool = True
    """Whether the begin token comes first: not in a later part of a text."""
    following: int | None = None
    """None: the text ends here, with the end token. In an earlier part, which has none: what its last token predicts,
    the text's next id, ``END`` or ``IGNORED``."""

    @property
    def num_tokens(self) -> int:
        return len(self.ids) + self.begins + (self.following is None)

    @property
    def num_targets(self) -> int:
        return self.loss * max(0, self.num_tokens - (self.following in (None, IGNORED)))

    def part(self, start: int, stop: int) -> TextSplit:
        """Tokens ``start .. stop`` of a whole text, begin and end counted. Its last token predicts what follows."""
        following = (*self.ids, END)[stop - 1] if stop < self.num_tokens else None
        ids = self.ids[max(start - 1, 0) : stop - 1]
        return replace(self, ids=ids, begins=start == 0, following=following)


@dataclass(frozen=True)
class TokenSplit:
    """Ids from a user's own data set; nothing is added. ``labels[i]`` is what place i predicts (-100: nothing)."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def num_targets(self) -> int:
        return sum(label >= 0 for label in self.labels)

    def part(self, start: int, stop: int) -> TokenSplit:
        """Tokens ``start .. stop``."""
        return TokenSplit(self.ids[start:stop], self.labels[start:stop])


@dataclass(frozen=True)
class ImageSplit:
    """An image, not yet decoded. ``grid`` = (rows, columns) of patches after the transform."""

    path: str
    kind: ImageKind
    grid: tuple[int, int]
    droppable: bool = False
    error: str = ""
    """Why its header could not be read; then ``grid`` is that of the smallest image and the sample becomes a skip."""
    touched: bool = field(default=False, compare=False, repr=False)
    """Whether the rule ``images`` (``rules.py``) decodes it differently in one of its versions."""
    tensor: Tensor | None = field(default=None, compare=False, repr=False)
    """The image itself, [C, H, W] in [-1, 1], where a user's own data set gave it; ``path`` then only names it."""
    content: ImageContent | None = field(default=None, compare=False, repr=False)
    """The file, where planning has read all of it."""

    @property
    def num_tokens(self) -> int:
        return self.grid[0] * self.grid[1] + 2


@dataclass(frozen=True)
class TiledSplit:
    """An image cut into tiles (``tiles.Tiling``), not yet decoded, with all that stands between the tiles."""

    path: str
    ids: tuple[int, ...]
    """Token ids; ``image_id`` at each place that a tile's token takes, tile by tile."""
    image_id: int
    num_tiles: int
    error: str = ""
    """As of ``ImageSplit``."""
    touched: bool = field(default=False, compare=False, repr=False)
    """As of ``ImageSplit``."""
    content: ImageContent | None = field(default=None, compare=False, repr=False)
    """As of ``ImageSplit``."""

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


Split = TextSplit | TokenSplit | ImageSplit | TiledSplit


@dataclass(frozen=True)
class Sample:
    """One record, as splits."""

    splits: tuple[Split, ...]
    # the digest of a user's own data set is made of the repr, so what is added later is not part of it
    spells_special: bool = field(default=False, compare=False, repr=False)
    """Whether a text of the record spells a special token."""
    plain: bool = field(default=False, compare=False, repr=False)
    """Whether all of it is text to be learned: a document, not a conversation."""

    @property
    def touched(self) -> int:
        """``TOUCH_BITS`` of the rules that change this record in one of their versions."""
        touched = TOUCH_BITS["special_tokens"] if self.spells_special else 0
        for split in self.splits:
            if isinstance(split, (ImageSplit, TiledSplit)) and split.touched:
                return touched | TOUCH_BITS["images"]
        return touched

    @property
    def num_tokens(self) -> int:
        return sum(split.num_tokens for split in self.splits)

    @property
    def num_tiles(self) -> int:
        """Images that a vision tower must encode."""
        images = sum(isinstance(split, ImageSplit) and split.kind != "noise" for split in self.splits)
        return images + sum(split.num_tiles for split in self.splits if isinstance(split, TiledSplit))

    def truncated(self, seq_length: int, *, version: int = CURRENT.overflow) -> Sample:
        """Cut to ``seq_length`` tokens: a text is shortened, an image stays whole or goes with all that follows.

        The last token before the cut predicts nothing; in ``version`` 0 of the rule a text gets an end token there.
        """
        kept: list[Split] = []
        left = seq_length
        for split in self.splits:
            if split.num_tokens <= left:
                kept.append(split)
                left -= split.num_tokens
                continue
            if isinstance(split, TextSplit) and version == 0:
                kept += [TextSplit(split.ids[: left - 2], split.loss, split.droppable)] * (left > 2)
            elif isinstance(split, TextSplit) and left > 1:
                kept.append(replace(split.part(0, left), following=IGNORED))
            elif isinstance(split, TokenSplit) and left > 0:
                cut = split.part(0, left)
                kept.append(cut if version == 0 else replace(cut, labels=(*cut.labels[:-1], IGNORED)))
            break
        return replace(self, splits=tuple(kept))

    def part(self, start: int, stop: int) -> Sample:
        """Tokens ``start .. stop`` of a record of texts."""
        kept, first = [], 0
        for split in self.splits:
            assert isinstance(split, (TextSplit, TokenSplit)), "only texts are split"
            begin, end = max(start - first, 0), min(stop - first, split.num_tokens)
            if (begin, end) == (0, split.num_tokens):
                kept.append(split)
            elif begin < end:
                kept.append(split.part(begin, end))
            first += split.num_tokens
        return replace(self, splits=tuple(kept))


def num_pieces(num_tokens: Any, seq_length: int) -> Any:
    """Pieces of a record of ``num_tokens`` (a number, or an array of them)."""
    return -(-num_tokens // seq_length)


def piece_bounds(num_tokens: Any, seq_length: int, piece: Any) -> tuple[Any, Any]:
    """First token of a piece of a record, and the first one after it. Numbers, or arrays of them.

    Every piece is full but the last; where that would be a single token (an end that predicts nothing), it gets the
    token before it too.
    """

    def start(number: Any) -> Any:
        single = (num_tokens % seq_length == 1) & (number == num_pieces(num_tokens, seq_length) - 1) & (seq_length > 1)
        return np.minimum(number * seq_length - single * (number > 0), num_tokens)

    return start(piece), start(piece + 1)


class TextTokenizer(Protocol):
    """What the data wing needs of a tokenizer: text to ids, and five special ids."""

    bos_id: int
    eos_id: int
    pad_id: int
    image_start_id: int
    image_end_id: int

    def encode(self, text: str) -> list[int]:
        """Ids of a text that a user wrote: ordinary text, whatever it spells.

        A tokenizer whose texts can spell a special token also has ``spells_special(text) -> bool`` and
        ``encode_unprotected(text)``, as ``tokenizers.py``.
        """
        ...

    def decode(self, ids: list[int]) -> str:
        """Text of ids, special tokens left out."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes whenever ``encode`` may give other ids."""
        ...
