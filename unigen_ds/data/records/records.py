"""A record -> turns of a conversation. Every layout of a record is here, whatever kind of file it was read from.

Also mixed in one file; ``docs/data.md`` shows an example of each::

    {conversations: [{role, type: text | image, content | image_path}]}
    {text_prompt, image_path}                                  user text, then an assistant image
    {text}                                                     a document: all of it is learned
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from unigen_ds.core.errors import DataError
from unigen_ds.data.records.ratings import well_rated
from unigen_ds.data.records.turn import Captions as Captions
from unigen_ds.data.records.turn import Role, Turn, Values, key_names, rename_hint

Record = Mapping[str, Any]
PLACEHOLDER = "<image>"
"""What some layouts have in a text where an image belongs."""
_ROLES: dict[str, Role] = {
    "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "system": "system",
}  # fmt: skip
_OPENAI_ROLES: dict[str, Role] = {
    "user": "user", "assistant": "assistant", "system": "system", "developer": "system",
}  # fmt: skip


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
        """Return the layout of a record whose data file is in ``folder``; None: in that of the first file."""
        return replace(self, image_root=folder) if folder is not None and self.folders else self

    def named(self, record: Record, where: object) -> Record:
        """Return ``record`` with the keys of the layouts. Raises ``DataError`` where it lacks one of ``columns``."""
        if missing := [name for name, _ in self.columns if name not in record]:
            raise DataError(
                f"{where}: columns names {', '.join(missing)}, and the record has: {key_names(record)}",
                remedy="columns={'name in the file': 'key of a layout'}",
            )
        others = {key: value for key, value in record.items() if key not in dict(self.columns)}
        return others | {key: record[name] for name, key in self.columns}

    def turns(self, record: Record, where: object) -> list[Turn]:
        """Return the turns of a record, as its file has it."""
        record = self.named(record, where) if self.columns else record
        record = well_rated(record, self.ratings, where) if self.ratings else record
        return parse_record(record, where, image_root=self.image_root, captions=self.captions)

    @property
    def facts(self) -> tuple[object, ...]:
        """What changes a record, apart from the folder; nothing where all is as it always was."""
        facts: tuple[object, ...] = (self.captions, self.columns) if self.captions is not None or self.columns else ()
        return (*facts, ("ratings", *self.ratings)) if self.ratings else facts


def parse_record(
    record: Record, where: object, *, image_root: Path | None = None, captions: Captions | None = None
) -> list[Turn]:
    """Return the turns of a record.

    Args:
        record: with the keys of the layouts.
        where: file and line; every error begins with it.
        image_root: the folder of relative image paths; None: they stay as they are.
        captions: what an image with a text teaches: ``generate`` (text, then the image; also None) or ``understand``.
            None: ``{image, text}`` is a document, as it always was in JSON.
    """
    values, name = Values(record, where, image_root, captions), layout_of(record, captions)
    if name:
        return LAYOUTS[name].turns(values)
    if "texts" in record:
        raise values.wrong("texts", record["texts"], "nanoVLM's list of {user, assistant}; a document is {text}")
    raise DataError(
        f"{where}: conversations is missing (the record has: {key_names(record) or 'nothing'})",
        allowed="{conversations: [...]}, {text_prompt, image_path}, {text}, LLaVA's {image, conversations},"
        " {messages}, {images, texts}, {image, caption}, {image, captions}, {image_list, instruction_list} or"
        " {instruction, input_images, output_images}",
        remedy=other_delimiter(list(record))
        or rename_hint(record, _FIRST_KEYS)
        or "other names: columns={'name in the file': 'text'}",
    )


def layout_of(record: Record, captions: Captions | None) -> str:
    """Return the name of the first of ``LAYOUTS`` that a record fits; '' where there is none.

    ``captions``: as of ``parse_record``.
    """
    return next((name for name, kind in LAYOUTS.items() if kind.fits(record, captions)), "")


_FIRST_KEYS = (
    "conversations", "text_prompt", "image_path", "text", "messages", "texts", "caption", "captions", "image_list",
    "instruction", "output_image", "output_images",
)  # fmt: skip
"""Keys by which a layout is recognised."""


def other_delimiter(names: Sequence[str]) -> str | None:
    """Return the setting for a CSV file whose names are one cell, because another sign than a comma is between them."""
    signs = [sign for sign in (";", "\t", "|") if len(names) == 1 and sign in str(names[0])]
    return f"format=dict(type='csv', delimiter={signs[0]!r})" if signs else None


# --- conversations ------------------------------------------------------------------------------------------------


class _Chat:
    """Turns of a conversation that asks for the images of its record, one after the other."""

    def __init__(self, images: Sequence[str]) -> None:
        self._images, self._asked = images, 0
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
        """The next image."""
        if self._asked < len(self._images):
            self.turns.append(Turn(role, "image", self._images[self._asked], learned))
        self._asked += 1

    def check(self, where: object, subject: str, allowed: str = f"one {PLACEHOLDER} for each image") -> None:
        """Raise ``DataError`` where it does not ask for as many images as the record has."""
        if self._asked != len(self._images):
            number = len(self._images)
            raise DataError(f"{where}: {subject} for {self._asked} images and the record has {number}", allowed=allowed)


def _conversation(values: Values) -> list[Turn]:
    turns = values.record["conversations"]
    if not isinstance(turns, list) or not turns:
        raise values.wrong("conversations", turns, "a list of at least one turn")
    if _is_llava(values.record):
        return _llava(values, turns)
    return [_typed_turn(values, turn, f"conversations[{i}]") for i, turn in enumerate(turns)]


def _is_llava(record: Record) -> bool:
    """Whether turns have ``from`` and ``value``."""
    turns = record["conversations"]
    first = turns[0] if isinstance(turns, list) and turns else None
    return isinstance(first, Mapping) and "from" in first and "role" not in first


def _llava(values: Values, turns: Sequence[Any]) -> list[Turn]:
    """LLaVA's record: ``image`` or ``images`` (one, or a list of them) and turns of ``from`` and ``value``."""
    chat = _Chat(values.images(_image_key(values.record)))
    for i, turn in enumerate(turns):
        field = f"conversations[{i}]"
        if not isinstance(turn, Mapping):
            raise values.wrong(field, turn, "an object {from, value}")
        role = _role(values, turn.get("from"), f"{field}.from")
        text = values.text(turn.get("value"), f"{field}.value")
        learned = _is_learned(values, turn, role, field)
        chat.add_text(role, text, learned=learned, asks=role == "user")
    chat.check(values.where, "the human turns ask")
    return chat.turns


