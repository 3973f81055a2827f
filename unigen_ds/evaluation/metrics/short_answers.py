"""Metrics of short answers: exact match, and VQA accuracy, which is how many people answered as the model did."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Literal

from unigen_ds.config.registry import METRICS
from unigen_ds.evaluation.metrics.base import TextMetric

_ARTICLES = re.compile(r"\b(a|an|the)\b")


@METRICS.register_module()
class ExactMatch(TextMetric):
    """The share of predictions that equal a reference, 0 to 1.

    Args:
        normalize: ``none`` compares the texts as they are; ``squad`` first removes case, punctuation, English articles
            and repeated spaces, as the official script of SQuAD does (Rajpurkar et al., EMNLP 2016).
    """

    name = "exact_match"

    def __init__(self, *, normalize: Literal["none", "squad"] = "none") -> None:
        super().__init__(normalize=normalize)
        self._normal = _squad if normalize == "squad" else str

    def row(self, prediction: str, references: Sequence[str]) -> Sequence[float]:
        return [float(self._normal(prediction) in map(self._normal, references))]


def _squad(text: str) -> str:
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(_ARTICLES.sub(" ", plain).split())


_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_NUMBER = {"none": "0", **{word: str(n) for n, word in enumerate(_NUMBERS)}}
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
class VQAAccuracy(TextMetric):
    """Accuracy of answers to questions about images, 0 to 1 (Antol et al., "VQA", ICCV 2015).

    An answer that n people have counts min(n / 3, 1), as the mean over all ways to leave one person out. Answers are
    normalized first as the evaluation server does it: lower case, no punctuation and articles, numbers as digits,
    apostrophes. A single reference (no list) counts 1 where it is equal.
    """

    name = "vqa_accuracy"

    def __init__(self) -> None:
        super().__init__()

    def row(self, prediction: str, references: Sequence[str]) -> Sequence[float]:
        return [vqa_accuracy(prediction, references)]


def vqa_accuracy(answer: str, people: Sequence[str]) -> float:
    """Return the accuracy of one answer against those of several people.

    With n equal ones of k: leaving out an equal one (n of k ways) leaves n - 1, any other leaves n.
    """
    own = normalized(answer)
    number, of = sum(normalized(one) == own for one in people), len(people)
    if of == 1:
        return float(number)
    return (number * min((number - 1) / 3, 1.0) + (of - number) * min(number / 3, 1.0)) / of


def normalized(answer: str) -> str:
    """An answer as the evaluation server compares it (the processor of EvalAI, published with Pythia and lmms-eval)."""
    text = answer.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()
    text = text.replace("\n", " ").replace("\t", " ").strip()
    plain = text
    for mark in _PUNCTUATION:
        touches_space = f"{mark} " in text or f" {mark}" in text or _THOUSANDS.search(text) is not None
        plain = plain.replace(mark, "" if touches_space else " ")
    words = [_NUMBER.get(word, word) for word in _PERIOD.sub("", plain).lower().split()]
    return " ".join(_CONTRACTIONS.get(word, word) for word in words if word not in ("a", "an", "the"))
