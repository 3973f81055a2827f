"""Ids of words that were tokenized before: a text of known words costs a tenth of what the tokenizer needs for it.

Only for tokenizers that never join a word with what comes before its space, which their own settings
show (``divides_at_spaces``), and only for texts of ASCII whose white space is single spaces between words. There the
ids of a text are those of its first word, then those of each other word with its space. All other texts are tokenized
as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

_MOST_WORDS = 1 << 16
"""That are kept: about 15 MB. Then all are forgotten."""
_LONGEST = 40
"""Characters of a word that is kept."""
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = tuple(_LETTERS + digits + _OTHERS for digits in (r"\p{N}", r"\p{N}{1,3}"))
"""Of Qwen2 and of Llama 3: a space is the first character of what it is joined with, as in GPT-2's own pattern."""
_BYTES = {"type": "ByteLevel", "add_prefix_space": False}
_DIVIDING: tuple[list[dict[str, Any]], ...] = (
    [{"type": "Whitespace"}],
    [{**_BYTES, "use_regex": True}],
    [{"type": "Digits", "individual_digits": True}, {**_BYTES, "use_regex": True}],
    *(
        [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
         {**_BYTES, "use_regex": False}]
        for pattern in _PATTERNS
    ),
)  # fmt: skip
"""Steps before the vocabulary, each with what decides where words are divided."""


def divides_at_spaces(backend: Any) -> bool:
    """Whether a tokenizer (of ``tokenizers``) divides each text before a single space, and does nothing across it."""
    if getattr(backend.model, "dropout", None):
        return False
    if backend.normalizer is not None and _state(backend.normalizer) != {"type": "NFC"}:  # which changes no ASCII
        return False
    tokens = backend.get_added_tokens_decoder().values()
    if any(" " in token.content or token.lstrip or token.rstrip for token in tokens):
        return False
    if backend.pre_tokenizer is None:
        return False
    state = _state(backend.pre_tokenizer)
    steps = state["pretokenizers"] if state.get("type") == "Sequence" else [state]
    return any(
        len(known) == len(steps)
        and all({key: step.get(key) for key in one} == one for one, step in zip(known, steps, strict=True))
        for known in _DIVIDING
    )


def _state(part: Any) -> dict[str, Any]:
    """Settings of one part of a tokenizer."""
    return dict(json.loads(part.__getstate__()))


class WordMemo:
    """Ids of words, with and without a space before them.

    Args:
        encode: ids of each of some texts.
    """

    def __init__(self, encode: Callable[[Sequence[str]], list[list[int]]]) -> None:
        self._encode = encode
        self._first: dict[str, list[int]] = {}
        self._later: dict[str, list[int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy, in this process or in another one, begins without words."""
        return {"_encode": self._encode, "_first": {}, "_later": {}}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each, as those of ``encode``."""
        found = [self._known(text) for text in texts]
        if None in found:
            self._learn([text for text, ids in zip(texts, found, strict=True) if ids is None])
            found = [self._known(text) if ids is None else ids for text, ids in zip(texts, found, strict=True)]
        rest = iter(self._encode([text for text, ids in zip(texts, found, strict=True) if ids is None]))
        return [next(rest) if ids is None else ids for ids in found]

    def _known(self, text: str) -> list[int] | None:
        """None: it has a word that is not known, or is no text of single spaces."""
        words = text.split(" ")
        try:
            first = self._first[words[0]]
            return [*first, *chain.from_iterable(map(self._later.__getitem__, words[1:]))]
        except KeyError:
            return None

    def _learn(self, texts: Sequence[str]) -> None:
        """The words of those texts that may be divided."""
        first, later = dict[str, None](), dict[str, None]()
        for text in texts:
            words = text.split(" ")
            if not text.isascii() or words != text.split() or max(map(len, words)) > _LONGEST:
                continue
            first[words[0]] = None
            later |= dict.fromkeys(words[1:])
        for known, unknown, space in ((self._first, first, ""), (self._later, later, " ")):
            new = [word for word in unknown if word not in known][:_MOST_WORDS]
            if len(known) + len(new) > _MOST_WORDS:
                known.clear()
            known.update(zip(new, self._encode([space + word for word in new]), strict=True))
