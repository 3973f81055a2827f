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

from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from unigen_ds.data.rules import TOUCH_BITS

ImageKind = Literal["vit", "vae", "noise"]


@dataclass(frozen=True)
class TextSplit:
    """A text; ``ids`` without begin and end. ``droppable``: condition dropout may remove it."""

    ids: tuple[int, ...]
    loss: bool
    droppable: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.ids) + 2


@dataclass(frozen=True)
class TokenSplit:
    """Ids from a user's own data set; nothing is added. ``labels[i]`` is what place i predicts (-100: nothing)."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


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
        images = any(split.touched for split in self.splits if isinstance(split, (ImageSplit, TiledSplit)))
        return TOUCH_BITS["images"] * images + TOUCH_BITS["special_tokens"] * self.spells_special

    @property
    def num_tokens(self) -> int:
        return sum(split.num_tokens for split in self.splits)

    @property
    def num_tiles(self) -> int:
        """Images that a vision tower must encode."""
        images = sum(isinstance(split, ImageSplit) and split.kind != "noise" for split in self.splits)
        return images + sum(split.num_tiles for split in self.splits if isinstance(split, TiledSplit))

    def truncated(self, seq_length: int) -> Sample:
        """Cut to ``seq_length`` tokens: a text is shortened, an image stays whole or goes with all that follows."""
        kept: list[Split] = []
        left = seq_length
        for split in self.splits:
            if split.num_tokens <= left:
                kept.append(split)
                left -= split.num_tokens
                continue
            if isinstance(split, TextSplit) and left > 2:
                kept.append(TextSplit(split.ids[: left - 2], split.loss, split.droppable))
            elif isinstance(split, TokenSplit) and left > 0:
                kept.append(TokenSplit(split.ids[:left], split.labels[:left]))
            break
        return Sample(tuple(kept))


class TextTokenizer(Protocol):
    """What the data wing needs of a tokenizer: text to ids, and five special ids."""

    bos_id: int
    eos_id: int
    pad_id: int
    image_start_id: int
    image_end_id: int

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Text of ids, special tokens left out."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes whenever ``encode`` may give other ids."""
        ...
