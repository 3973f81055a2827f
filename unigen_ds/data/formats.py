"""JSON and JSONL files -> records by byte offset -> turns of a conversation.

Four record formats, also mixed in one file::

    {"conversations": [{"role": "user", "type": "text", "content": "..."},
                       {"role": "assistant", "type": "image", "image_path": "images/1.png"}, ...]}
    {"text_prompt": "...", "image_path": "images/1.png"}          (user text, then an assistant image)
    {"text": "..."}                                               (a document: all of it is learnt)
    {"image": "images/1.png", "conversations": [{"from": "human", "value": "<image>\\nWhat?"}, {"from": "gpt", ...}]}

The last is LLaVA's: each ``<image>`` of a human turn means the next of the record's images. In the others it is
text like any other.

A file is scanned once for the byte range of each record; afterwards one record is one seek and one read, so a file
may be larger than memory. A malformed record is a ``DataError`` that names file, line and field; the line number is
counted only then.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unigen_ds.core.errors import DataError
from unigen_ds.data.data_file import check_data_file, no_record

Role = Literal["user", "assistant", "system"]
PLACEHOLDER = "<image>"
_ROLES: dict[str, Role] = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "system": "system",
}
_BOM = b"\xef\xbb\xbf"
_BLOCK = 1 << 20
_NEWLINE, _SPACE = 10, 32
_TOKENS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},]', re.DOTALL)
"""All that determines the structure of a JSON text: whole strings (to be skipped), brackets and commas."""


class Turn(NamedTuple):
    """One text or one image of a conversation. ``role`` is user, assistant or system."""

    role: Role
    kind: Literal["text", "image"]
    value: str
    """The text, or the path of the image."""


class Place(NamedTuple):
    """Where a record begins. As text: ``data/train.jsonl:17``; the file is read for the line number only then."""

    path: Path
    offset: int

    def __str__(self) -> str:
        lines, left = 1, self.offset
        with self.path.open("rb") as stream:
            while left > 0 and (block := stream.read(min(left, 1 << 20))):
                lines += block.count(b"\n")
                left -= len(block)
        return f"{self.path}:{lines}"


def scan(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Byte offset and byte length of every record of a JSONL file (blank lines skipped) or a JSON array.

    The first character decides which of the two it is, not the name of the file.
    """
    check_data_file(path)
    if path.stat().st_size and _is_array(path):
        found = np.asarray([*_array_elements(path)], dtype=np.int64).reshape(-1, 2)
        offsets, lengths = found[:, 0].copy(), found[:, 1].copy()
    else:
        offsets, lengths = _lines(path)
    if not offsets.size:
        raise no_record(path)
    return offsets, lengths


def _is_array(path: Path) -> bool:
    with path.open("rb") as stream:
        for line in stream:
            text = line.removeprefix(_BOM).strip()
            if text:
                return text.startswith(b"[")
    return False


