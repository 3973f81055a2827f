"""A folder of images with captions: a ``.txt`` beside each image, or ``metadata.csv`` / ``metadata.jsonl`` for all.

The records are those of a JSONL file of paths: ``{image: path, caption: text}``. A row of the metadata has
``file_name``, and ``caption``, ``text``, ``prompt`` or ``text_prompt``, or any layout of ``records``; ``columns`` may
give them other names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from unigen_ds.config.registry import SOURCES
from unigen_ds.core.errors import DataError, short_value
from unigen_ds.data.images.image_files import lost_file_error
from unigen_ds.data.records.unusable import MalformedRecord, decode_text
from unigen_ds.data.sources.base import Arrays, Names, RecordSource, Row
from unigen_ds.data.sources.text_files import CsvSource, JsonSource
from unigen_ds.data.sources.webdataset import IMAGES

METADATA = ("metadata.csv", "metadata.jsonl")
_CAPTIONS = ("text", "prompt", "text_prompt")
_LAYOUTS = ("conversations", "messages", "texts", "captions", "caption")
_FILE_NAME = "file_name"


def visible(folder: Path) -> Iterator[Path]:
    """Return what is in a folder and below, without hidden files and folders."""
    for path in folder.rglob("*"):
        if not any(part.startswith(".") for part in path.relative_to(folder).parts):
            yield path


def images_in(folder: Path) -> Iterator[Path]:
    return (path for path in visible(folder) if path.suffix[1:].lower() in IMAGES and path.is_file())


@SOURCES.register_module(name="image_folder")
class ImageFolderSource(RecordSource):
    """One folder, with those below it."""

    fingerprint = "image_folder"

    def __init__(self, path: Path, *, label: str | None = None, folder: Path | None = None) -> None:
        super().__init__(path, label=label, folder=folder)
        metadata = [path for name in METADATA if (path := self.path / name).is_file()]
        if len(metadata) > 1:
            raise DataError(f"folder {self.path} has {' and '.join(METADATA)}", allowed="one of them")
        self._rows: RecordSource | None = None
        self._captions: dict[str, Path] = {}
        """The file of the caption of each image that has one."""
        if metadata:
            kind = CsvSource if metadata[0].suffix == ".csv" else JsonSource
            self._rows = kind(metadata[0], label=f"{self.label}/{metadata[0].name}")
            return
        for image in sorted(images_in(self.path), key=self._relative):
            if text := next((one for suffix in (".txt", ".TXT") if (one := image.with_suffix(suffix)).is_file()), None):
                self._captions[self._relative(image)] = text

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.path).as_posix()

    @property
    def root(self) -> Path:
        return self.path

    @property
    def files(self) -> Sequence[Path]:
        return self._rows.files if self._rows is not None else tuple(sorted(self._captions.values()))

    def scan(self) -> Arrays:
        images = sorted(map(self._relative, images_in(self.path)))
        if self._rows is not None:
            rows, arrays = self._rows, self._rows.scan()
            rows.use(arrays)
            names = {self._file_name(entry) for i in range(len(rows)) for entry in rows.read(i, i + 1)}
            others, why = sum(name not in names for name in images), "are not in the metadata"
        else:
            if not self._captions:
                raise DataError(
                    f"folder {self.path} has {len(images):,} images and no captions",
                    allowed=f"a .txt file beside each image, or {' or '.join(METADATA)} with file_name and text",
                )
            arrays = Names.to_arrays([*self._captions], "image")
            others, why = len(images) - len(self._captions), "have no caption beside them"
        notes = [f"{others:,} images {why}: they are not used"] if others else []
        read, unread = set(self.files), Counter[str]()
        for path in visible(self.path):
            suffix = path.suffix.lower()
            if path.is_symlink() and not path.exists():
                unread[f"{suffix} (a link to a file that is not there)".lstrip()] += 1
            elif path.is_file() and suffix[1:] not in IMAGES and path not in read:
                unread[suffix or "without a suffix"] += 1
        if unread:
            each = ", ".join(f"{number:,} {kind}" for kind, number in unread.items())
            notes.append(f"files that are not read: {each}")
        return {**arrays, **Names.to_arrays(notes, "note")}

    def use(self, arrays: Arrays) -> None:
        self.notes = Names(arrays, "note")
        if self._rows is not None:
            self._rows.use(arrays)
        else:
            self._names = Names(arrays, "image")

    def __len__(self) -> int:
        return len(self._names) if self._rows is None else len(self._rows)

    def read(self, start: int, stop: int) -> Sequence[Row]:
        if self._rows is not None:
            return [self._list(entry) for entry in self._rows.read(start, stop)]
        return [self._beside(self._names[i]) for i in range(start, stop)]

    def _beside(self, name: str) -> Row:
        text = self._captions[name]
        where = f"{self.label}/{self._relative(text)}"
        try:
            raw = text.read_bytes()
        except OSError as error:
            raise lost_file_error(text, error.strerror) from error
        return Row({"image": name, "caption": decode_text(raw, where).strip()}, where)

    def _list(self, entry: Row) -> Row:
        record = {key: value for key, value in entry.record.items() if key != _FILE_NAME}
        record["image"] = self._file_name(entry)
        new_names = {name for key, name in self.columns.items() if key in record}
        caption = next((key for key in _CAPTIONS if key in record), None)
        if caption and not new_names & {*_LAYOUTS, *_CAPTIONS} and not record.keys() & set(_LAYOUTS):
            record["caption"] = record.pop(caption)
        return Row(record, entry.where)

    def _file_name(self, entry: Row) -> str:
        """Return the path of an image, from the folder."""
        key = next((key for key, name in self.columns.items() if name == _FILE_NAME), _FILE_NAME)
        name = entry.record.get(key)
        if not isinstance(name, str) or not name:
            raise MalformedRecord(
                f"{entry.where}: {key} is {'missing' if name is None else short_value(name)}",
                allowed="the path of an image in the folder",
                remedy=f"columns={{'name in the file': '{_FILE_NAME}'}}" if name is None else None,
            )
        return name
