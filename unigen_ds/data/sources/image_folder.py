"""A folder of images with captions: a ``.txt`` beside each image, or ``metadata.csv`` / ``metadata.jsonl`` for all.

The records are those of a JSONL file of paths: ``{image: path, caption: text}``. A row of the metadata has
``file_name``, and ``caption``, ``text``, ``prompt`` or ``text_prompt``, or any layout of ``records``; ``columns`` may
give them other names. Metadata in folders below, each with names from its own folder, are read where there is none at
the top.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unigen_ds.config.registry import SOURCES
from unigen_ds.core.errors import DataError
from unigen_ds.data.records.data_file import MalformedRecord, no_utf8
from unigen_ds.data.records.turn import format_value
from unigen_ds.data.sources.base import Arrays, FoundRecord, Joined, RecordSource, Row
from unigen_ds.data.sources.csv_rows import CsvSource
from unigen_ds.data.sources.json_lines import JsonSource, read_bytes
from unigen_ds.data.sources.names import Names
from unigen_ds.data.sources.webdataset import IMAGES

METADATA = ("metadata.csv", "metadata.jsonl")
_CAPTIONS = ("text", "prompt", "text_prompt")
_LAYOUTS = ("conversations", "messages", "texts", "captions", "caption")
_FILE_NAME = "file_name"
_TEXTS = (".txt", ".TXT")
"""Suffixes of captions: the second where no image has one with the first."""


def is_image_folder(folder: Path) -> bool:
    """Whether a folder has images, or metadata of images."""
    return any((folder / name).is_file() for name in METADATA) or next(_images(folder), None) is not None


def metadata_below(folder: Path) -> list[Path]:
    """Metadata of images in the folders below, by their names and their first line, in order."""
    found = sorted(path for name in METADATA for path in folder.rglob(name) if not _hidden(path, folder))
    return [path for path in found if path.parent != folder and _names_files(path)]


def _names_files(metadata: Path) -> bool:
    with metadata.open("rb") as stream:
        return _FILE_NAME.encode() in stream.readline(1 << 16)


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _images(folder: Path) -> Iterator[Path]:
    for path in _visible(folder):
        if path.suffix[1:].lower() in IMAGES and path.is_file():
            yield path


def _visible(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if not _hidden(path, folder):
            yield path


def _others(folder: Path, used: Collection[str]) -> Counter[str]:
    """Files that are neither images nor ``used``, by their kind; links that lead nowhere, too."""
    found: Counter[str] = Counter()
    for path in _visible(folder):
        if path.is_file() and path.suffix[1:].lower() not in IMAGES:
            if path.relative_to(folder).as_posix() not in used:
                found[path.suffix.lower() or "without a suffix"] += 1
        elif path.is_symlink() and not path.exists():
            found[f"{path.suffix.lower()} (a link to a file that is not there)".lstrip()] += 1
    return found


@SOURCES.register_module(name="image_folder")
class ImageFolderSource(RecordSource):
    """One folder, with those below it."""

    fingerprint = "image_folder"

    def __init__(self, path: Path, *, label: str | None = None, folder: Path | None = None) -> None:
        super().__init__(path, label=label, folder=folder)
        self._rows: RecordSource | None = None
        self._names, self._without = Names.of(()), 0
        self._not_read_of: dict[str, int] = {}
        given = [path for name in METADATA if (path := self.path / name).is_file()] or metadata_below(self.path)
        double = [path.parent for path in given if sum(other.parent == path.parent for other in given) > 1]
        if double:
            raise DataError(f"folder {double[0]} has {' and '.join(METADATA)}", allowed="one of them")
        if given:
            rows = [self._metadata(path) for path in given]
            self._rows = rows[0] if len(rows) == 1 else Joined(rows, self.label)
        self._suffix = _TEXTS[0]
        self._captions: tuple[Path, ...] = ()
        for suffix in () if given else _TEXTS:
            if not self._captions:
                self._suffix, self._captions = suffix, self._texts(suffix)

    def _metadata(self, path: Path) -> RecordSource:
        kind = CsvSource if path.suffix == ".csv" else JsonSource
        return kind(path, label=f"{self.label}/{path.relative_to(self.path).as_posix()}")

    def _texts(self, suffix: str) -> tuple[Path, ...]:
        """The caption of each image that has one, in the order of their names."""
        return tuple(sorted(text for image in _images(self.path) if (text := image.with_suffix(suffix)).is_file()))

    @property
    def root(self) -> Path:
        return self.path

    @property
    def own_root(self) -> Path:
        return self.path

    @property
    def files(self) -> Sequence[Path]:
        return self._rows.files if self._rows is not None else self._captions

    def scan(self) -> Arrays:
        images = sorted(image.relative_to(self.path).as_posix() for image in _images(self.path))
        if self._rows is not None:
            arrays = self._rows.scan()
            self._rows.use(arrays)
            named = {self._file_name(entry) for i in range(len(self._rows)) for entry in self._rows.read(i, i + 1)}
            without = np.asarray([sum(name not in named for name in images)], np.int64)
            used = {path.relative_to(self.path).as_posix() for path in self._rows.files}
            return {**arrays, "without_caption": without, **self._not_read(named | used)}
        found = [name for name in images if (self.path / name).with_suffix(self._suffix).is_file()]
        if not found:
            raise DataError(
                f"folder {self.path} has {len(images):,} images and no captions",
                allowed=f"a .txt file beside each image, or {' or '.join(METADATA)} with file_name and text",
                remedy="a caption has the name of its image: photos/1.txt beside photos/1.jpg",
            )
        names = Names.of(found)
        left = np.asarray([len(images) - len(found)], np.int64)
        others = self._not_read({Path(name).with_suffix(self._suffix).as_posix() for name in found})
        return {"image_letters": names.letters, "image_name_ends": names.ends, "without_caption": left, **others}

    def _not_read(self, used: Collection[str]) -> Arrays:
        """Numbers and kinds of the files that are neither images nor ``used``."""
        found = _others(self.path, used)
        kinds = Names.of(list(found))
        numbers = np.asarray(list(found.values()), np.int64)
        return {"not_read": numbers, "not_read_letters": kinds.letters, "not_read_name_ends": kinds.ends}

    def use(self, arrays: Arrays) -> None:
        kinds = Names(arrays["not_read_letters"], arrays["not_read_name_ends"])
        self._not_read_of = {kinds[i]: number for i, number in enumerate(arrays["not_read"].tolist())}
        self._without = int(arrays["without_caption"].sum())
        if self._rows is not None:
            self._rows.use(arrays)
        else:
            self._names = Names(arrays["image_letters"], arrays["image_name_ends"])

    def notes(self) -> Sequence[str]:
        where = (
            f"have no {self._suffix} file beside them" if self._rows is None else f"are not in {self._rows.path.name}"
        )
        notes = [f"{self._without:,} images {where}: they are not used"] if self._without else []
        others = ", ".join(f"{number:,} {kind}" for kind, number in self._not_read_of.items())
        return [*notes, f"files that are not read: {others}"] if others else notes

    def __len__(self) -> int:
        return len(self._names) if self._rows is None else len(self._rows)

    def read(self, start: int, stop: int) -> Sequence[FoundRecord]:
        if self._rows is not None:
            return [self._listed(entry) for entry in self._rows.read(start, stop)]
        return [self._beside(self._names[i]) for i in range(start, stop)]

    def _beside(self, name: str) -> FoundRecord:
        text = (self.path / name).with_suffix(self._suffix)
        where = f"{self.label}/{text.relative_to(self.path).as_posix()}"
        try:
            caption = read_bytes(text, 0, -1).decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise no_utf8(text, where, error.start) from error
        return Row({"image": name, "caption": caption}, where)

    def _listed(self, entry: FoundRecord) -> FoundRecord:
        record = {key: value for key, value in entry.record.items() if key != _FILE_NAME}
        record["image"] = self._file_name(entry)
        renamed = {name for given, name in self.columns.items() if given in record}
        if not renamed.intersection((*_LAYOUTS, "text", "text_prompt")) and not any(key in record for key in _LAYOUTS):
            given = [key for key in _CAPTIONS if key in record]
            if not given:
                raise MalformedRecord(
                    f"{entry.where}: it has no caption, but {', '.join(map(str, record))}",
                    allowed=", ".join(("caption", *_CAPTIONS)),
                    remedy="columns={'name in the file': 'caption'}",
                )
            record["caption"] = record.pop(given[0])
        return Row(record, entry.where)

    def _file_name(self, entry: FoundRecord) -> str:
        """From the top folder: in its metadata it begins at theirs."""
        key = next((given for given, name in self.columns.items() if name == _FILE_NAME), _FILE_NAME)
        name = entry.record.get(key)
        if not isinstance(name, str) or not name:
            shown = "missing" if name is None else format_value(name)
            raise MalformedRecord(
                f"{entry.where}: {key} is {shown}",
                allowed="the path of an image in the folder",
                remedy=f"columns={{'name in the file': '{_FILE_NAME}'}}" if name is None else None,
            )
        position: Any = entry.where
        folder = position.path.parent
        top = folder == self.path or Path(name).is_absolute()
        return name if top else (folder / name).relative_to(self.path).as_posix()
