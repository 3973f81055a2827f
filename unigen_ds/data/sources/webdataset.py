"""WebDataset: tar files whose members with one name and different suffixes are a record. Indexed once, then read at
random: a member is a range of bytes of the tar.

The name ends at the first dot of the last part: ``photos/0001.seg.png`` belongs to ``photos/0001``. Images become
images, ``.txt`` and ``.caption`` the text, the object of a ``.json`` the record itself, in any layout; an image that
it names (``0001.jpg``, in whatever folder, or ``jpg``) is the member.
Members need not be sorted. Pickled ones are never loaded.
"""

from __future__ import annotations

import json
import tarfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from unigen_ds.config.registry import SOURCES, checked
from unigen_ds.core.errors import DataError
from unigen_ds.data.images.stored_image import Span, StoredImage
from unigen_ds.data.records.data_file import MalformedRecord
from unigen_ds.data.records.unused import BESIDE_JSON, IMAGE_BESIDE_JSON, SECOND_TEXT
from unigen_ds.data.sources.base import Arrays, FoundRecord, RecordSource, Row
from unigen_ds.data.sources.names import Names
from unigen_ds.data.sources.unpacked import AGAIN

IMAGES = frozenset((
    "jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm", "jp2", "avif", "ico", "tga", "pcx", "qoi",
))  # fmt: skip
"""Last suffixes of images."""
PICKLED = frozenset(("pyd", "pkl", "pickle", "pth", "pt", "joblib", "dill"))
_TEXTS = ("txt", "caption", "text")
_SHOWN = 5
_IMAGE_KEYS = (
    "image", "images", "image_path", "image_list", "input_image", "input_images", "output_image", "output_images",
    "image_url", "url", "path",
)  # fmt: skip
"""Keys of a JSON object whose texts may be names of members."""


