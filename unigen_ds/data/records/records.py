"""A record -> turns of a conversation. Every layout of a record is here, whatever kind of file it was read from.

Also mixed in one file; ``docs/data/records.md`` shows an example of each::

    {conversations: [{role, type: text | image, content | image_path}]}
    {text_prompt, image_path}                                  user text, then an assistant image
    {text}                                                     a document: all of it is learned
    {image, conversations: [{from, value}]}                    LLaVA, ShareGPT
    {messages: [{role, content: text or parts}], images}       OpenAI
    {images, texts: [{user, assistant}]}                       nanoVLM
    {image, caption}, {image, captions}                        an image with its text, or several to choose from
    {image, question, answer}                                  a question about an image, or without one
    {image_list, instruction_list}                             BAGEL's edits
    {instruction, input_images, output_images}                 edits of several images, and sequences of images

In LLaVA's each ``<image>`` of a human turn means the next of the record's images, and so it does in ``messages`` of a
record with ``images``. Elsewhere it is text like any other. An image is a path or a ``StoredImage``. A malformed record
is a ``DataError`` that names file, line and field.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from unigen_ds.core.errors import DataError, short_value
from unigen_ds.data.images.image_files import StoredImage
from unigen_ds.data.records.ratings import drop_questions

Record = Mapping[str, Any]
Role = Literal["user", "assistant", "system"]
Captions = Literal["generate", "understand"]
PLACEHOLDER = "<image>"
"""What some layouts have in a text where an image belongs."""
_ROLES: dict[str, Role] = {
    "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "system": "system",
    "developer": "system",
}  # fmt: skip
_IMAGES, _CAPTIONS = ("image_path", "image"), ("captions", "caption")
_INPUTS, _OUTPUTS = ("input_images", "input_image"), ("output_images", "output_image")
"""Keys of a layout, of which the first is used that a record has."""
_ANSWER = ("question", "answer")


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
        return self.learned and self.role == "assistant"


def same_message(last: Turn, turn: Turn) -> bool:
    """Whether two turns that follow each other are of one message."""
    return last.role == turn.role and last.learned == turn.learned


def _key_names(record: Record) -> str:
    text = ", ".join(map(str, record))
    return text if len(text) <= 200 else text[:197] + "..."


@dataclass(frozen=True)
class Layout:
    image_root: Path | None = None
    captions: Captions | None = None
    columns: tuple[tuple[str, str], ...] = ()
    """(key of the file, key of the layout): a record's keys that have other names."""
    ratings: tuple[tuple[str, int], ...] = ()
    """(name of ``RATINGS``, the least that is kept): questions of nanoVLM's rows that are left out."""
    folders: bool = False
    """Whether a record's images are in the folder of its own data file; else ``image_root`` is that of all records."""

    def at(self, entry: Any) -> Layout:
        """Return the layout of a ``Row``, whose data file may be in another folder than the first."""
        return replace(self, image_root=entry.folder) if self.folders and entry.folder is not None else self

    def rename_keys(self, record: Record, where: object) -> Record:
        """Return ``record`` with the keys of the layouts. Raises ``DataError`` where it lacks one of ``columns``."""
        if missing := [name for name, _ in self.columns if name not in record]:
            problem = f"{where}: columns names {', '.join(missing)}, and the record has: {_key_names(record)}"
            raise DataError(problem, remedy="columns={'name in the file': 'key of a layout'}")
        others = {key: value for key, value in record.items() if key not in dict(self.columns)}
        return others | {key: record[name] for name, key in self.columns}

    def turns(self, record: Record, where: object) -> list[Turn]:
        """The turns of a record without the questions of ``drop_questions``."""
        record = self.rename_keys(record, where) if self.columns else record
        record = drop_questions(record, self.ratings, where) if self.ratings else record
        return parse_record(record, where, image_root=self.image_root, captions=self.captions)

    def learned_turns(self, record: Record, where: object) -> list[Turn]:
        """``turns``. Raises ``DataError`` with file and line where nothing of them is to be learned."""
        turns = self.turns(record, where)
        if any(turn.is_target for turn in turns):
            return turns
        raise DataError(f"{where}: no assistant turn has a weight other than 0: nothing to learn from")

    @property
    def facts(self) -> tuple[object, ...]:
        """What changes a record, apart from the folder; nothing where all is as it always was."""
        facts: tuple[object, ...] = (self.captions, self.columns) if self.captions is not None or self.columns else ()
        return (*facts, ("ratings", *self.ratings)) if self.ratings else facts


