"""A record -> turns of a conversation. Every layout of a record is here, whatever kind of file it was read from.

Also mixed in one file; ``docs/data.md`` shows an example of each::

    {conversations: [{role, type: text | image, content | image_path}]}
    {text_prompt, image_path}                                  user text, then an assistant image
    {text}                                                     a document: all of it is learnt
    {image, conversations: [{from, value}]}                    LLaVA, ShareGPT
    {messages: [{role, content: text or parts}], images}       OpenAI
    {images, texts: [{user, assistant}]}                       nanoVLM
    {image, caption}, {image, captions}                        an image with its text, or several to choose from
    {image_list, instruction_list}                             BAGEL's edits
    {instruction, input_images, output_images}                 edits of several images, and sequences of images

In LLaVA's each ``<image>`` of a human turn means the next of the record's images, and so it does in ``messages`` of a
record with ``images``. Elsewhere it is text like any other. An image is a path or a ``StoredImage``. A malformed record
is a ``DataError`` that names file, line and field.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from unigen_ds.core.errors import DataError, close
from unigen_ds.data.records.chat_records import (
    is_llava,
    listed_images,
    llava_turns,
    nanovlm_turns,
    openai_turns,
    typed_turn,
)
from unigen_ds.data.records.ratings import well_rated
from unigen_ds.data.records.record_values import image_path, key_names, text_value, wrong
from unigen_ds.data.records.turn import PLACEHOLDER, Turn

Captions = Literal["generate", "understand"]


@dataclass(frozen=True)
class Layout:
    """How the records of a data set are read."""

    image_root: Path | None = None
    """The folder of relative image paths."""
    captions: Captions | None = None
    """As of ``parse_record``."""
    columns: tuple[tuple[str, str], ...] = ()
    """(key of the file, key of the layout): a record's keys that have other names."""
    ratings: tuple[tuple[str, int], ...] = ()
    """(name of ``RATINGS``, the least that is kept): questions that are left out of nanoVLM's rows."""
    folders: bool = False
    """Whether a record's images are in the folder of its own data file; else ``image_root`` is that of all records."""

    def at(self, folder: Path | None) -> Layout:
        """For a record whose data file is in ``folder``; None: in that of the first file."""
        return replace(self, image_root=folder) if folder is not None and self.folders else self

    def named(self, record: Mapping[str, Any], where: object) -> Mapping[str, Any]:
        """``record`` with the keys of the layouts. Raises ``DataError`` where it has none of a given name."""
        missing = [given for given, _ in self.columns if given not in record]
        if missing:
            raise DataError(
                f"{where}: columns names {', '.join(missing)}, and the record has: {key_names(record)}",
                remedy=_other_columns(missing, dict(self.columns), record),
            )
        new = {name: record[given] for given, name in self.columns}
        renamed = {given for given, _ in self.columns}
        return {**{key: value for key, value in record.items() if key not in renamed}, **new}

    def turns(self, record: Mapping[str, Any], where: object) -> list[Turn]:
        """Those of a record, as its file has it."""
        if self.columns:  # a call less for every record
            record = self.named(record, where)
        if self.ratings:
            record = well_rated(record, self.ratings, where)
        return parse_record(record, where, image_root=self.image_root, captions=self.captions)

    @property
    def facts(self) -> tuple[object, ...]:
        """What changes a record, apart from the folder; nothing where all is as it always was."""
        facts: tuple[object, ...] = (self.captions, self.columns) if self.captions is not None or self.columns else ()
        return (*facts, ("ratings", *self.ratings)) if self.ratings else facts


