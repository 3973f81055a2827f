"""A source of records: what index, planning and loading use of a data file, whatever its format.

A source is made from one file or folder, without reading it. ``scan`` looks for the records once; what it returns is
kept with the index, and ``use`` receives it again at every later start. A record is a ``Row``: its position, its
values, and the bytes that its digest is of. Sources are sent to loading processes, so they hold no open file.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from unigen_ds.core.errors import DataError
from unigen_ds.core.json_values import json_values
from unigen_ds.data.cache.array_cache import cache_folder, contents_digest, fingerprint
from unigen_ds.data.images.image_files import StoredImage
from unigen_ds.data.records.records import Captions

Arrays = Mapping[str, NDArray[Any]]
"""Where the records of a source are; names that no column of ``Counts`` has."""


class Row:
    """One record that was read: its values; images inside of the file are ``StoredImage``. ``where``, as text
    ``train.jsonl:17`` or ``part-3.parquet row 9``, begins every message about it. ``unused``: what it leaves out, of
    ``unused_keys``.
    """

    folder: Path | None = None
    """That of its file, where its source has several files in several folders."""

    def __init__(self, record: Mapping[str, Any], where: object, unused: Sequence[str] = ()) -> None:
        self.record, self.where, self.unused = record, where, unused

    @property
    def values(self) -> bytes:
        """``record``, whatever the order of its keys and the format of its file; images by their digest."""
        try:
            return json.dumps(json_values(self.record, _plain), sort_keys=True, separators=(",", ":")).encode()
        except RecursionError as error:
            raise DataError(f"{self.where}: its values are nested too deeply") from error

    @property
    def content(self) -> bytes:
        """What the digest of the record is of. Equal records of one format have equal contents."""
        return self.values


def _plain(value: Any) -> Any:
    """Return what JSON can write of a value that is no mapping and no list."""
    if isinstance(value, StoredImage):
        return {"image": value.digest}
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"bytes": xxhash.xxh3_128(bytes(value)).hexdigest()}
    return value.isoformat() if isinstance(value, (datetime.date, datetime.time)) else str(value)


class Names(Sequence[str]):
    """Many short texts as two arrays, as the index keeps them: names of files, of members of a tar."""

    def __init__(self, arrays: Arrays, kind: str) -> None:
        self._letters, self._ends = arrays[f"{kind}_letters"], arrays[f"{kind}_ends"]

    @staticmethod
    def to_arrays(texts: Sequence[str], kind: str) -> Arrays:
        """What the constructor gets, of any texts, also those of bytes that are no UTF-8."""
        contents = [text.encode("utf-8", "surrogateescape") for text in texts]
        ends = np.cumsum([len(one) for one in contents], dtype=np.int64)
        return {f"{kind}_letters": np.frombuffer(b"".join(contents), np.uint8), f"{kind}_ends": ends}

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        if index >= len(self):
            raise IndexError(index)
        start = int(self._ends[index - 1]) if index else 0
        return self._letters[start : int(self._ends[index])].tobytes().decode("utf-8", "surrogateescape")


class RecordSource:
    """Records of one file or folder, by number.

    Args:
        path: the file or folder.
        label: how messages call it; None: its path.
        folder: where it may keep files of its own (an unpacked copy); None: nowhere.
    """

    captions: ClassVar[Captions | None] = "generate"
    """What an image with a text teaches, where the data set does not set it (``records.parse_record``)."""
    suffixes: ClassVar[Sequence[str]] = ()
    """Suffixes of this format's files, in lower case; each file becomes one source. Empty: a folder becomes one."""
    batch: ClassVar[int] = 256
    """Records that are read and planned together: few, where they have large values."""

    def __init__(self, path: Path, *, label: str | None = None, folder: Path | None = None) -> None:
        self.path, self.label, self.folder = Path(path), label or str(path), folder
        self.origin = self.path
        """What the config names: of an unpacked copy the compressed file."""
        self.options: Mapping[str, Any] = {}
        self.notes: Sequence[str] = ()
        """What of the files is not read as records, with numbers, for the log; known after ``use``."""
        self.columns: Mapping[str, str] = {}
        """Names of the records' keys -> those of a layout, as the data set has them: ``records.Layout`` reads them."""
        self.several_folders = False
        """Whether records are of several folders, in which their paths begin."""

    @property
    def title(self) -> str:
        """All of it, in the log."""
        return self.label

    @property
    def files(self) -> Sequence[Path]:
        """Files whose content decides what the records are."""
        return (self.path,)

    @property
    def root(self) -> Path:
        """The folder that relative image paths start from."""
        return self.origin.parent

    def index_folder(self, cache_dir: Path | None) -> Path | None:
        """Where its index is cached; None: nowhere."""
        return cache_folder(self.origin, cache_dir)

    def content_digest(self, folder: Path | None) -> str:
        """Digest of all bytes of the files, before records are read. ``folder``: where it may be kept."""
        return contents_digest(self.files, folder, name=self.origin.name)

    @property
    def fingerprint(self) -> str:
        """Changes with every setting by which the same files are read as other records."""
        return f"{type(self).__name__} {sorted(self.options.items())}" if self.options else type(self).__name__

    def identity(self, content: str) -> tuple[object, ...]:
        """What the fingerprint of the data has of this source. ``content``: the digest of ``files``."""
        return content, self.fingerprint

    def scan(self) -> Arrays:
        """Find the records. Raises ``DataError`` where there is none, or where the file cannot be read."""
        raise NotImplementedError(f"{type(self).__name__}.scan")

    def use(self, arrays: Arrays) -> None:
        """Take what ``scan`` returned, in this process or at an earlier start."""
        raise NotImplementedError(f"{type(self).__name__}.use")

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__}.__len__")

    def read(self, start: int, stop: int) -> Sequence[Row]:
        """Records ``start .. stop``. Raises ``DataError`` where the file is no longer there, and ``MalformedRecord``
        where one of them alone cannot be read.
        """
        raise NotImplementedError(f"{type(self).__name__}.read")

    def file_of(self, index: int) -> tuple[str, int]:
        """The file that has a record, as messages name it, and the record's number there, from 0."""
        return self.label, index