def parse_record(
    record: Record, where: object, *, image_root: Path | None = None, captions: Captions | None = None
) -> list[Turn]:
    """The turns of a record. ``where`` begins every error: file and line. ``image_root`` None: paths stay as they are.
    ``captions`` None: as ``generate`` (text, then the image), but ``{image, text}`` is a document.
    """
    values, name = Values(record, where, image_root, captions), layout_of(record, captions)
    if name:
        return RECORD_LAYOUTS[name].turns(values)
    raise DataError(
        f"{where}: no layout fits the keys of the record: {_key_names(record) or 'it has none'}",
        allowed="{conversations: [...]}, {text_prompt, image_path}, {text}, LLaVA's {image, conversations},"
        " {messages}, {images, texts}, {image, caption}, {image, captions}, {image, question, answer},"
        " {image_list, instruction_list} or {instruction, input_images, output_images}",
        remedy="other names: columns={'name in the file': 'text'}",
    )


def layout_of(record: Record, captions: Captions | None) -> str:
    """Return the name of the first of ``RECORD_LAYOUTS`` that a record fits; '' where there is none."""
    return next((name for name, kind in RECORD_LAYOUTS.items() if kind.fits(record, captions)), "")


class Values:
    """The values of one record, which are checked when a layout asks for them. The arguments are ``parse_record``'s."""

    __slots__ = ("captions", "image_root", "record", "where")

    def __init__(self, record: Record, where: object, image_root: Path | None, captions: Captions | None) -> None:
        self.record, self.where, self.image_root, self.captions = record, where, image_root, captions

    def wrong(self, field: str, value: Any, choices: str) -> DataError:
        """Return the error for a value that is none of ``choices``; of a key that is missing with the record's keys."""
        if value is not None:
            return DataError(f"{self.where}: {field} is {short_value(value)}", allowed=choices)
        problem = f"{self.where}: {field} is missing (the record has: {_key_names(self.record)})"
        remedy = f"another name: columns={{'name in the file': {field!r}}}" if field.isidentifier() else None
        return DataError(problem, allowed=choices, remedy=remedy)

    def items(self, field: str, form: str) -> Iterator[tuple[str, Record]]:
        """Each object of a list with its name in messages. Raises ``DataError`` for anything else."""
        items = self.record[field]
        if not isinstance(items, list) or not items:
            raise self.wrong(field, items, "a list of at least one object")
        for i, item in enumerate(items):
            if not isinstance(item, Mapping):
                raise self.wrong(f"{field}[{i}]", item, f"an object {form}")
            yield f"{field}[{i}]", item

    def role(self, value: Any, field: str) -> Role:
        if not isinstance(value, str) or value not in _ROLES:
            raise self.wrong(field, value, ", ".join(_ROLES))
        return _ROLES[value]

    def is_learned(self, message: Record, role: Role, field: str) -> bool:
        """False of an assistant message with OpenAI's ``weight`` of 0. Raises ``DataError`` where it is not 0 or 1."""
        weight = message.get("weight")
        if role != "assistant" or weight is None:
            return True
        if weight not in (0, 1):
            raise self.wrong(f"{field}.weight", weight, "1: the message is learned, or 0: it is only read")
        return bool(weight)

    def text(self, value: Any, field: str) -> str:
        """Return a text that a tokenizer accepts. Raises ``DataError`` for everything else."""
        if isinstance(value, StoredImage):  # which is a ``str``, of its name
            raise DataError(f"{self.where}: {field} has bytes", allowed="a text (UTF-8)")
        if not isinstance(value, str):
            raise self.wrong(field, value, "a text")
        try:
            value.encode()  # JSON can spell half of a character, which no tokenizer accepts
        except UnicodeEncodeError as error:
            half = f"{field}, character {error.start}"
            raise self.wrong(half, value[error.start], "a text without unpaired surrogates") from error
        return value

    def image(self, value: Any, field: str) -> str:
        """The path of an image, or the image itself (bytes, base64). Raises ``DataError``: nothing is downloaded."""
        if isinstance(value, StoredImage):
            return value
        if not isinstance(value, str) or not value or value.startswith(("http://", "https://")):
            raise self.wrong(field, value, "the path of an image, or data:image/...;base64,...: nothing is downloaded")
        if value.startswith("data:"):
            return self._decode(value, field)
        value = value.removeprefix("file://")
        return value if self.image_root is None else str(self.image_root / value)

    def images(self, key: str) -> list[str]:
        """Return the images of a key: one, a list of them, or none where it is missing or null."""
        value = self.record.get(key)
        if isinstance(value, list):
            return [self.image(one, f"{key}[{i}]") for i, one in enumerate(value)]
        return [] if value is None else [self.image(value, key)]

    def _decode(self, url: str, field: str) -> StoredImage:
        head, separator, text = url.partition(",")
        where, path = self.where, getattr(self.where, "path", None)
        if path is not None:  # its line is not counted, which would be done for every image
            where = f"{path.name}, byte {getattr(where, 'offset', None)}"
        try:
            if not separator or not head.endswith(";base64"):
                raise ValueError(head)
            return StoredImage(f"{where}: {field}", base64.b64decode(text, validate=True))
        except ValueError as error:
            raise self.wrong(field, url, "data:image/...;base64,... with valid base64") from error


