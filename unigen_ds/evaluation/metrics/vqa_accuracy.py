"""The accuracy of VQA: how many people answered as the model did."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from unigen_ds.core.registry import METRICS
from unigen_ds.evaluation.metrics.base import Metric, text_pairs

_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_NUMBER = {"none": "0", **{word: str(n) for n, word in enumerate(_NUMBERS)}}
_ARTICLES = frozenset(("a", "an", "the"))
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_PERIOD = re.compile(r"(?!<=\d)\.(?!\d)")
_THOUSANDS = re.compile(r"(?<=\d),+(?=\d)")
_WITHOUT_APOSTROPHE = """
ain't aren't can't could've couldn't didn't doesn't don't hadn't hasn't haven't he'd he's how'd how'll how's
isn't  it'd it'll ma'am mightn't might've mustn't must've needn't not've o'clock oughtn't shan't should've
shouldn't that's  there'd there're there's they'd they'll they're they've wasn't we've weren't what'll what're
what's what've when's  where'd where's where've who'd who'll who's who've why'll why're why's won't would've
wouldn't y'all you'd you'll  you're you've somebody'll somebody's someone'd someone'll someone's something'd
something'll
"""
_WITH_HAVE = """
couldn't hadn't he'd it'd mightn't she'd shouldn't somebody'd someone'd something'd there'd they'd we'd who'd
wouldn't you'd
"""
_CONTRACTIONS = {
    **{word.replace("'", ""): word for word in _WITHOUT_APOSTROPHE.split()},
    **{f"{word}ve": f"{word}'ve" for word in _WITH_HAVE.split()},
    **{word.replace("'", "") + "'ve": f"{word}'ve" for word in _WITH_HAVE.split()},
    **dict.fromkeys(("yall'll", "y'allll"), "y'all'll"),
    **dict.fromkeys(("yall'd've", "y'alld've", "y'all'dve"), "y'all'd've"),
    "twas": "'twas",
    "somebody'd": "somebodyd",
    "'ows'at": "'ow's'at",
}
"""Of the server's processor, its spelling of the last one included; forms that it cannot meet are left out."""


@METRICS.register_module()
class VQAAccuracy(Metric):
    """Accuracy of answers to questions about images, 0 to 1 (Antol et al., "VQA", ICCV 2015).

    An answer that n people have counts min(n / 3, 1), as the mean over all ways to leave one person out. Answers are
    normalized first as the evaluation server does it: lower case, no punctuation and articles, numbers as digits,
    apostrophes. A single reference (no list) counts 1 where it is equal.
    """

    name = "vqa_accuracy"

    def __init__(self) -> None:
        super().__init__()

    def rows(self, predictions: Sequence[Any], references: Sequence[Any], keys: Sequence[str]) -> Sequence[Any]:
        return [[vqa_accuracy(one, several)] for one, several in text_pairs(predictions, references, keys)]

    def values(self, table: np.ndarray) -> dict[str, float]:
        return {self.name: float(table.mean())}


def vqa_accuracy(answer: str, given: Sequence[str]) -> float:
    """Of one answer against those of several people.

    With n equal ones of k: leaving out an equal one (n of k ways) leaves n - 1, any other leaves n.
    """
    own = normalized(answer)
    number, of = sum(normalized(one) == own for one in given), len(given)
    if of == 1:
        return float(number)
    return (number * min((number - 1) / 3, 1.0) + (of - number) * min(number / 3, 1.0)) / of


def normalized(answer: str) -> str:
    """An answer as the evaluation server compares it (the processor of EvalAI, published with Pythia and lmms-eval)."""
    text = answer.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()
    text = text.replace("\n", " ").replace("\t", " ").strip()
    found = text
    for mark in _PUNCTUATION:
        touches_space = f"{mark} " in text or f" {mark}" in text or _THOUSANDS.search(text) is not None
        found = found.replace(mark, "" if touches_space else " ")
    words = [_NUMBER.get(word, word) for word in _PERIOD.sub("", found).lower().split()]
    return " ".join(_CONTRACTIONS.get(word, word) for word in words if word not in _ARTICLES)
