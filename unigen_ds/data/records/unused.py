"""Keys of a record that no turn is made of, though a layout has them: counted for each source, never dropped silently.

A record with the keys of two layouts is read by the first one (``records.layout_of``); what it has of the other is in
the log and in ``tools/inspect_data.py``. Keys that belong to no layout (``id``, ``source``) are not looked at, nor are
values that are null or empty. What a record has is one number: the layout, and a bit for each key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unigen_ds.data.records.chat_records import image_key
from unigen_ds.data.records.records import Layout, drawn_key, layout_of, several

Array = NDArray[np.int64]
_TITLES = {
    "conversations": "a record of `conversations`",
    "text_prompt": "a record of `text_prompt` and `image_path`",
    "text": "an image with its `text`",
    "document": "a document of `text`",
    "messages": "a record of `messages`",
    "texts": "a record of `texts`",
    "image_list": "a record of `image_list`",
    "instruction": "a record of `instruction`",
    "caption": "an image with its caption",
}
"""What messages call a record of each layout. Only added to: positions are part of the index."""
_LAYOUTS = tuple(_TITLES)
BESIDE_JSON = "another `caption` or `text` in the .json"
SECOND_TEXT = "a second text (.txt before .caption, before .text)"
IMAGE_BESIDE_JSON = "an image that the .json does not name"
WEIGHT = "a `weight` in a turn of role and type"
_KEYS = (
    "conversations", "text_prompt", "image_path", "image", "images", "text", "messages", "texts", "image_list",
    "instruction_list", "instruction", "input_image", "input_images", "output_image", "output_images", "caption",
    "captions", "file_name", "system", "tools", BESIDE_JSON, SECOND_TEXT, IMAGE_BESIDE_JSON,
    WEIGHT,
)  # fmt: skip
"""All of the layouts, and what a source itself leaves out (``FoundRecord.unused``). Only added to, as ``_LAYOUTS``."""
_ALL = frozenset(_KEYS[:-4])
_OF_CHATS = frozenset(("system", "tools"))
_SHIFT = 8
"""The bit of the first key; below it is the layout, from 1."""


class UnusedKey(NamedTuple):
    """Records of a source that are read by one layout and have a key that it does not use."""

    layout: str
    key: str
    records: int

    @property
    def text(self) -> str:
        key = self.key if "`" in self.key or " " in self.key else f"`{self.key}`"
        return f"{key}, which {_TITLES[self.layout]} does not use"


def unused_keys(record: Mapping[str, Any], layout: Layout, beside: Sequence[str] = ()) -> int:
    """0 where all is used. ``record``: with the names of the layouts; ``beside``: of ``_KEYS``, what its source left
    out of it.
    """
    if record.get("conversations") and _weighs(record["conversations"]):
        beside = (*beside, WEIGHT)
    if not beside and _complete(tuple(record)):
        return 0
    name = layout_of(record, layout.captions)
    left = _ALL.intersection(record).difference(_used(record, name))
    found = [key for key in left if record[key] not in (None, "", []) and not _in_turns(record, key)]
    if not (found or beside) or not name:
        return 0
    return 1 + _LAYOUTS.index(name) + sum(1 << _SHIFT + _KEYS.index(key) for key in (*found, *beside))


def _weighs(turns: Any) -> bool:
    """Whether an answer has a ``weight`` other than 1, which turns of role and type do not have."""
    each = (turn for turn in turns if isinstance(turn, Mapping) and "weight" in turn and "from" not in turn)
    return any(turn["weight"] not in (None, 1) and turn.get("role") != "user" for turn in each)


def _in_turns(record: Mapping[str, Any], key: str) -> bool:
    """Whether turns name all images of ``image`` or ``images``, as those of a sample of a tar do."""
    turns = record.get("conversations")
    if key not in ("image", "images") or not isinstance(turns, list):
        return False
    named = [turn.get("image_path") for turn in turns if isinstance(turn, Mapping)]
    return all(image in named for image in (record[key] if isinstance(record[key], list) else [record[key]]))


_COMPLETE = frozenset(map(frozenset, (
    {"conversations"}, {"text"}, {"messages"}, {"messages", "images"}, {"texts", "images"},
    {"text_prompt", "image_path"}, {"image", "caption"}, {"image", "captions"},
    {"image_list", "instruction_list"}, {"instruction", "input_images", "output_images"},
)))  # fmt: skip


@lru_cache(4096)
def _complete(keys: tuple[str, ...]) -> bool:
    """Whether a record of these keys uses all of them, whatever their values: those of most data sets."""
    return _ALL.intersection(keys) in _COMPLETE


def _used(record: Mapping[str, Any], layout: str) -> tuple[str, ...]:
    """Keys of which its turns are made."""
    if layout == "document":
        return ("text", *_OF_CHATS)
    if layout == "conversations":
        with_images = any(isinstance(turn, Mapping) and "from" in turn for turn in record["conversations"][:1])
        return ("conversations", image_key(record)) if with_images else ("conversations",)
    if layout in ("messages", "texts"):
        return (layout, image_key(record))
    if layout == "text_prompt":
        return ("text_prompt", drawn_key(record), *_OF_CHATS)
    if layout == "text":
        return ("text", "image", *_OF_CHATS)
    if layout == "image_list":
        return ("image_list", "instruction_list", *_OF_CHATS)
    if layout == "instruction":
        return ("instruction", several(record, "input_image"), several(record, "output_image"), *_OF_CHATS)
    return ("image", "captions" if "captions" in record else "caption", *_OF_CHATS)


def unused_of(codes: Array) -> list[UnusedKey]:
    """What the records of a source do not use, most records first. ``codes`` [N]: ``unused_keys`` of each."""
    found: dict[tuple[str, str], int] = {}
    for code, number in zip(*map(np.ndarray.tolist, np.unique(codes, return_counts=True)), strict=True):
        for name in _decoded(code):
            found[name] = found.get(name, 0) + number
    return sorted((UnusedKey(*name, number) for name, number in found.items()), key=lambda one: -one.records)


def with_unused(codes: Array, one: UnusedKey) -> Array:
    """Numbers of the records that ``one`` counts."""
    known, inverse = np.unique(codes, return_inverse=True)
    has = np.array([one[:2] in _decoded(int(code)) for code in known], dtype=bool)
    return np.flatnonzero(has[inverse])


def _decoded(code: int) -> Iterator[tuple[str, str]]:
    for bit, key in enumerate(_KEYS):
        if code >> _SHIFT + bit & 1:
            yield _LAYOUTS[(code & (1 << _SHIFT) - 1) - 1], key


def unused_line(found: Sequence[UnusedKey]) -> str:
    """As a sentence."""
    each = "; ".join(f"{one.records:,} records have {one.text}" for one in found)
    return f"{each}. columns={{'name': 'other'}} renames a key, so that another layout is read"