class Sources(RecordSource):
    """Several sources of one format, one after the other. ``name``: how messages call all of them."""

    def __init__(self, sources: Sequence[RecordSource], name: str) -> None:
        super().__init__(sources[0].path, label=name, folder=sources[0].folder)
        self.origin = sources[0].origin
        self.sources = tuple(sources)
        self.captions, self.batch = sources[0].captions, sources[0].batch  # type: ignore[misc]
        self._bounds = np.zeros(1, np.int64)
        first = os.path.abspath(sources[0].root)
        self._folders = [None if os.path.abspath(source.root) == first else source.root for source in sources]
        self.several_folders = any(folder is not None for folder in self._folders)

    @property
    def files(self) -> Sequence[Path]:
        return tuple(file for source in self.sources for file in source.files)

    @property
    def root(self) -> Path:
        return self.sources[0].root

    @property
    def fingerprint(self) -> str:
        return fingerprint(*(source.fingerprint for source in self.sources))

    def scan(self) -> Arrays:
        scans: list[Arrays] = []
        for source in self.sources:
            scans.append(source.scan())
            source.use(scans[-1])
        arrays: dict[str, NDArray[Any]] = {}
        for name in sorted(set().union(*scans)):
            parts = [scan.get(name, np.empty(0, np.int64)) for scan in scans]
            arrays[name] = np.concatenate(parts)
            arrays[f"{name}_of_each"] = np.asarray([len(part) for part in parts], np.int64)
        return arrays

    def use(self, arrays: Arrays) -> None:
        names = [name for name in arrays if f"{name}_of_each" in arrays]
        stops = {name: np.cumsum(arrays[f"{name}_of_each"]) for name in names}
        for k, source in enumerate(self.sources):
            source.use({name: arrays[name][stops[name][k - 1] if k else 0 : stops[name][k]] for name in names})
        self._bounds = np.cumsum([0, *map(len, self.sources)])
        self.notes = [note for source in self.sources for note in source.notes]

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def read(self, start: int, stop: int) -> Sequence[Row]:
        records: list[Row] = []
        while start < stop:
            k = int(np.searchsorted(self._bounds, start, side="right")) - 1
            first, end = int(self._bounds[k]), min(stop, int(self._bounds[k + 1]))
            for record in self.sources[k].read(start - first, end - first):
                record.folder = self._folders[k] or record.folder
                records.append(record)
            start = end
        return records

    def file_of(self, index: int) -> tuple[str, int]:
        k = int(np.searchsorted(self._bounds, index, side="right")) - 1
        return self.sources[k].file_of(index - int(self._bounds[k]))
