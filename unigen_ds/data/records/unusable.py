"""Data that is not used: files of another kind, malformed records, records with an unreadable image, unused keys.

Planning finds the records (``index.py``) and the index keeps a line of JSON for each, so every start and every process
leaves out the same ones. ``on_record_error`` of the data set decides: a malformed one is an error that lists the first
of all kinds, or all of them are left out, counted, and listed in ``left_out.jsonl`` of the work dir.

A record with the keys of two layouts is read by the first one (``records.layout_of``); what it has of the other is
counted for each source, in the log and in ``tools/inspect_data.py``. Keys that belong to no layout (``id``,
``source``) are not looked at, nor are null or empty values. It is one number: the layout, and a bit for each key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import log
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from unigen_ds.core.errors import DataError, close, short_value
from unigen_ds.core.shards import first_names
from unigen_ds.data.records.records import RECORD_LAYOUTS, Layout, layout_of
from unigen_ds.data.samples.sample import Array

OnRecordError = Literal["error", "skip"]
SKIP_KEY = "on_record_error='skip'"
LIST_FILE = "left_out.jsonl"
NUM_LISTED = 20
_ADVICE = re.compile(r"(.*?)((?: Allowed: | Remedy: |\Z).*)", re.DOTALL)
_ALPHA = 2.87e-7
"""The probability beyond 5 standard deviations of a normal distribution, on one side."""
_TEXT_FORMATS = "text of its format, by default JSON or JSONL: docs/data/records.md shows the records"
_MAGIC = {
    b"PAR1": "a Parquet file: format='parquet' reads it",
    b"ARROW1": "an Arrow file: format='arrow' reads it",
    b"\xff\xff\xff\xff": "an Arrow stream: format='arrow' reads it",
    b"\x1f\x8b": "compressed by gzip: convert it: gunzip -c {0} > converted.jsonl",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: convert it: zstd -dc {0} > converted.jsonl",
    b"\xff\xfe": "UTF-16 text, not UTF-8: convert it: iconv -f UTF-16 -t UTF-8 {0} > converted.jsonl",
    b"\xfe\xff": "UTF-16 text, not UTF-8: convert it: iconv -f UTF-16 -t UTF-8 {0} > converted.jsonl",
    b"PK\x03\x04": "a zip archive: convert it: python -m zipfile -e {0} converted",
}
"""First bytes -> what a file is, and what reads or converts it."""


class MalformedRecord(DataError):
    """One record cannot be read; the others of its file can."""


def check_data_file(path: Path) -> None:
    """Raise ``DataError`` for another format or another encoding, with the remedy."""
    with path.open("rb") as stream:
        head = stream.read(8)
    for magic, text in _MAGIC.items():
        if head.startswith(magic):
            what, _, remedy = text.format(path.name).partition(": ")
            raise DataError(f"data file {path} is {what}", allowed=_TEXT_FORMATS, remedy=remedy)


def instead_of(path: Path, suffixes: Sequence[str]) -> str:
    """What was probably meant by a path that does not exist, among the files with these suffixes."""
    folder = path.parent
    if not folder.is_dir():
        return f"the folder {folder} does not exist either; relative paths start at {Path.cwd()}"
    inside = sorted(file.name for file in folder.iterdir() if file.suffix.lower() in suffixes)
    if near := close(path.name, inside):
        return f"did you mean {str(folder / near)!r}?"
    return f"{folder} has {first_names(inside) or 'no such file'}"


def decode_text(raw: bytes, where: object, *, encoding: str = "utf-8-sig", first: int = 0, of: str = "") -> str:
    """Return a text of a file, which begins at its byte ``first``. Raises ``MalformedRecord`` where it is no UTF-8."""
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        problem = f"{where}: byte {first + error.start}{of} is no UTF-8"
        raise MalformedRecord(problem, remedy="convert it: iconv -f LATIN1 -t UTF-8 FILE > NEW") from error


@dataclass(frozen=True)
class BadRecord:
    number: int
    """Number of the record in its source."""
    file: str
    index: int
    """Number of the record in its file, from 0."""
    id: str | int | None
    reason: str
    """Begins with its position, as of ``Row.where``."""

    def __str__(self) -> str:
        return f"index {self.index}{'' if self.id is None else f', id {short_value(self.id)}'}, {self.reason}"

    def line(self, name: str) -> str:
        """Return its line of ``left_out.jsonl``. ``name``: of the source in sample ids."""
        facts = {"sample": f"{name}:{self.number}", **asdict(self)}
        return json.dumps({key: facts[key] for key in ("sample", "file", "index", "id", "reason")}) + "\n"


def as_array(records: Iterable[BadRecord]) -> NDArray[np.uint8]:
    """Return some records as the index keeps them."""
    return np.frombuffer("".join(json.dumps(asdict(one)) + "\n" for one in records).encode(), np.uint8)


def from_array(lines: NDArray[np.uint8]) -> tuple[BadRecord, ...]:
    return tuple(BadRecord(**json.loads(line)) for line in lines.tobytes().splitlines())


def unusable_error(
    bad: Sequence[BadRecord], title: str, records: int, *, number: int | None = None, limit: float | None = None
) -> DataError:
    """The error that lists the first. ``number``: of all, if ``bad`` is a part; ``limit``: share that is allowed."""
    number = len(bad) if number is None else number
    maximum, remedy = None, f"mend or remove them; {SKIP_KEY} of the data set leaves them out, listed in {LIST_FILE}"
    if limit is not None:
        maximum = f"a share of {limit:g} (train_dataloader.max_skipped_fraction)"
        remedy = "mend or remove them, or raise the limit"
    remedy = f"{remedy}. The first {NUM_LISTED}:" if number > NUM_LISTED else f"{remedy}. They are:"
    earlier = set[str]()
    for one in bad[:NUM_LISTED]:
        problem, advice = _ADVICE.match(str(one)).groups()  # type: ignore[union-attr]
        remedy += f"\n  {problem}{'' if advice in earlier else advice}"
        earlier.add(advice)
    return DataError(f"{title}: {number:,} of {records:,} records cannot be used", allowed=maximum, remedy=remedy)


def exceeds(number: int, total: int, limit: float) -> bool:
    """Whether ``number`` of ``total`` samples show that more than a share ``limit`` of all is unusable: a true share of
    half of it would have so many with less than the probability of 5 sigma (Chernoff's bound of the binomial).
    """
    if not number or number <= limit * total:
        return False
    share, rate = number / total, limit / 2
    if rate == 0:
        return True
    divergence = share * log(share / rate) + (1 - share) * (log((1 - share) / (1 - rate)) if share < 1 else 0)
    return total * divergence > -log(_ALPHA)


# --- keys that no turn is made of -----------------------------------------------------------------------------------

_NAMES = tuple(RECORD_LAYOUTS)
BESIDE_JSON = "another `caption` or `text` in the .json"
IMAGE_BESIDE_JSON = "an image that the .json does not name"
OTHER_IMAGE = "an image file in another key (columns={'that key': 'image'} reads it)"
_KEYS = (
    "conversations", "text_prompt", "image_path", "image", "images", "text", "messages", "texts", "image_list",
    "instruction_list", "instruction", "input_image", "input_images", "output_image", "output_images", "caption",
    "captions", "file_name", "system", "tools", BESIDE_JSON, IMAGE_BESIDE_JSON, "question", "answer", OTHER_IMAGE,
)  # fmt: skip
"""All of the layouts, and what a source itself leaves out (``Row.unused``). Only added to, as ``RECORD_LAYOUTS``."""
_CHATS, _OF_CHATS = ("llava", "conversations", "messages", "texts"), ("system", "tools")
_TEXTS = ("llava", "messages", "texts", "question", "document")
"""Layouts that need no image."""
_IMAGES, _IMAGE_FILE = {"image", "images", "file_name"}, re.compile(r".+\.(png|jpe?g|webp|gif|bmp)", re.IGNORECASE)
_SHIFT = 8
"""The bit of the first key; below it is the layout, from 1."""


def unused_keys(record: Mapping[str, Any], layout: Layout, beside: Sequence[str] = ()) -> int:
    """What a record has and its turns do not use (0: nothing). ``beside``: of ``_KEYS``, what its source left out."""
    name = layout_of(record, layout.captions)
    if not name:
        return 0
    layout_keys = {*RECORD_LAYOUTS[name].keys(record), *(() if name in _CHATS else _OF_CHATS)}
    keys = [key for key in _KEYS if key in record and key not in layout_keys and record[key] not in (None, "", [])]
    if name == "conversations":
        names = [turn.get("image_path") for turn in record["conversations"] if isinstance(turn, Mapping)]
        for key in {"image", "images"} & {*keys}:  # turns name the images of a sample of a tar
            images = record[key] if isinstance(record[key], list) else [record[key]]
            if all(image in names for image in images):
                keys.remove(key)
    others = [record[key] for key in record if key not in _KEYS] if name in _TEXTS and not _IMAGES & {*record} else []
    if any(isinstance(value, str) and _IMAGE_FILE.fullmatch(value) for value in others):
        keys.append(OTHER_IMAGE)
    every = (*keys, *beside)
    return 1 + _NAMES.index(name) + sum(1 << _SHIFT + _KEYS.index(key) for key in every) if every else 0


def unused_records(codes: Array) -> dict[str, Array]:
    """What records do not use, as words, and their numbers, most first. ``codes`` [N]: ``unused_keys`` of each."""
    values, inverse = np.unique(codes, return_inverse=True)
    records = {}
    for number, name in enumerate(_NAMES, start=1):
        for bit, key in enumerate(_KEYS):
            here = ((values & (1 << _SHIFT) - 1) == number) & (values >> _SHIFT + bit & 1 == 1)
            if here.any():
                text = key if "`" in key or " " in key else f"`{key}`"
                records[f"{text}, which the layout `{name}` does not use"] = np.flatnonzero(here[inverse])
    return dict(sorted(records.items(), key=lambda one: -len(one[1])))
