"""Records that are conversations -> turns: OpenAI's, LLaVA's, nanoVLM's, and turns of role and type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from unigen_ds.core.errors import DataError
from unigen_ds.data.records.record_values import image_path, linked_image, text_value, wrong
from unigen_ds.data.records.turn import PLACEHOLDER, Role, Turn

_ROLES: dict[str, Role] = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "system": "system",
}
_OPENAI_ROLES: dict[str, Role] = {
    "user": "user", "assistant": "assistant", "system": "system", "developer": "system",
}  # fmt: skip


def openai_turns(record: Mapping[str, Any], where: object, image_root: Path | None) -> list[Turn]:
    """OpenAI's ``messages``. A part ``{type: image}`` without a value, and ``<image>`` in a text, is the next image."""
    messages, images = record["messages"], _images(record, where, image_root)
    if not isinstance(messages, list) or not messages:
        raise wrong(where, "messages", messages, "a list of at least one message")
    queue, turns = iter(images), list[Turn]()
    asked = 0
    for i, message in enumerate(messages):
        field = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise wrong(where, field, message, "an object {role, content}")
        given = message.get("role")
        if not isinstance(given, str) or given not in _OPENAI_ROLES:
            raise wrong(where, f"{field}.role", given, ", ".join(_OPENAI_ROLES))
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
        raise wrong(where, f"{field}.weight", message["weight"], allowed)
    return bool(message["weight"])


def _part(
    part: Any, role: Role, field: str, where: object, image_root: Path | None, *, with_images: bool
) -> Iterator[Turn | None]:
    """The turns of one part of a message's content; None: the next of the record's images."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        text = text_value(part, "text", field, where)
        pieces = text.split(PLACEHOLDER) if with_images and role == "user" else [text]
        for number, piece in enumerate(pieces):
            if number:
                yield None
            piece = piece.strip() if len(pieces) > 1 else piece
            if piece or len(pieces) == 1:
                yield Turn(role, "text", piece)
        return
    if kind not in ("image", "image_url"):
        raise wrong(where, f"{field}.type", kind, "text, image, image_url")
    value = part.get("image_url", part.get("image", part.get("url", part.get("path"))))
    if isinstance(value, Mapping):
        value = value.get("url")
    if value is None and kind == "image":
        yield None
    else:
        yield Turn(role, "image", linked_image(value, f"{field}.{kind}", where, image_root))


def is_llava(turns: Any) -> bool:
    """Whether turns have ``from`` and ``value``."""
    return isinstance(turns[0], Mapping) and "from" in turns[0] and "role" not in turns[0]


def llava_turns(
    record: Mapping[str, Any], turns: Sequence[Any], where: object, image_root: Path | None
) -> Iterator[Turn]:
    """LLaVA's record: ``image`` or ``images`` (one, or a list of them) and turns of ``from`` and ``value``."""
    paths = _images(record, where, image_root)
    used, found = 0, list[Turn]()
    for i, turn in enumerate(turns):
        field = f"conversations[{i}]"
        if not isinstance(turn, Mapping):
            raise wrong(where, field, turn, "an object {from, value}")
        role, value = (
            _role(turn.get("from"), f"{field}.from", where),
            text_value(turn, "value", f"{field}.value", where),
        )
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


def typed_turn(turn: Any, field: str, where: object, image_root: Path | None) -> Turn:
    if not isinstance(turn, Mapping):
        raise wrong(where, field, turn, "an object {role, type, content | image_path}")
    role, kind = _role(turn.get("role"), f"{field}.role", where), turn.get("type")
    if kind == "text":
        return Turn(role, "text", text_value(turn, "content", f"{field}.content", where))
    if kind == "image":
        return Turn(role, "image", image_path(turn.get("image_path"), f"{field}.image_path", where, image_root))
    if kind is None and "content" in turn:
        raise DataError(
            f"{where}: {field}.type is missing",
            allowed="text, image",
            remedy="turns of role and content alone are OpenAI's: columns={'conversations': 'messages'}",
        )
    raise wrong(where, f"{field}.type", kind, "text, image")


def _role(value: Any, field: str, where: object) -> Role:
    if not isinstance(value, str) or value not in _ROLES:
        raise wrong(where, field, value, ", ".join(_ROLES))
    return _ROLES[value]


def nanovlm_turns(record: Mapping[str, Any], where: object, image_root: Path | None) -> list[Turn]:
    """nanoVLM's rows: all images, then questions and answers."""
    turns = [Turn("user", "image", image) for image in _images(record, where, image_root)]
    for i, pair in enumerate(record["texts"]):
        field = f"texts[{i}]"
        if not isinstance(pair, Mapping):
            raise wrong(where, field, pair, "an object {user, assistant}")
        turns.append(Turn("user", "text", text_value(pair, "user", f"{field}.user", where)))
        turns.append(Turn("assistant", "text", text_value(pair, "assistant", f"{field}.assistant", where)))
    return turns


def _images(record: Mapping[str, Any], where: object, image_root: Path | None) -> list[str]:
    """Those of ``image`` or ``images``: one, or a list; none where both are missing."""
    return listed_images(record, image_key(record), where, image_root)


def listed_images(record: Mapping[str, Any], key: str, where: object, image_root: Path | None) -> list[str]:
    """Those of a key: one, a list, or none where it is missing or null."""
    given = record.get(key)
    if given is None:
        return []
    if not isinstance(given, list):
        return [image_path(given, key, where, image_root)]
    return [image_path(one, f"{key}[{i}]", where, image_root) for i, one in enumerate(given)]


def image_key(record: Mapping[str, Any]) -> str:
    """Of the images of LLaVA's, OpenAI's and nanoVLM's records."""
    return "image" if record.get("image") is not None else "images"
