"""Data of the models with pictures: of several sizes, uneven on purpose, some records without anything to learn.

Of nine records three are texts, so that a micro-batch may hold no image; others have no text target, so that one may
hold none: an image is drawn there, or the answer comes after ``seq_length`` tokens and is cut off.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.data.support import image, picture, talk, text, write_jsonl
from tests.data.text.chat_support import character_tokenizer

NUM_RECORDS = 72
"""Nine updates of 8 sequences an epoch."""
LONGEST = 112
"""``seq_length`` of the talks."""


def write_drawings(folder: Path) -> Path:
    """For ``UnifiedModel``: texts, images to draw, to describe and to edit, of three sizes."""
    sizes = ((8, 8), (16, 8), (12, 16))
    names = [picture(folder / f"{i}.png", width, height, seed=i).name for i, (width, height) in enumerate(sizes)]
    words = ("zero", "one", "two", "three", "four")

    def record(i: int) -> Any:
        one, two, word = names[(i + i // 9) % 3], names[(i + i // 9 + 1) % 3], words[i % 5]
        spoken = " ".join([word] * (1 + i % 7))
        return (
            talk(text("user", f"this is {word}"), text("assistant", spoken)),
            {"text_prompt": f"draw a handwritten {word}", "image_path": one},
            talk(image("user", one), text("assistant", spoken)),
            talk(text("user", "a"), text("assistant", spoken)),
            {"text_prompt": f"draw {word}", "image_path": two},
            talk(image("user", one), text("user", f"draw {word}"), image("assistant", two)),
            talk(text("user", word), text("assistant", f"this is {spoken}")),
            {"text_prompt": f"a {word}", "image_path": one},
            talk(image("user", two), image("user", one), text("assistant", word)),
        )[i % 9]

    return write_jsonl(folder / "mixed.jsonl", [record(i) for i in range(NUM_RECORDS)])


def write_talks(folder: Path) -> Path:
    """For ``VLM``: conversations about one, three, five or no tiles; its tokenizer; ``texts.jsonl``: those of none."""
    character_tokenizer().save_pretrained(folder / "tokenizer")
    sizes = ((12, 14), (32, 16), (30, 32))
    names = [picture(folder / f"{i}.png", width, height, seed=i).name for i, (width, height) in enumerate(sizes)]
    words = ("red", "blue and dark", "a", "not so dark", "green")
    endless = "which one is it " * (LONGEST // 16 + 1)

    def record(i: int) -> Any:
        name, word = names[(i + i // 9) % 3], words[i % 5]
        return (
            talk(text("user", "hi"), text("assistant", word * (1 + i % 3))),
            talk(image("user", name), text("user", "?"), text("assistant", word)),
            talk(text("user", endless), text("assistant", word)),
            talk(text("user", word), text("assistant", "yes")),
            talk(image("user", name), text("assistant", word)),
            talk(text("user", f"{word} {endless}"), text("assistant", word)),
            talk(text("user", "and?"), text("assistant", f"{word}, {word}")),
            talk(image("user", name), text("user", "so?"), text("assistant", "no")),
            talk(image("user", name), text("user", endless), text("assistant", word)),
        )[i % 9]

    write_jsonl(folder / "texts.jsonl", [record(9 * i + k) for i in range(NUM_RECORDS // 9) for k in (0, 2, 3, 5, 6)])
    return write_jsonl(folder / "mixed.jsonl", [record(i) for i in range(NUM_RECORDS)])