def parse_record(
    record: Mapping[str, Any], where: object, *, image_root: Path | None = None, captions: Captions | None = None
) -> list[Turn]:
    """The turns of a record. ``where`` begins every error; relative image paths are put under ``image_root``.

    ``captions``: what an image with a text teaches: ``generate`` (text, then the image; also None) or ``understand``.
    None: ``{image, text}`` is a document, as it always was in JSON.
    """
    layout = layout_of(record, captions)
    if layout == "document":
        return [Turn("assistant", "text", text_value(record, "text", "text", where))]
    if layout == "conversations":
        turns = record["conversations"]
        if not isinstance(turns, list) or not turns:
            raise wrong(where, "conversations", turns, "a list of at least one turn")
        if is_llava(turns):
            return list(llava_turns(record, turns, where, image_root))
        return [typed_turn(turn, f"conversations[{i}]", where, image_root) for i, turn in enumerate(turns)]
    if layout == "text_prompt":
        prompt = text_value(_having(record, "text_prompt", where), "text_prompt", "text_prompt", where)
        key = drawn_key(record)
        return _captioned(prompt, image_path(_having(record, key, where)[key], key, where, image_root), captions)
    if layout == "text":
        text = text_value(record, "text", "text", where)
        return _captioned(text, image_path(record["image"], "image", where, image_root), captions)
    if layout == "messages":
        return openai_turns(record, where, image_root)
    if layout == "texts":
        return nanovlm_turns(record, where, image_root)
    if layout == "image_list":
        return _edits(record, where, image_root)
    if layout == "instruction":
        return _instructed(record, where, image_root)
    if layout == "caption":
        image = image_path(_having(record, "image", where)["image"], "image", where, image_root)
        return _captioned(_caption(record, where), image, captions)
    if "texts" in record:
        raise wrong(where, "texts", record["texts"], "nanoVLM's list of {user, assistant}; a document is {text}")
    raise DataError(
        f"{where}: conversations is missing (the record has: {key_names(record) or 'nothing'})",
        allowed="{conversations: [...]}, {text_prompt, image_path}, {text}, LLaVA's {image, conversations},"
        " {messages}, {images, texts}, {image, caption}, {image, captions}, {image_list, instruction_list} or"
        " {instruction, input_images, output_images}",
        remedy=other_delimiter(list(record))
        or _renamed(record, _FIRST_KEYS)
        or "other names: columns={'name in the file': 'text'}",
    )


_FIRST_KEYS = (
    "conversations", "text_prompt", "image_path", "text", "messages", "texts", "caption", "captions", "image_list",
    "instruction", "output_image", "output_images",
)  # fmt: skip
"""Keys by which a layout is recognised."""


def _having(record: Mapping[str, Any], key: str, where: object) -> Mapping[str, Any]:
    """``record``. Raises ``DataError`` with its keys where it has none of that name, or null."""
    if record.get(key) is None:
        what = "null" if key in record else "missing"
        raise DataError(
            f"{where}: {key} is {what} (the record has: {key_names(record)})",
            allowed="the path of an image" if key.startswith("image") else "a text",
            remedy=None if key in record else _renamed(record, (key,)),
        )
    return record