class _Chat:
    """Turns of a conversation that asks for the images of its record, one after the other."""

    def __init__(self, images: Sequence[str]) -> None:
        self._images, self._num_asked = images, 0
        self.turns: list[Turn] = []

    def add_text(self, role: Role, text: str, *, learned: bool = True, asks: bool = False) -> None:
        """``asks``: each ``<image>`` in it is the next image."""
        pieces = text.split(PLACEHOLDER) if asks else [text]
        for number, piece in enumerate(pieces):
            if number:
                self.add_image(role, learned=learned)
            piece = piece.strip() if len(pieces) > 1 else piece
            if piece or len(pieces) == 1:
                self.turns.append(Turn(role, "text", piece, learned))

    def add_image(self, role: Role, *, learned: bool = True) -> None:
        if self._num_asked < len(self._images):
            self.turns.append(Turn(role, "image", self._images[self._num_asked], learned))
        self._num_asked += 1

    def check(self, where: object, subject: str, form: str = f"one {PLACEHOLDER} for each image") -> None:
        """Raise ``DataError`` where it does not ask for as many images as the record has."""
        if self._num_asked != len(self._images):
            total = len(self._images)
            raise DataError(f"{where}: {subject} for {self._num_asked} images and the record has {total}", allowed=form)


def _is_llava(record: Record) -> bool:
    """Whether turns have ``from`` and ``value``."""
    turns = record.get("conversations")
    first = turns[0] if isinstance(turns, list) and turns else None
    return isinstance(first, Mapping) and "from" in first and "role" not in first


def _llava_turns(values: Values) -> list[Turn]:
    chat = _Chat(values.images(_image_key(values.record)))
    for field, turn in values.items("conversations", "{from, value}"):
        role = values.role(turn.get("from"), f"{field}.from")
        text = values.text(turn.get("value"), f"{field}.value")
        chat.add_text(role, text, learned=values.is_learned(turn, role, field), asks=role == "user")
    chat.check(values.where, "the human turns ask")
    return chat.turns


def _conversation_turns(values: Values) -> list[Turn]:
    turns = []
    for field, turn in values.items("conversations", "{role, type, content | image_path}"):
        role, kind = values.role(turn.get("role"), f"{field}.role"), turn.get("type")
        learned = values.is_learned(turn, role, field)
        if kind == "text":
            turns.append(Turn(role, "text", values.text(turn.get("content"), f"{field}.content"), learned))
        elif kind == "image":
            turns.append(Turn(role, "image", values.image(turn.get("image_path"), f"{field}.image_path"), learned))
        else:
            choices = "text, image; turns of role and content alone: columns={'conversations': 'messages'}"
            raise values.wrong(f"{field}.type", kind, choices)
    return turns


