"""Keys of a record that no turn is made of, though a layout has them: counted for each source, never dropped silently.

A record with the keys of two layouts is read by the first one (``records.layout_of``); what it has of the other is in
the log and in ``tools/inspect_data.py``. Keys that belong to no layout (``id``, ``source``) are not looked at, nor are
values that are null or empty. What a record has is one number: the layout, and a bit for each key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from unigen_ds.data.records.records import LAYOUTS, Layout, layout_of
from unigen_ds.data.samples.sample import Array

_NAMES = tuple(LAYOUTS)
BESIDE_JSON = "another `caption` or `text` in the .json"
IMAGE_BESIDE_JSON = "an image that the .json does not name"
_KEYS = (
    "conversations", "text_prompt", "image_path", "image", "images", "text", "messages", "texts", "image_list",
    "instruction_list", "instruction", "input_image", "input_images", "output_image", "output_images", "caption",
    "captions", "file_name", "system", "tools", BESIDE_JSON, IMAGE_BESIDE_JSON,
)  # fmt: skip
"""All of the layouts, and what a source itself leaves out (``FoundRecord.unused``). Only added to, as ``LAYOUTS``."""
_CHATS, _OF_CHATS = ("llava", "conversations", "messages", "texts"), ("system", "tools")
_SHIFT = 8
"""The bit of the first key; below it is the layout, from 1."""


def unused_keys(record: Mapping[str, Any], layout: Layout, beside: Sequence[str] = ()) -> int:
    """Return what a record has and its turns do not use, as one number; 0 where all is used.

    Args:
        record: with the names of the layouts.
        layout: how it is read.
        beside: of ``_KEYS``, what its source left out of it.
    """
    name = layout_of(record, layout.captions)
    if not name:
        return 0
    kept = {*LAYOUTS[name].keys(record), *(() if name in _CHATS else _OF_CHATS)}
    keys = [key for key in _KEYS if key in record and key not in kept and record[key] not in (None, "", [])]
    if name == "conversations":
        names = [turn.get("image_path") for turn in record["conversations"] if isinstance(turn, Mapping)]
        for key in {"image", "images"} & {*keys}:  # turns name the images of a sample of a tar
            images = record[key] if isinstance(record[key], list) else [record[key]]
            if all(image in names for image in images):
                keys.remove(key)
    every = (*keys, *beside)
    return 1 + _NAMES.index(name) + sum(1 << _SHIFT + _KEYS.index(key) for key in every) if every else 0


def unused_records(codes: Array) -> dict[str, Array]:
    """Return what the records of a source do not use, as words, and the numbers of the records; most records first.
    ``codes`` [N]: ``unused_keys`` of each record.
    """
    known, inverse = np.unique(codes, return_inverse=True)
    records = {}
    for number, name in enumerate(_NAMES, start=1):
        for bit, key in enumerate(_KEYS):
            here = ((known & (1 << _SHIFT) - 1) == number) & (known >> _SHIFT + bit & 1 == 1)
            if here.any():
                text = key if "`" in key or " " in key else f"`{key}`"
                records[f"{text}, which the layout `{name}` does not use"] = np.flatnonzero(here[inverse])
    return dict(sorted(records.items(), key=lambda one: -len(one[1])))