def _lines(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of the lines, without white space around them; a block of lines at a time, since a file may have millions."""
    starts, stops = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    with path.open("rb") as stream:
        rest = stream.read(len(_BOM))
        position, rest = (len(_BOM), b"") if rest == _BOM else (0, rest)
        while True:
            block = stream.read(max(_BLOCK, len(rest)))  # a line may be longer than a block
            data = rest + block if block else rest + b"\n"
            codes = np.frombuffer(data, np.uint8)
            ends = np.flatnonzero(codes == _NEWLINE)
            begins = np.concatenate([[0], ends[:-1] + 1])[: ends.size]
            begins, ends = _stripped(data, codes, begins, ends)
            starts.append(begins + position)
            stops.append(ends + position)
            kept = data.rfind(b"\n") + 1
            position, rest = position + kept, data[kept:]
            if not block:
                break
    offsets = np.concatenate(starts)
    return offsets, np.concatenate(stops) - offsets


def _stripped(
    data: bytes, codes: NDArray[np.uint8], begins: NDArray[np.int64], ends: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Lines of ``data`` without white space around them, blank ones left out."""
    blank = begins == ends
    plain = ~blank & (codes[np.where(blank, 0, begins)] > _SPACE) & (codes[ends - 1] > _SPACE)
    for i in np.flatnonzero(~plain & ~blank).tolist():
        line = data[begins[i] : ends[i]]
        text = line.strip()
        begins[i] += len(line) - len(line.lstrip())
        ends[i] = begins[i] + len(text)
    kept = begins < ends
    return begins[kept], ends[kept]


def _array_elements(path: Path) -> Iterator[tuple[int, int]]:
    """Byte ranges of the elements of a top-level array, from its brackets and commas alone."""
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        depth, start, first = 0, 0, True
        for match in _TOKENS.finditer(data):
            token = match.group()
            if token in (b"[", b"{"):
                depth += 1
                if depth == 1:
                    start = match.end()
            elif token in (b"]", b"}"):
                depth -= 1
                if depth == 0:
                    text = data[start : match.start()].strip()
                    if text or not first:
                        yield _element(path, data, start, match.start())
                    rest = data[match.end() :].strip()
                    if rest:
                        raise DataError(f"{Place(path, match.end())}: text after the end of the array: {rest[:40]!r}")
                    return
            elif token == b"," and depth == 1:
                yield _element(path, data, start, match.start())
                start, first = match.end(), False
    raise DataError(f"data file {path} is not a complete JSON array", remedy="its closing bracket is missing")


def _element(path: Path, data: mmap.mmap, start: int, stop: int) -> tuple[int, int]:
    raw = data[start:stop]
    text = raw.strip()
    if not text:
        raise DataError(f"{Place(path, start)}: an empty element", remedy="remove the comma too many")
    return start + raw.index(text[:1]), len(text)


def read_bytes(path: Path, offset: int, length: int) -> bytes:
    """That byte range, during a run. Raises ``DataError`` where the file was removed after its index was made."""
    try:
        with path.open("rb") as stream:
            stream.seek(offset)
            return stream.read(length)
    except OSError as error:
        raise DataError(
            f"data file {path} can no longer be read: {error.strerror}",
            remedy="a run reads its data files until it ends: restore the file, then continue with --resume",
        ) from error


def read_record(path: Path, offset: int, length: int) -> dict[str, Any]:
    """Parse the record in that byte range. Raises ``DataError`` where it is no JSON object."""
    return load_record(read_bytes(path, offset, length), Place(path, offset))


def load_record(raw: bytes, location: Place) -> dict[str, Any]:
    """Parse the bytes of one record. Raises ``DataError`` where it is no JSON object."""
    try:
        # bytes that begin otherwise: json looks for another encoding itself
        record = json.loads(raw.decode("utf-8", "surrogatepass") if raw.startswith(b"{") else raw)
    except (ValueError, RecursionError) as error:  # ValueError: of the JSON, its encoding, or a number of 4,300 digits
        raise DataError(
            f"{location}: no valid JSON: {error}", allowed="one object a line, or one array of objects"
        ) from error
    if not isinstance(record, dict):
        raise DataError(f"{location}: the record is {_shown(record)}", allowed="a JSON object")
    return record


def parse_record(record: Mapping[str, Any], where: object, *, image_root: Path | None = None) -> list[Turn]:
    """The turns of a record. ``where`` begins every error; relative image paths are put under ``image_root``."""
    if "conversations" in record:
        turns = record["conversations"]
        if not isinstance(turns, list) or not turns:
            raise _wrong(where, "conversations", turns, "a list of at least one turn")
        if isinstance(turns[0], Mapping) and "from" in turns[0] and "role" not in turns[0]:
            return list(_llava(record, turns, where, image_root))
        return [_turn(turn, f"conversations[{i}]", where, image_root) for i, turn in enumerate(turns)]
    if "text_prompt" in record or "image_path" in record:
        prompt = _text(record, "text_prompt", "text_prompt", where)
        image = _path(record, "image_path", where, image_root)
        return [Turn("user", "text", prompt), Turn("assistant", "image", image)]
    if "text" in record:
        return [Turn("assistant", "text", _text(record, "text", "text", where))]
    raise DataError(
        f"{where}: conversations is missing (the record has: {_names(record) or 'nothing'})",
        allowed="{conversations: [...]}, {text_prompt, image_path}, {text} or LLaVA's {image, conversations}",
    )


def _llava(record: Mapping[str, Any], turns: Sequence[Any], where: object, image_root: Path | None) -> Iterator[Turn]:
    """LLaVA's record: ``image`` (a path, or a list of them) and turns of ``from`` and ``value``."""
    given = record.get("image")
    images = [] if given is None else given if isinstance(given, list) else [given]
    paths = [_image_path(image, "image", where, image_root) for image in images]
    used, found = 0, list[Turn]()
    for i, turn in enumerate(turns):
        field = f"conversations[{i}]"
        if not isinstance(turn, Mapping):
            raise _wrong(where, field, turn, "an object {from, value}")
        role, value = _role(turn.get("from"), f"{field}.from", where), _text(turn, "value", f"{field}.value", where)
        parts = value.split(PLACEHOLDER) if role == "user" else [value]
        for number, part in enumerate(parts):
            if number:
                found += [Turn("user", "image", path) for path in paths[used : used + 1]]
                used += 1
            text = part.strip() if len(parts) > 1 else part
            if text or len(parts) == 1:
                found.append(Turn(role, "text", text))
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
    raise _wrong(where, f"{field}.type", kind, "text, image")


def _role(value: Any, field: str, where: object) -> Role:
    if not isinstance(value, str) or value not in _ROLES:
        raise _wrong(where, field, value, ", ".join(_ROLES))
    return _ROLES[value]


def _text(record: Mapping[str, Any], key: str, field: str, where: object) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise _wrong(where, field, value, "a text")
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
    return str(image_root / value) if image_root is not None else value


def _wrong(where: object, field: str, value: Any, allowed: str) -> DataError:
    what = "missing" if value is None else _shown(value)
    return DataError(f"{where}: {field} is {what}", allowed=allowed)


def _names(record: Mapping[str, Any]) -> str:
    """A record's keys, as a terminal and a log file accept them: JSON can spell half of a character."""
    text = ", ".join(map(str, record)).encode(errors="backslashreplace").decode()
    return text if len(text) <= 200 else text[:197] + "..."


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