def _message_turns(values: Values) -> list[Turn]:
    """A part ``{type: image}`` without a value, and ``<image>`` in a text, is the next image."""
    images = values.images(_image_key(values.record))
    chat = _Chat(images)
    for field, message in values.items("messages", "{role, content}"):
        role = values.role(message.get("role"), f"{field}.role")
        learned, content = values.is_learned(message, role, field), message.get("content")
        asks = bool(images) and role == "user"
        if not isinstance(content, list):
            chat.add_text(role, values.text(content, f"{field}.content"), learned=learned, asks=asks)
            continue
        for k, part in enumerate(content):
            at, kind = f"{field}.content[{k}]", part.get("type") if isinstance(part, Mapping) else None
            if kind == "text":
                chat.add_text(role, values.text(part.get("text"), at), learned=learned, asks=asks)
                continue
            if kind not in ("image", "image_url"):
                raise values.wrong(f"{at}.type", kind, "text, image, image_url")
            value = part.get("image_url", part.get("image", part.get("url", part.get("path"))))
            value = value.get("url") if isinstance(value, Mapping) else value
            if value is None and kind == "image":
                chat.add_image(role, learned=learned)
            else:
                chat.turns.append(Turn(role, "image", values.image(value, f"{at}.{kind}"), learned))
    chat.check(values.where, "the messages ask", f"one {PLACEHOLDER}, or one part {{type: image}}, for each image")
    return chat.turns


def _question_turns(values: Values) -> list[Turn]:
    """All images, then questions and answers."""
    turns = [Turn("user", "image", image) for image in values.images(_image_key(values.record))]
    for field, pair in values.items("texts", "{user, assistant}"):
        turns.append(Turn("user", "text", values.text(pair.get("user"), f"{field}.user")))
        turns.append(Turn("assistant", "text", values.text(pair.get("assistant"), f"{field}.assistant")))
    return turns


def _answer_turns(values: Values) -> list[Turn]:
    turns = [Turn("user", "image", image) for image in values.images(_image_key(values.record))]
    question, answer = (values.record[key] for key in _ANSWER)
    if isinstance(answer, (int, float)) and math.isfinite(answer):  # a table has numbers, and NaN where it has none
        answer = str(answer)
    texts = values.text(question, "question"), values.text(answer, "answer")
    return [*turns, Turn("user", "text", texts[0]), Turn("assistant", "text", texts[1])]


def _image_key(record: Record) -> str:
    """Return the key that has the images of a record whose layout does not name them one by one."""
    return "image" if record.get("image") is not None else "images"


def _first_key(record: Record, *keys: str) -> str:
    """Return the first of ``keys`` that a record has; where it has none, the first."""
    return next((key for key in keys if key in record), keys[0])


def _picture_turns(values: Values, image_key: str, text_key: str) -> list[Turn]:
    """An image and its text; of several texts one."""
    text = values.record.get(text_key)
    if text_key == "captions":
        texts = _alternatives(text)
        if texts is None:
            raise values.wrong(text_key, text, "a list of texts, or an object of texts, also as JSON in a text")
        text = _choose(texts)
    text = values.text(text, text_key)
    image = values.image(values.record.get(image_key), image_key)
    if values.captions == "understand":
        return [Turn("user", "image", image), Turn("assistant", "text", text)]
    return [Turn("user", "text", text), Turn("assistant", "image", image)]


def _alternatives(value: Any) -> list[Any] | None:
    """Return the texts of BAGEL's ``captions``; None: it is nothing of that kind."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    texts = list(value.values()) if isinstance(value, Mapping) else value
    return texts if isinstance(texts, list) and all(isinstance(one, str) for one in texts) else None


def _choose(texts: Sequence[str]) -> str:
    """One of several texts, always the same: lengths are planned here. BAGEL's public code draws one each time."""
    if len(texts) < 2:
        return texts[0] if texts else ""
    digest = hashlib.blake2b(json.dumps(list(texts)).encode(), digest_size=8).digest()
    return texts[int.from_bytes(digest, "little") % len(texts)]


def unused_texts(record: Record) -> int:
    """Return the number of texts that a record has as alternatives to the ones that are used."""
    if "captions" in record:
        return max(len(_alternatives(record["captions"]) or ()) - 1, 0)
    steps = record.get("instruction_list")
    return sum(max(len(one) - 1, 0) for one in steps if isinstance(one, list)) if isinstance(steps, list) else 0


