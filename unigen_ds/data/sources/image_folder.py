"""A folder of images with captions: a ``.txt`` beside each image, or ``metadata.csv`` / ``metadata.jsonl`` for all.

The records are those of a JSONL file of paths: ``{image: path, caption: text}``. A row of the metadata has
``file_name``, and ``caption``, ``text``, ``prompt`` or ``text_prompt``, or any layout of ``records``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from unigen_ds.core.errors import DataError
from unigen_ds.core.registry import SOURCES
from unigen_ds.data.records import shown_value
from unigen_ds.data.sources.base import Arrays, FoundRecord, RecordSource, Row
from unigen_ds.data.sources.csv_rows import CsvSource
from unigen_ds.data.sources.json_lines import JsonSource, read_bytes
from unigen_ds.data.sources.names import Names
from unigen_ds.data.sources.webdataset import IMAGES

METADATA = ("metadata.csv", "metadata.jsonl")
_CAPTIONS = ("text", "prompt", "text_prompt")
_LAYOUTS = ("conversations", "messages", "texts", "captions", "caption")


def is_image_folder(folder: Path) -> bool:
    """Whether a folder has images, or metadata of images."""
    return any((folder / name).is_file() for name in METADATA) or next(_images(folder), None) is not None


def _images(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.suffix[1:].lower() in IMAGES and not hidden and path.is_file():
            yield path


@SOURCES.register_module(name="image_folder")
class ImageFolderSource(RecordSource):
    """One folder, with those below it."""

    fingerprint = "image_folder"

    def __init__(self, path: Path, *, label: str | None = None, folder: Path | None = None) -> None:
        super().__init__(path, label=label, folder=folder)
        self._rows: RecordSource | None = None
        self._names, self._without = Names.of(()), 0
        given = [name for name in METADATA if (self.path / name).is_file()]
        if len(given) > 1:
            raise DataError(f"folder {self.path} has {' and '.join(given)}", allowed="one of them")
        if given:
            kind = CsvSource if given[0].endswith(".csv") else JsonSource
            self._rows = kind(self.path / given[0], label=f"{self.label}/{given[0]}")
        self._captions: tuple[Path, ...] = () if given else self._texts()

    def _texts(self) -> tuple[Path, ...]:
        """The caption of each image that has one, in the order of their names."""
        return tuple(sorted(text for image in _images(self.path) if (text := image.with_suffix(".txt")).is_file()))

    @property
    def root(self) -> Path:
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
            return {**arrays, "without_caption": np.asarray([sum(name not in named for name in images)], np.int64)}
        found = [name for name in images if (self.path / name).with_suffix(".txt").is_file()]
        if not found:
            raise DataError(
                f"folder {self.path} has {len(images):,} images and no captions",
                allowed=f"a .txt file beside each image, or {' or '.join(METADATA)} with file_name and text",
            )
        names = Names.of(found)
        left = np.asarray([len(images) - len(found)], np.int64)
        return {"image_letters": names.letters, "image_name_ends": names.ends, "without_caption": left}

    def use(self, arrays: Arrays) -> None:
        self._without = int(arrays["without_caption"].sum())
        if self._rows is not None:
            self._rows.use(arrays)
        else:
            self._names = Names(arrays["image_letters"], arrays["image_name_ends"])

    def notes(self) -> Sequence[str]:
        where = "have no .txt file beside them" if self._rows is None else f"are not in {self._rows.path.name}"
        return [f"{self._without:,} images {where}: they are not used"] if self._without else []

    def __len__(self) -> int:
        return len(self._names) if self._rows is None else len(self._rows)

    def read(self, start: int, stop: int) -> Sequence[FoundRecord]:
        if self._rows is not None:
            return [self._listed(entry) for entry in self._rows.read(start, stop)]
        return [self._beside(self._names[i]) for i in range(start, stop)]

    def _beside(self, name: str) -> FoundRecord:
        text = (self.path / name).with_suffix(".txt")
        where = f"{self.label}/{text.relative_to(self.path).as_posix()}"
        try:
            caption = read_bytes(text, 0, -1).decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: byte {error.start} is no UTF-8") from error
        return Row({"image": name, "caption": caption}, where)

    def _listed(self, entry: FoundRecord) -> FoundRecord:
        record = {key: value for key, value in entry.record.items() if key != "file_name"}
        record["image"] = self._file_name(entry)
        if not any(key in record for key in _LAYOUTS):
            given = [key for key in _CAPTIONS if key in record]
            if not given:
                raise DataError(f"{entry.where}: it has no caption", allowed=", ".join(("caption", *_CAPTIONS)))
            record["caption"] = record.pop(given[0])
        return Row(record, entry.where)

    def _file_name(self, entry: FoundRecord) -> str:
        name = entry.record.get("file_name")
        if not isinstance(name, str) or not name:
            shown = "missing" if name is None else shown_value(name)
            raise DataError(f"{entry.where}: file_name is {shown}", allowed="the path of an image in the folder")
        return name
