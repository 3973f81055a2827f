"""Texts of users that spell a special token (``<|im_end|>``, ``<image>``): encoded as the ordinary text they are.

Otherwise a record could forge a turn of its conversation, an image, or its own end. Only what users wrote is protected:
the tokens of a chat template and of an image stay. A text without such a spelling is encoded as usual.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from unigen_ds.core.errors import DataError

_PRIVATE = range(0xF0000, 0xFFFFE)
"""Unicode's private use: characters that mean nothing by themselves."""


class Special:
    """The special tokens of a fast tokenizer of transformers.

    Args:
        tokenizer: the tokenizer.
        names: further tokens that control a sequence, special by their entry in the tokenizer or not.
    """

    def __init__(self, tokenizer: Any, names: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        spelled = {token.content: number for number, token in added.items() if token.special}
        spelled |= {name: tokenizer.convert_tokens_to_ids(name) for name in names}
        self._ids = spelled
        self._forbidden = {number for number in spelled.values() if number != tokenizer.unk_token_id}
        longest_first = sorted(map(re.escape, spelled), key=len, reverse=True)
        self._pattern = re.compile("|".join(longest_first))
        self._splits_by_zero = not any("\0" in name for name in spelled)

    @property
    def ids(self) -> frozenset[int]:
        """Of the special tokens."""
        return frozenset(self._ids.values())

    def spelled(self, text: str) -> bool:
        """Whether ``text`` spells a special token."""
        return self._pattern.search(text) is not None

    def spelled_in(self, texts: Sequence[str]) -> list[str]:
        """Those that spell a special token; one search where none does."""
        if not self._splits_by_zero or self.spelled("\0".join(texts)):
            return [text for text in texts if self.spelled(text)]
        return []

    def encode(self, text: str) -> list[int]:
        """Ids of ``text`` as ordinary text, whatever it spells."""
        return self._ordinary(text)[0]

    def _ordinary(self, text: str) -> tuple[list[int], list[int]]:
        """Ids of a text without special tokens, and where each begins."""
        encoded = self._tokenizer(
            text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True
        )
        ids = list(encoded["input_ids"])
        if self._forbidden.isdisjoint(ids):
            return ids, [start for start, _ in encoded["offset_mapping"]]
        # the vocabulary itself, or an added token that is not marked special, has the spelling: split into characters
        edges = {p for match in self._pattern.finditer(text) for p in range(match.start(), match.end() + 1)}
        bounds = sorted({0, len(text), *edges})
        ids, starts = [], []
        for first, last in zip(bounds, bounds[1:], strict=False):
            found = self._tokenizer(text[first:last], add_special_tokens=False, split_special_tokens=True)["input_ids"]
            if not self._forbidden.isdisjoint(found):
                raise DataError(f"the tokenizer can only encode {text[first:last][:60]!r} as a special token")
            ids += found
            starts += [first] * len(found)
        return ids, starts

    def shield(self, texts: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """The texts with a character that none of them has in place of each spelling, and the spelling of each."""
        spellings = sorted({match for text in texts for match in self._pattern.findall(text)})
        if not spellings:
            return list(texts), {}
        present = set("".join(texts))
        free = (chr(code) for code in _PRIVATE if chr(code) not in present)
        signs = dict(zip(spellings, free, strict=False))
        shielded = [self._pattern.sub(lambda match: signs[match.group()], text) for text in texts]
        return shielded, {sign: spelling for spelling, sign in signs.items()}

    def encode_shielded(self, text: str, signs: Mapping[str, str]) -> tuple[list[int], list[int]]:
        """Ids of a rendered chat, and where in ``text`` each begins: its own special tokens stay, not shielded ones."""
        ids: list[int] = []
        starts: list[int] = []
        done = 0
        for match in [*self._pattern.finditer(text), None]:
            segment = text[done : match.start() if match else len(text)]
            if segment:
                widths = [len(signs.get(character, " ")) for character in segment]
                offsets = [0, *accumulate(widths)]
                found, begins = self._ordinary("".join(signs.get(character, character) for character in segment))
                ids += found
                starts += [done + min(bisect_right(offsets, begin), len(segment)) - 1 for begin in begins]
            if match:
                ids.append(self._ids[match.group()])
                starts.append(match.start())
                done = match.end()
        return ids, starts
