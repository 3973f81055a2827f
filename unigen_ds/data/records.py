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

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from unigen_ds.core.errors import DataError, close
from unigen_ds.data.stored_image import StoredImage

Captions = Literal["generate", "understand"]
Role = Literal["user", "assistant", "system"]
PLACEHOLDER = "<image>"
_UNCHANGED = re.compile(r"[^/.][^/]*(?:/[^/.][^/]*)*")
"""Relative paths that pathlib leaves as they are."""
RATINGS = ("relevance", "image_correspondence", "visual_dependency", "formatting")
"""nanoVLM's ratings of a question and its answer; a record has them as ``relevance_ratings`` and so on."""
_ROLES: dict[str, Role] = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "system": "system",
}


class Turn(NamedTuple):
    """One text or one image of a conversation. ``role`` is user, assistant or system."""

    role: Role
    kind: Literal["text", "image"]
    value: str
    """The text, or the path of the image; one inside of another file is a ``StoredImage``."""
    learned: bool = True
    """False: of the assistant, and only read: an answer of ``weight`` 0."""

    @property
    def is_target(self) -> bool:
        """Whether it is learned."""
        return self.learned and self.role == "assistant"


def same_message(last: Turn, turn: Turn) -> bool:
    """Whether two turns that follow each other are of one message."""
    return last.role == turn.role and last.learned == turn.learned


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
    folders: int | None = None
    """Version of the rule ``image_folders``; None: ``image_root`` is that of all records."""

    def at(self, folder: Path | None) -> Layout:
        """For a record whose data file is in ``folder``; None: in that of the first file."""
        return replace(self, image_root=folder) if folder is not None and self.folders else self

    def named(self, record: Mapping[str, Any], where: object) -> Mapping[str, Any]:
        """``record`` with the keys of the layouts. Raises ``DataError`` where it has none of a given name."""
        missing = [given for given, _ in self.columns if given not in record]
        if missing:
            raise DataError(
                f"{where}: columns names {', '.join(missing)}, and the record has: {_names(record)}",
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


def rated_out(record: Mapping[str, Any], ratings: Sequence[tuple[str, int]], where: object) -> list[str | None]:
    """For each question of nanoVLM's rows the first rating that is below its least one, or None: it is kept. Other
    layouts have none. As in nanoVLM, a rating that is missing or null keeps a question.

    Raises ``DataError`` where the ratings of a record are not one number for each question.
    """
    texts = record.get("texts")
    if not isinstance(texts, list):
        return []
    found: list[str | None] = [None] * len(texts)
    for name, least in ratings:
        given = record.get(f"{name}_ratings")
        if given is None:
            continue
        if not isinstance(given, list) or len(given) != len(texts):
            raise _wrong_ratings(where, name, given, len(texts))
        for i, rating in enumerate(given):
            if rating is None:
                continue
            if type(rating) not in _NUMBERS:
                raise _wrong_ratings(where, name, given, len(texts))
            if rating < least and found[i] is None:
                found[i] = name
    return found


_NUMBERS = (int, float)
"""Types of a rating: ``bool`` is none."""


def _wrong_ratings(where: object, name: str, given: Any, number: int) -> DataError:
    return _wrong(where, f"{name}_ratings", given, f"{number} numbers or null, one for each of texts")


def well_rated(record: Mapping[str, Any], ratings: Sequence[tuple[str, int]], where: object) -> Mapping[str, Any]:
    """``record`` without its questions that are rated too low. One without any other question is as it was: a filter
    leaves it out as a whole.
    """
    found = rated_out(record, ratings, where)
    if None not in found or not any(found):
        return record
    return {**record, "texts": [text for text, rule in zip(record["texts"], found, strict=True) if rule is None]}


def parse_record(
    record: Mapping[str, Any], where: object, *, image_root: Path | None = None, captions: Captions | None = None
) -> list[Turn]:
    """The turns of a record. ``where`` begins every error; relative image paths are put under ``image_root``.

    ``captions``: what an image with a text teaches: ``generate`` (text, then the image; also None) or ``understand``.
    None: ``{image, text}`` is a document, as it always was in JSON.
    """
    layout = layout_of(record, captions)
    if layout == "document":
        return [Turn("assistant", "text", _text(record, "text", "text", where))]
    if layout == "conversations":
        turns = record["conversations"]
        if not isinstance(turns, list) or not turns:
            raise _wrong(where, "conversations", turns, "a list of at least one turn")
        if _is_llava(turns):
            return list(_llava(record, turns, where, image_root))
        return [_turn(turn, f"conversations[{i}]", where, image_root) for i, turn in enumerate(turns)]
    if layout == "text_prompt":
        prompt = _text(_having(record, "text_prompt", where), "text_prompt", "text_prompt", where)
        key = drawn_key(record)
        return _captioned(prompt, _image_path(_having(record, key, where)[key], key, where, image_root), captions)
    if layout == "text":
        text = _text(record, "text", "text", where)
        return _captioned(text, _image_path(record["image"], "image", where, image_root), captions)
    if layout == "messages":
        return _openai(record, where, image_root)
    if layout == "texts":
        return _nanovlm(record, where, image_root)
    if layout == "image_list":
        return _edits(record, where, image_root)
    if layout == "instruction":
        return _instructed(record, where, image_root)
    if layout == "caption":
        image = _image_path(_having(record, "image", where)["image"], "image", where, image_root)
        return _captioned(_caption(record, where), image, captions)
    if "texts" in record:
        raise _wrong(where, "texts", record["texts"], "nanoVLM's list of {user, assistant}; a document is {text}")
    raise DataError(
        f"{where}: conversations is missing (the record has: {_names(record) or 'nothing'})",
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
            f"{where}: {key} is {what} (the record has: {_names(record)})",
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


def _is_llava(turns: Any) -> bool:
    """Whether turns have ``from`` and ``value``."""
    return isinstance(turns[0], Mapping) and "from" in turns[0] and "role" not in turns[0]


def drawn_key(record: Mapping[str, Any]) -> str:
    """Of the image that is drawn from a ``text_prompt``."""
    return "image" if "image_path" not in record and "image" in record else "image_path"


def image_key(record: Mapping[str, Any]) -> str:
    """Of the images of LLaVA's, OpenAI's and nanoVLM's records."""
    return "image" if record.get("image") is not None else "images"


def several(record: Mapping[str, Any], key: str) -> str:
    """``key`` with an s where the record has that: ``output_images`` before ``output_image``."""
    return f"{key}s" if f"{key}s" in record else key


def _captioned(text: str, image: str, captions: Captions | None) -> list[Turn]:
    if captions == "understand":
        return [Turn("user", "image", image), Turn("assistant", "text", text)]
    return [Turn("user", "text", text), Turn("assistant", "image", image)]


def _caption(record: Mapping[str, Any], where: object) -> str:
    if "captions" not in record:
        return _text(record, "caption", "caption", where)
    texts = _alternatives(record["captions"])
    if texts is None:
        allowed = "a list of texts, or an object of texts, also as JSON in a text"
        raise _wrong(where, "captions", record["captions"], allowed)
    return _text({"captions": _chosen(texts)}, "captions", "captions", where)


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
        raise _wrong(where, "image_list", images, "a list of at least two images")
    if not isinstance(steps, list) or len(steps) != len(images) - 1:
        raise _wrong(where, "instruction_list", steps, f"a list of {len(images) - 1}: one for each image but the first")
    turns = [Turn("user", "image", _image_path(images[0], "image_list[0]", where, image_root))]
    for i, step in enumerate(steps):
        field = f"instruction_list[{i}]"
        texts = [step] if isinstance(step, str) else step
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise _wrong(where, field, step, "a text, or a list of texts to choose from")
        turns.append(Turn("user", "text", _text({field: _chosen(texts)}, field, field, where)))
        image = _image_path(images[i + 1], f"image_list[{i + 1}]", where, image_root)
        turns.append(Turn("assistant", "image", image))
    return turns


def _instructed(record: Mapping[str, Any], where: object, image_root: Path | None) -> list[Turn]:
    """Input images (none, one or several), an instruction, and one or several output images, each drawn after the one
    before it: edits, compositions and sequences. ``<image>`` in the instruction is the next input image; without any
    they come first.
    """
    inputs, outputs = (
        _listed_images(record, several(record, key), where, image_root) for key in ("input_image", "output_image")
    )
    if not outputs:
        raise _wrong(where, "output_images", record.get("output_images"), "the path of an image, or a list of them")
    pieces = _text(record, "instruction", "instruction", where).split(PLACEHOLDER)
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


def _listed_images(record: Mapping[str, Any], key: str, where: object, image_root: Path | None) -> list[str]:
    """Those of a key: one, a list, or none where it is missing or null."""
    given = record.get(key)
    if given is None:
        return []
    if not isinstance(given, list):
        return [_image_path(given, key, where, image_root)]
    return [_image_path(one, f"{key}[{i}]", where, image_root) for i, one in enumerate(given)]


def _nanovlm(record: Mapping[str, Any], where: object, image_root: Path | None) -> list[Turn]:
    """nanoVLM's rows: all images, then questions and answers."""
    turns = [Turn("user", "image", image) for image in _images(record, where, image_root)]
    for i, pair in enumerate(record["texts"]):
        field = f"texts[{i}]"
        if not isinstance(pair, Mapping):
            raise _wrong(where, field, pair, "an object {user, assistant}")
        turns.append(Turn("user", "text", _text(pair, "user", f"{field}.user", where)))
        turns.append(Turn("assistant", "text", _text(pair, "assistant", f"{field}.assistant", where)))
    return turns


def _images(record: Mapping[str, Any], where: object, image_root: Path | None) -> list[str]:
    """Those of ``image`` or ``images``: one, or a list; none where both are missing."""
    return _listed_images(record, image_key(record), where, image_root)


_OPENAI_ROLES: dict[str, Role] = {
    "user": "user", "assistant": "assistant", "system": "system", "developer": "system",
}  # fmt: skip


def _openai(record: Mapping[str, Any], where: object, image_root: Path | None) -> list[Turn]:
    """OpenAI's ``messages``. A part ``{type: image}`` without a value, and ``<image>`` in a text, is the next image."""
    messages, images = record["messages"], _images(record, where, image_root)
    if not isinstance(messages, list) or not messages:
        raise _wrong(where, "messages", messages, "a list of at least one message")
    queue, turns = iter(images), list[Turn]()
    asked = 0
    for i, message in enumerate(messages):
        field = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise _wrong(where, field, message, "an object {role, content}")
        given = message.get("role")
        if not isinstance(given, str) or given not in _OPENAI_ROLES:
            raise _wrong(where, f"{field}.role", given, ", ".join(_OPENAI_ROLES))
        role, content = _OPENAI_ROLES[given], message.get("content")
        learned = _is_learned(message, role, field, where)
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        for k, part in enumerate(parts):
            name = f"{field}.content[{k}]" if isinstance(content, list) else f"{field}.content"
            for turn in _part(part, role, name, where, image_root, with_images=bool(images)):
                if turn is None:
                    asked += 1
                    turns += [Turn(role, "image", image, learned) for image in [next(queue, "")] if image]
                else:
                    turns.append(turn if learned else turn._replace(learned=False))
    if asked != len(images):
        raise DataError(
            f"{where}: the messages ask for {asked} images and the record has {len(images)}",
            allowed=f"one {PLACEHOLDER}, or one part {{type: image}}, for each image",
        )
    return turns


def _is_learned(message: Mapping[str, Any], role: Role, field: str, where: object) -> bool:
    """False of an assistant message with OpenAI's ``weight`` of 0. Raises ``DataError`` for one that is not 0 or 1."""
    if role != "assistant" or message.get("weight") is None:
        return True
    if message["weight"] not in (0, 1):
        allowed = "1: the message is learned, or 0: it is only read"
        raise _wrong(where, f"{field}.weight", message["weight"], allowed)
    return bool(message["weight"])


def _part(
    part: Any, role: Role, field: str, where: object, image_root: Path | None, *, with_images: bool
) -> Iterator[Turn | None]:
    """The turns of one part of a message's content; None: the next of the record's images."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        text = _text(part, "text", field, where)
        pieces = text.split(PLACEHOLDER) if with_images and role == "user" else [text]
        for number, piece in enumerate(pieces):
            if number:
                yield None
            piece = piece.strip() if len(pieces) > 1 else piece
            if piece or len(pieces) == 1:
                yield Turn(role, "text", piece)
        return
    if kind not in ("image", "image_url"):
        raise _wrong(where, f"{field}.type", kind, "text, image, image_url")
    value = part.get("image_url", part.get("image", part.get("url", part.get("path"))))
    if isinstance(value, Mapping):
        value = value.get("url")
    if value is None and kind == "image":
        yield None
    else:
        yield Turn(role, "image", _linked_image(value, f"{field}.{kind}", where, image_root))


def _linked_image(value: Any, field: str, where: object, image_root: Path | None) -> str:
    """A path, or base64 as ``data:image/png;base64,...``."""
    if isinstance(value, StoredImage) or not isinstance(value, str):
        return _image_path(value, field, where, image_root)
    if value.startswith(("http://", "https://")):
        raise _wrong(where, field, value, "a path, or data:image/...;base64,...: nothing is downloaded")
    if not value.startswith("data:"):
        return _image_path(value.removeprefix("file://"), field, where, image_root)
    head, separator, text = value.partition(",")
    if not separator or not head.endswith(";base64"):
        raise _wrong(where, field, value, "data:image/...;base64,...")
    try:
        return StoredImage(f"{_short(where)}: {field}", base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError) as error:
        raise _wrong(where, field, value, "valid base64") from error


def _short(where: object) -> object:
    """A position without counting lines: it would be done for every image."""
    path, offset = getattr(where, "path", None), getattr(where, "offset", None)
    return where if path is None else f"{path.name}, byte {offset}"


def _llava(record: Mapping[str, Any], turns: Sequence[Any], where: object, image_root: Path | None) -> Iterator[Turn]:
    """LLaVA's record: ``image`` or ``images`` (one, or a list of them) and turns of ``from`` and ``value``."""
    paths = _images(record, where, image_root)
    used, found = 0, list[Turn]()
    for i, turn in enumerate(turns):
        field = f"conversations[{i}]"
        if not isinstance(turn, Mapping):
            raise _wrong(where, field, turn, "an object {from, value}")
        role, value = _role(turn.get("from"), f"{field}.from", where), _text(turn, "value", f"{field}.value", where)
        learned = _is_learned(turn, role, field, where)
        parts = value.split(PLACEHOLDER) if role == "user" else [value]
        for number, part in enumerate(parts):
            if number:
                found += [Turn("user", "image", path) for path in paths[used : used + 1]]
                used += 1
            text = part.strip() if len(parts) > 1 else part
            if text or len(parts) == 1:
                found.append(Turn(role, "text", text, learned))
    if used != len(paths):
        raise DataError(
            f"{where}: the human turns have {used} {PLACEHOLDER} and the record has {len(paths)} images",
            allowed=f"one {PLACEHOLDER} for each image",
        )
    yield from found


def _turn(turn: Any, field: str, where: object, image_root: Path | None) -> Turn:
    if not isinstance(turn, Mapping):
        raise _wrong(where, field, turn, "an object {role, type, content | image_path}")
    role, kind = _role(turn.get("role"), f"{field}.role", where), turn.get("type")
    if kind == "text":
        return Turn(role, "text", _text(turn, "content", f"{field}.content", where))
    if kind == "image":
        return Turn(role, "image", _path(turn, f"{field}.image_path", where, image_root))
    if kind is None and "content" in turn:
        raise DataError(
            f"{where}: {field}.type is missing",
            allowed="text, image",
            remedy="turns of role and content alone are OpenAI's: columns={'conversations': 'messages'}",
        )
    raise _wrong(where, f"{field}.type", kind, "text, image")


def _role(value: Any, field: str, where: object) -> Role:
    if not isinstance(value, str) or value not in _ROLES:
        raise _wrong(where, field, value, ", ".join(_ROLES))
    return _ROLES[value]


def _text(record: Mapping[str, Any], key: str, field: str, where: object) -> str:
    value = record.get(key)
    if isinstance(value, StoredImage):  # which is a ``str``, of its name
        raise DataError(
            f"{where}: {field} has bytes",
            allowed="a text",
            remedy="store the column as texts (UTF-8), not as binary values",
        )
    if not isinstance(value, str):
        raise _wrong(where, field, value, "a text")
    if value.isascii():
        return value
    try:
        value.encode()  # JSON can spell half of a character, which no tokenizer accepts
    except UnicodeEncodeError as error:
        half = f"{field}, character {error.start}"
        raise _wrong(where, half, value[error.start], "a text without unpaired surrogates") from error
    return value


def _path(record: Mapping[str, Any], field: str, where: object, image_root: Path | None) -> str:
    return _image_path(record.get("image_path"), field, where, image_root)


def _image_path(value: Any, field: str, where: object, image_root: Path | None) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(where, field, value, "the path of an image")
    if isinstance(value, StoredImage):
        return value
    if value.startswith("data:image/"):
        return _linked_image(value, field, where, image_root)
    return _in_folder(image_root, value) if image_root is not None else value


def _in_folder(folder: Path, name: str) -> str:
    """``str(folder / name)``, for which pathlib needs five times as long."""
    prefix = str(folder)
    return f"{prefix}/{name}" if _UNCHANGED.fullmatch(name) and len(prefix) > 1 else str(folder / name)


def _wrong(where: object, field: str, value: Any, allowed: str) -> DataError:
    what = "missing" if value is None else shown_value(value)
    return DataError(f"{where}: {field} is {what}", allowed=allowed)


def _names(record: Mapping[str, Any]) -> str:
    """A record's keys, as a terminal and a log file accept them: JSON can spell half of a character."""
    text = ", ".join(map(str, record)).encode(errors="backslashreplace").decode()
    return text if len(text) <= 200 else text[:197] + "..."


def shown_value(value: Any) -> str:
    """A value as a message about its record shows it: its first 57 characters."""
    try:
        text = repr(value)
    except RecursionError:  # JSON may be nested as deeply as Python can follow it, and this is called further down
        text = f"a {type(value).__name__}, nested too deeply to be shown"
    return text if len(text) <= 60 else text[:57] + "..."