def _openai(values: Values) -> list[Turn]:
    """OpenAI's ``messages``. A part ``{type: image}`` without a value, and ``<image>`` in a text, is the next image."""
    messages, images = values.record["messages"], values.images(_image_key(values.record))
    if not isinstance(messages, list) or not messages:
        raise values.wrong("messages", messages, "a list of at least one message")
    chat = _Chat(images)
    for i, message in enumerate(messages):
        field = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise values.wrong(field, message, "an object {role, content}")
        role = _role(values, message.get("role"), f"{field}.role", _OPENAI_ROLES)
        learned, content = _is_learned(values, message, role, field), message.get("content")
        if not isinstance(content, list):
            text = values.text(content, f"{field}.content")
            chat.add_text(role, text, learned=learned, asks=bool(images) and role == "user")
            continue
        for k, part in enumerate(content):
            _add_part(values, chat, part, f"{field}.content[{k}]", role, learned, asks=bool(images) and role == "user")
    chat.check(values.where, "the messages ask", f"one {PLACEHOLDER}, or one part {{type: image}}, for each image")
    return chat.turns


def _add_part(values: Values, chat: _Chat, part: Any, field: str, role: Role, learned: bool, *, asks: bool) -> None:
    """One part of a message's content."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        chat.add_text(role, values.text(part.get("text"), field), learned=learned, asks=asks)
        return
    if kind not in ("image", "image_url"):
        raise values.wrong(f"{field}.type", kind, "text, image, image_url")
    value = part.get("image_url", part.get("image", part.get("url", part.get("path"))))
    value = value.get("url") if isinstance(value, Mapping) else value
    if value is None and kind == "image":
        chat.add_image(role, learned=learned)
    else:
        chat.turns.append(Turn(role, "image", values.linked_image(value, f"{field}.{kind}"), learned))


def _is_learned(values: Values, message: Record, role: Role, field: str) -> bool:
    """False of an assistant message with OpenAI's ``weight`` of 0. Raises ``DataError`` for one that is not 0 or 1."""
    weight = message.get("weight")
    if role != "assistant" or weight is None:
        return True
    if weight not in (0, 1):
        raise values.wrong(f"{field}.weight", weight, "1: the message is learned, or 0: it is only read")
    return bool(weight)