@SOURCES.register_module(name="webdataset")
class WebDatasetSource(RecordSource):
    """One tar file.

    Args:
        pickled: members that are pickled (``.pyd``, ``.pickle``, ``.pth``, ...) are an ``error``, or left out with
            their number (``skip``); they are never loaded.
    """

    suffixes = (".tar", ".tgz")
    batch = 64

    @checked("format")
    def __init__(
        self,
        path: Path,
        *,
        label: str | None = None,
        folder: Path | None = None,
        pickled: Literal["error", "skip"] = "error",
    ) -> None:
        super().__init__(path, label=label, folder=folder)
        self.pickled = pickled
        if not self.path.is_file():
            raise DataError(f"data file {self.path} does not exist")
        self._spans = np.empty((0, 2), np.int64)
        self._firsts = np.zeros(1, np.int64)
        self._names = Names.of(())
        self._left_out = np.empty(0, np.int64)
        self._reasons = Names.of(())

    @property
    def fingerprint(self) -> str:
        return f"webdataset, pickled: {self.pickled}"

    @property
    def cache_facts(self) -> tuple[object, ...]:
        """An index of before has no images that a ``.json`` does not name, or names with a folder."""
        return (self.fingerprint, IMAGE_BESIDE_JSON, "names with a folder")

    def scan(self) -> Arrays:
        groups: dict[str, dict[str, tuple[int, int]]] = {}
        left_out: Counter[str] = Counter()
        for member in self._members():
            folder, slash, base = member.name.rpartition("/")
            stem, dot, suffix = base.partition(".")
            last = suffix.rpartition(".")[2].lower()
            if not member.isreg() or member.issparse():
                left_out["folders, links and other special members"] += not member.isdir()
            elif last in PICKLED:
                if self.pickled == "error":
                    raise DataError(
                        f"{self.label}, member {member.name}: it is pickled, and could execute anything if loaded",
                        allowed="images, .json, .txt: docs/data.md",
                        remedy="format=dict(type='webdataset', pickled='skip') leaves them out, and counts them",
                    )
                left_out[f"pickled (.{last}), never loaded"] += 1
            elif not stem or not dot or not (last in IMAGES or last == "json" or suffix.lower() in _TEXTS):
                left_out[f"of another kind (.{last})" if stem and dot else "without a suffix"] += 1
            else:
                group = groups.setdefault(folder + slash + stem, {})
                if suffix in group:
                    raise DataError(
                        f"{self.label} has the member {member.name} twice", remedy="write the tar again, without one"
                    )
                group[suffix] = (member.offset_data, member.size)
        if not groups:
            raise DataError(f"data file {self.path} holds no record: {self._told(left_out) or 'it is empty'}")
        members = [(f"{key}.{suffix}", span) for key, group in groups.items() for suffix, span in sorted(group.items())]
        names, reasons = Names.of([name for name, _ in members]), Names.of(list(left_out))
        return {
            "member_spans": np.asarray([span for _, span in members], np.int64).reshape(-1),
            "member_letters": names.letters,
            "member_name_ends": names.ends,
            "members_of_record": np.asarray([len(group) for group in groups.values()], np.int64),
            "left_out": np.asarray(list(left_out.values()), np.int64),
            "left_out_letters": reasons.letters,
            "left_out_name_ends": reasons.ends,
        }

    def _members(self) -> Sequence[tarfile.TarInfo]:
        """All of them. Python's reader ends without a message at a damaged header, so what follows is checked here."""
        members: list[tarfile.TarInfo] = []
        end = self.path.stat().st_size
        try:
            with tarfile.open(self.path, "r:") as tar:
                while (member := tar.next()) is not None:
                    stop = member.offset_data + (member.size if member.isreg() else 0)
                    if member.size < 0 or stop > end:
                        raise DataError(f"data file {self.path} ends within its member {member.name}", remedy=AGAIN)
                    members.append(member)
                    tar.members = []  # type: ignore[attr-defined]  # it keeps each, and is asked for none again
                last = tar.offset
        except DataError:
            raise
        except MemoryError:
            raise
        except Exception as error:  # a damaged header raises anything
            raise DataError(f"data file {self.path} is no whole tar file: {error}", remedy=AGAIN) from error
        self._check_end(last, end)
        return members

    def _check_end(self, last: int, end: int) -> None:
        """After the last member are blocks of zeros alone, and at least one. ``last``: the first byte after it."""
        with self.path.open("rb") as stream:
            stream.seek(last)
            first = stream.read(tarfile.BLOCKSIZE)
            rest = any(any(block) for block in iter(lambda: stream.read(1 << 20), b""))
        if len(first) < tarfile.BLOCKSIZE:
            raise DataError(
                f"data file {self.path} ends at byte {end:,} without the end mark of a tar: a part of it is missing",
                remedy="copy or write it again",
            )
        if any(first) or rest:
            raise DataError(
                f"data file {self.path} has bytes that are no member after byte {last:,}: a damaged header, or several"
                " tars in one file",
                remedy="copy or write it again; give several tars as several files",
            )

    def use(self, arrays: Arrays) -> None:
        self._spans = arrays["member_spans"].reshape(-1, 2)
        self._names = Names(arrays["member_letters"], arrays["member_name_ends"])
        self._firsts = np.concatenate([[0], np.cumsum(arrays["members_of_record"])])
        self._left_out = arrays["left_out"]
        self._reasons = Names(arrays["left_out_letters"], arrays["left_out_name_ends"])

    def notes(self) -> Sequence[str]:
        left_out = {self._reasons[i]: int(number) for i, number in enumerate(self._left_out) if number}
        return [f"members that are not read: {self._told(left_out)}"] if left_out else []

    def _told(self, left_out: Mapping[str, int]) -> str:
        most = sorted(left_out.items(), key=lambda item: -item[1])
        return ", ".join(f"{number} {reason}" for reason, number in most[:_SHOWN] if number)

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def read(self, start: int, stop: int) -> Sequence[FoundRecord]:
        return [self._entry(i) for i in range(start, stop)]

    def _entry(self, index: int) -> FoundRecord:
        members: dict[str, Span] = {}
        key = ""
        for i in range(int(self._firsts[index]), int(self._firsts[index + 1])):
            name = self._names[i]
            folder, slash, base = name.rpartition("/")
            stem, _, suffix = base.partition(".")
            key = folder + slash + stem
            members[suffix] = Span(self.path, int(self._spans[i, 0]), int(self._spans[i, 1]))
        where = f"{self.label} sample {key}"
        images = {
            suffix: StoredImage(f"{where}: {suffix}", span)
            for suffix, span in members.items()
            if suffix.rpartition(".")[2].lower() in IMAGES
        }
        record: dict[str, Any] = {}
        for suffix, span in members.items():
            if suffix.rpartition(".")[2].lower() == "json":
                record |= self._object(span, f"{where}: {suffix}")
        stem = key.rpartition("/")[2]
        named = {**images, **{f"{stem}.{suffix}": image for suffix, image in images.items()}}
        used: set[str] = set()
        try:
            record = _resolved(record, named, used)
        except RecursionError as error:
            raise MalformedRecord(f"{where}: its values are nested too deeply") from error
        texts = [suffix for suffix in members if suffix.lower() in _TEXTS]
        read = sorted(members.keys() & set(_TEXTS) or _in_capitals(members, record), key=_before)[:1]
        of_json = {key: record[key] for key in ("caption", "text") if isinstance(record.get(key), str)}
        for suffix in read:
            record["caption" if images else "text"] = self._text(members[suffix], f"{where}: {suffix}")
        beside = [suffix for suffix in images if not {suffix, f"{stem}.{suffix}"} & used]
        if images and not {"image", "images", "image_path", "image_list", "instruction"} & record.keys():
            listed, beside = list(images.values()), []
            record |= {"image": listed[0]} if len(listed) == 1 else {"images": listed}
        if "caption" in record and "text" in record and images:
            del record["text"]  # of the .json: the .txt has the caption
        unused = [SECOND_TEXT] if len(texts) > len(read) else []
        own = record.get("caption" if images else "text")
        if any(text != record.get(key) and text.strip() not in ("", own) for key, text in of_json.items()):
            unused.append(BESIDE_JSON)
        if beside:
            unused.append(IMAGE_BESIDE_JSON)
        return Row(record, where, unused)

    def _text(self, span: Span, where: str) -> str:
        try:
            return span.read().decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            remedy = "write this member as UTF-8, and the tar again"
            raise MalformedRecord(f"{where}: byte {error.start} is no UTF-8", remedy=remedy) from error

    def _object(self, span: Span, where: str) -> dict[str, Any]:
        try:
            found = json.loads(span.read())
        except (ValueError, RecursionError) as error:
            raise MalformedRecord(f"{where}: no valid JSON: {error}") from error
        if not isinstance(found, dict):
            raise MalformedRecord(f"{where}: it is a {type(found).__name__}", allowed="a JSON object")
        return found


def _in_capitals(members: Mapping[str, Span], record: Mapping[str, Any]) -> list[str]:
    """Texts with a suffix in capitals, of a sample that has nothing else to learn from."""
    return [] if record else [suffix for suffix in members if suffix.lower() in _TEXTS]


def _before(suffix: str) -> tuple[int, str]:
    """The order in which the texts of a record are looked for: the first one is read."""
    return _TEXTS.index(suffix.lower()), suffix


def _resolved(value: Any, images: Mapping[str, StoredImage], used: set[str], named: bool = False) -> Any:
    """``value`` with the images in place of their names, under the keys that images have; ``used`` gets these names."""
    if isinstance(value, str):
        name = value if value in images else value.rpartition("/")[2]
        if not named or name not in images or ("." not in name and name != value):
            return value
        used.add(name)
        return images[name]
    if isinstance(value, list):
        return [_resolved(one, images, used, named) for one in value]
    if isinstance(value, dict):
        return {key: _resolved(one, images, used, key in _IMAGE_KEYS) for key, one in value.items()}
    return value