def _edit_turns(values: Values) -> list[Turn]:
    """The first image, then for each step its instruction and the image that results."""
    images, steps = values.record["image_list"], values.record.get("instruction_list")
    if not isinstance(images, list) or len(images) < 2:
        raise values.wrong("image_list", images, "a list of at least two images")
    if not isinstance(steps, list) or len(steps) != len(images) - 1:
        raise values.wrong("instruction_list", steps, f"a list of {len(images) - 1}: one for each image but the first")
    turns = [Turn("user", "image", values.image(images[0], "image_list[0]"))]
    for i, step in enumerate(steps):
        field = f"instruction_list[{i}]"
        texts = [step] if isinstance(step, str) else step
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise values.wrong(field, step, "a text, or a list of texts to choose from")
        turns.append(Turn("user", "text", values.text(_choose(texts), field)))
        turns.append(Turn("assistant", "image", values.image(images[i + 1], f"image_list[{i + 1}]")))
    return turns


def _instruction_turns(values: Values) -> list[Turn]:
    """Input images, an instruction with ``<image>`` for each (without any they come first), and output images."""
    record = values.record
    inputs, outputs = (values.images(_first_key(record, *keys)) for keys in (_INPUTS, _OUTPUTS))
    if not outputs:
        raise values.wrong("output_images", record.get("output_images"), "the path of an image, or a list of them")
    text = values.text(record.get("instruction"), "instruction")
    asks, chat = PLACEHOLDER in text, _Chat(inputs)
    for _ in () if asks else inputs:
        chat.add_image("user")
    chat.add_text("user", text, asks=asks)
    chat.check(values.where, "instruction asks", f"one {PLACEHOLDER} for each input image, or none")
    return [*chat.turns, *(Turn("assistant", "image", image) for image in outputs)]


class _Kind(NamedTuple):
    fits: Callable[[Record, Captions | None], bool]
    """Whether a record, which none of the layouts before fits, has this layout."""
    keys: Callable[[Record], Sequence[str]]
    turns: Callable[[Values], list[Turn]]


RECORD_LAYOUTS: Mapping[str, _Kind] = {
    "llava": _Kind(
        lambda record, _: _is_llava(record), lambda record: ("conversations", _image_key(record)), _llava_turns,
    ),
    "conversations": _Kind(
        lambda record, _: "conversations" in record, lambda _: ("conversations",), _conversation_turns,
    ),
    "text_prompt": _Kind(
        lambda record, _: bool({"text_prompt", "image_path"} & {*record}),
        lambda record: ("text_prompt", _first_key(record, *_IMAGES)),
        lambda values: _picture_turns(values, _first_key(values.record, *_IMAGES), "text_prompt"),
    ),
    "text": _Kind(
        lambda record, captions: "text" in record and captions is not None and record.get("image") is not None,
        lambda _: ("text", "image"), lambda values: _picture_turns(values, "image", "text"),
    ),
    "document": _Kind(
        lambda record, _: "text" in record, lambda _: ("text",),
        lambda values: [Turn("assistant", "text", values.text(values.record["text"], "text"))],
    ),
    "messages": _Kind(
        lambda record, _: "messages" in record, lambda record: ("messages", _image_key(record)), _message_turns,
    ),
    "texts": _Kind(
        lambda record, _: isinstance(record.get("texts"), list),
        lambda record: ("texts", _image_key(record)), _question_turns,
    ),
    "image_list": _Kind(
        lambda record, _: "image_list" in record, lambda _: ("image_list", "instruction_list"), _edit_turns,
    ),
    "instruction": _Kind(
        lambda record, _: "instruction" in record and bool({*_OUTPUTS} & {*record}),
        lambda record: ("instruction", _first_key(record, *_INPUTS), _first_key(record, *_OUTPUTS)),
        _instruction_turns,
    ),
    "caption": _Kind(
        lambda record, _: bool({*_CAPTIONS} & {*record}), lambda record: ("image", _first_key(record, *_CAPTIONS)),
        lambda values: _picture_turns(values, "image", _first_key(values.record, *_CAPTIONS)),
    ),
    "question": _Kind(
        lambda record, _: {*_ANSWER} <= {*record}, lambda record: (_image_key(record), *_ANSWER), _answer_turns,
    ),
}  # fmt: skip
"""Name of a layout -> the layout, in the order of the search. Only added to: positions are part of the index."""