def _renamed(record: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    """The setting that reads a key of the record as the one of ``keys`` that it is probably meant to be."""
    pairs = [(str(given), near) for given in record if given not in keys and (near := close(str(given), keys))]
    return f"did you mean {pairs[0][1]!r}? columns={{{pairs[0][0]!r}: {pairs[0][1]!r}}} reads it so" if pairs else None


def _other_columns(missing: Sequence[str], columns: Mapping[str, str], record: Mapping[str, Any]) -> str:
    """What was probably meant by the names of ``columns`` that a record does not have."""
    if all(columns[given] in record for given in missing):
        turned = {name: given for given, name in columns.items()}
        return f"the name in the file comes first: columns={turned!r}"
    near = [(given, found) for given in missing if (found := close(given, map(str, record)))]
    more = f"; did you mean {near[0][1]!r} by {near[0][0]!r}?" if near else ""
    return f"columns={{'name in the file': 'key of a layout'}}{more}"


def other_delimiter(names: Sequence[str]) -> str | None:
    """The setting for a CSV file whose names are one cell, because something else than a comma is between them."""
    signs = [sign for sign in (";", "\t", "|") if len(names) == 1 and sign in str(names[0])]
    return f"format=dict(type='csv', delimiter={signs[0]!r})" if signs else None


def layout_of(record: Mapping[str, Any], captions: Captions | None) -> str:
    """The layout by which a record is read: the first that it has, in this order. '' where it has none.

    ``captions``: as of ``parse_record``.
    """
    if "conversations" in record:
        return "conversations"
    if "text_prompt" in record or "image_path" in record:
        return "text_prompt"
    if "text" in record:
        return "text" if captions is not None and record.get("image") is not None else "document"
    if "messages" in record:
        return "messages"
    if isinstance(record.get("texts"), list):
        return "texts"
    if "image_list" in record:
        return "image_list"
    if "instruction" in record and ("output_images" in record or "output_image" in record):
        return "instruction"
    return "caption" if "caption" in record or "captions" in record else ""


def drawn_key(record: Mapping[str, Any]) -> str:
    """Of the image that is drawn from a ``text_prompt``."""
    return "image" if "image_path" not in record and "image" in record else "image_path"


def several(record: Mapping[str, Any], key: str) -> str:
    """``key`` with an s where the record has that: ``output_images`` before ``output_image``."""
    return f"{key}s" if f"{key}s" in record else key


def _captioned(text: str, image: str, captions: Captions | None) -> list[Turn]:
    if captions == "understand":
        return [Turn("user", "image", image), Turn("assistant", "text", text)]
    return [Turn("user", "text", text), Turn("assistant", "image", image)]


def _caption(record: Mapping[str, Any], where: object) -> str:
    if "captions" not in record:
        return text_value(record, "caption", "caption", where)
    texts = _alternatives(record["captions"])
    if texts is None:
        allowed = "a list of texts, or an object of texts, also as JSON in a text"
        raise wrong(where, "captions", record["captions"], allowed)
    return text_value({"captions": _chosen(texts)}, "captions", "captions", where)


def _alternatives(given: Any) -> list[Any] | None:
    """The texts of BAGEL's ``captions``; None: it is nothing of that kind."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return None
    values = list(given.values()) if isinstance(given, Mapping) else given
    return values if isinstance(values, list) and all(isinstance(one, str) for one in values) else None


def _chosen(texts: Sequence[str]) -> str:
    """One of several texts, the same each time: which one follows from the texts. '' where there is none, as in BAGEL's
    public code, which draws another one each time; lengths are planned here.
    """
    if len(texts) < 2:
        return texts[0] if texts else ""
    digest = hashlib.blake2b(json.dumps(list(texts)).encode(), digest_size=8).digest()
    return texts[int.from_bytes(digest, "little") % len(texts)]


def unused_texts(record: Mapping[str, Any]) -> int:
    """Texts of a record that it has as alternatives to the ones that are used."""
    if "captions" in record:
        return max(len(_alternatives(record["captions"]) or ()) - 1, 0)
    if "instruction_list" in record and isinstance(record["instruction_list"], list):
        return sum(max(len(one) - 1, 0) for one in record["instruction_list"] if isinstance(one, list))
    return 0


def _edits(record: Mapping[str, Any], where: object, image_root: Path | None) -> list[Turn]:
    """BAGEL's ``unified_edit``: the first image, then for each step its instruction and the image that results."""
    images, steps = record["image_list"], record.get("instruction_list")
    if not isinstance(images, list) or len(images) < 2:
        raise wrong(where, "image_list", images, "a list of at least two images")
    if not isinstance(steps, list) or len(steps) != len(images) - 1:
        raise wrong(where, "instruction_list", steps, f"a list of {len(images) - 1}: one for each image but the first")
    turns = [Turn("user", "image", image_path(images[0], "image_list[0]", where, image_root))]
    for i, step in enumerate(steps):
        field = f"instruction_list[{i}]"
        texts = [step] if isinstance(step, str) else step
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise wrong(where, field, step, "a text, or a list of texts to choose from")
        turns.append(Turn("user", "text", text_value({field: _chosen(texts)}, field, field, where)))
        image = image_path(images[i + 1], f"image_list[{i + 1}]", where, image_root)
        turns.append(Turn("assistant", "image", image))
    return turns


def _instructed(record: Mapping[str, Any], where: object, image_root: Path | None) -> list[Turn]:
    """Input images (none, one or several), an instruction, and one or several output images, each drawn after the one
    before it: edits, compositions and sequences. ``<image>`` in the instruction is the next input image; without any
    they come first.
    """
    inputs, outputs = (
        listed_images(record, several(record, key), where, image_root) for key in ("input_image", "output_image")
    )
    if not outputs:
        raise wrong(where, "output_images", record.get("output_images"), "the path of an image, or a list of them")
    pieces = text_value(record, "instruction", "instruction", where).split(PLACEHOLDER)
    if len(pieces) - 1 not in (0, len(inputs)):
        raise DataError(
            f"{where}: instruction has {len(pieces) - 1} {PLACEHOLDER} and the record has {len(inputs)} input images",
            allowed=f"one {PLACEHOLDER} for each of them, or none",
        )
    first = inputs if len(pieces) == 1 else ()
    turns = [Turn("user", "image", image) for image in first]
    for number, piece in enumerate(pieces):
        if number:
            turns.append(Turn("user", "image", inputs[number - 1]))
        text = piece if len(pieces) == 1 else piece.strip()
        if text or len(pieces) == 1:
            turns.append(Turn("user", "text", text))
    return [*turns, *(Turn("assistant", "image", image) for image in outputs)]