def _typed_turn(values: Values, turn: Any, field: str) -> Turn:
    if not isinstance(turn, Mapping):
        raise values.wrong(field, turn, "an object {role, type, content | image_path}")
    role, kind = _role(values, turn.get("role"), f"{field}.role"), turn.get("type")
    if kind == "text":
        return Turn(role, "text", values.text(turn.get("content"), f"{field}.content"))
    if kind == "image":
        return Turn(role, "image", values.image(turn.get("image_path"), f"{field}.image_path"))
    if kind is None and "content" in turn:
        raise DataError(
            f"{values.where}: {field}.type is missing",
            allowed="text, image",
            remedy="turns of role and content alone are OpenAI's: columns={'conversations': 'messages'}",
        )
    raise values.wrong(f"{field}.type", kind, "text, image")


def _role(values: Values, value: Any, field: str, roles: Mapping[str, Role] = _ROLES) -> Role:
    if not isinstance(value, str) or value not in roles:
        raise values.wrong(field, value, ", ".join(roles))
    return roles[value]


def _nanovlm(values: Values) -> list[Turn]:
    """nanoVLM's rows: all images, then questions and answers."""
    turns = [Turn("user", "image", image) for image in values.images(_image_key(values.record))]
    for i, pair in enumerate(values.record["texts"]):
        field = f"texts[{i}]"
        if not isinstance(pair, Mapping):
            raise values.wrong(field, pair, "an object {user, assistant}")
        turns.append(Turn("user", "text", values.text(pair.get("user"), f"{field}.user")))
        turns.append(Turn("assistant", "text", values.text(pair.get("assistant"), f"{field}.assistant")))
    return turns


def _image_key(record: Record) -> str:
    """Of the images of LLaVA's, OpenAI's and nanoVLM's records."""
    return "image" if record.get("image") is not None else "images"


# --- images with texts --------------------------------------------------------------------------------------------


def _document(values: Values) -> list[Turn]:
    return [Turn("assistant", "text", values.text(values.record["text"], "text"))]


def _prompted(values: Values) -> list[Turn]:
    record, key = values.record, _drawn_key(values.record)
    prompt = values.text(record.get("text_prompt"), "text_prompt")
    return _image_and_text(values, values.image(record.get(key), key), prompt)


def _drawn_key(record: Record) -> str:
    """Of the image that is drawn from a ``text_prompt``."""
    return "image" if "image_path" not in record and "image" in record else "image_path"


def _image_with_text(values: Values) -> list[Turn]:
    text = values.text(values.record["text"], "text")
    return _image_and_text(values, values.image(values.record["image"], "image"), text)


def _captioned(values: Values) -> list[Turn]:
    image, record = values.image(values.record.get("image"), "image"), values.record
    if "captions" not in record:
        return _image_and_text(values, image, values.text(record["caption"], "caption"))
    texts = _alternatives(record["captions"])
    if texts is None:
        allowed = "a list of texts, or an object of texts, also as JSON in a text"
        raise values.wrong("captions", record["captions"], allowed)
    return _image_and_text(values, image, values.text(_chosen(texts), "captions"))


def _image_and_text(values: Values, image: str, text: str) -> list[Turn]:
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


def _chosen(texts: Sequence[str]) -> str:
    """Return one of several texts, the same each time: which one follows from the texts. '' where there is none, as in
    BAGEL's public code, which draws another one each time; lengths are planned here.
    """
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


def _edits(values: Values) -> list[Turn]:
    """BAGEL's ``unified_edit``: the first image, then for each step its instruction and the image that results."""
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
        turns.append(Turn("user", "text", values.text(_chosen(texts), field)))
        turns.append(Turn("assistant", "image", values.image(images[i + 1], f"image_list[{i + 1}]")))
    return turns


def _instructed(values: Values) -> list[Turn]:
    """Input images (none, one or several), an instruction, and one or several output images, each drawn after the one
    before it: edits, compositions and sequences. ``<image>`` in the instruction is the next input image; without any
    they come first.
    """
    inputs, outputs = (values.images(_plural(values.record, key)) for key in ("input_image", "output_image"))
    if not outputs:
        raise values.wrong(
            "output_images", values.record.get("output_images"), "the path of an image, or a list of them"
        )
    text = values.text(values.record.get("instruction"), "instruction")
    asks = PLACEHOLDER in text
    chat = _Chat(inputs)
    for _ in () if asks else inputs:
        chat.add_image("user")
    chat.add_text("user", text, asks=asks)
    chat.check(values.where, "instruction asks", f"one {PLACEHOLDER} for each input image, or none")
    return [*chat.turns, *(Turn("assistant", "image", image) for image in outputs)]


def _plural(record: Record, key: str) -> str:
    """``key`` with an s where the record has that: ``output_images`` before ``output_image``."""
    return f"{key}s" if f"{key}s" in record else key


# --- all of them --------------------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """One layout of a record."""

    title: str
    """What messages call a record of it."""
    fits: Callable[[Record, Captions | None], bool]
    """Whether a record, which none of the layouts before fits, has this layout."""
    turns: Callable[[Values], list[Turn]]
    keys: Callable[[Record], Iterator[str] | Sequence[str]]
    """The keys of which the turns are made."""


LAYOUTS: Mapping[str, _Kind] = {
    "conversations": _Kind(
        "a record of `conversations`", lambda record, _: "conversations" in record, _conversation,
        lambda record: ("conversations", *((_image_key(record),) if _is_llava(record) else ())),
    ),
    "text_prompt": _Kind(
        "a record of `text_prompt` and `image_path`",
        lambda record, _: "text_prompt" in record or "image_path" in record, _prompted,
        lambda record: ("text_prompt", _drawn_key(record)),
    ),
    "text": _Kind(
        "an image with its `text`",
        lambda record, captions: "text" in record and captions is not None and record.get("image") is not None,
        _image_with_text, lambda _: ("text", "image"),
    ),
    "document": _Kind("a document of `text`", lambda record, _: "text" in record, _document, lambda _: ("text",)),
    "messages": _Kind(
        "a record of `messages`", lambda record, _: "messages" in record, _openai,
        lambda record: ("messages", _image_key(record)),
    ),
    "texts": _Kind(
        "a record of `texts`", lambda record, _: isinstance(record.get("texts"), list), _nanovlm,
        lambda record: ("texts", _image_key(record)),
    ),
    "image_list": _Kind(
        "a record of `image_list`", lambda record, _: "image_list" in record, _edits,
        lambda _: ("image_list", "instruction_list"),
    ),
    "instruction": _Kind(
        "a record of `instruction`",
        lambda record, _: "instruction" in record and ("output_images" in record or "output_image" in record),
        _instructed,
        lambda record: ("instruction", _plural(record, "input_image"), _plural(record, "output_image")),
    ),
    "caption": _Kind(
        "an image with its caption", lambda record, _: "caption" in record or "captions" in record, _captioned,
        lambda record: ("image", "captions" if "captions" in record else "caption"),
    ),
}  # fmt: skip
"""By name, in the order in which they are looked for. Only added to: positions are part of the index."""
