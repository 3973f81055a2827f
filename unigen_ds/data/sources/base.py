"""A source of records: what index, planning and loading use of a data file, whatever its format.

A source is made from one file or folder, without reading it. ``scan`` looks for the records once; what it returns is
kept with the index, and ``use`` receives it again at every later start. A record is a ``FoundRecord``: its position,
its values, and the bytes that its digest is of. Sources are sent to loading processes, so no value of theirs is an open
file.
"""

from __future__ import annotations

import datetime
import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from unigen_ds.core.errors import DataError
from unigen_ds.data.cache.array_cache import cache_folder, fingerprint
from unigen_ds.data.cache.content import contents_digest
from unigen_ds.data.images.image_files import Span, StoredImage
from unigen_ds.data.records.records import Captions
from unigen_ds.data.records.unusable import check_data_file

Arrays = Mapping[str, NDArray[Any]]
"""Where the records of a source are; names that no column of ``Counts`` has."""


class FoundRecord(Protocol):
    """One record that was read."""

    @property
    def where(self) -> object:
        """As text: ``train.jsonl:17``, ``part-3.parquet row 9``. It begins every message about the record."""
        ...

    @property
    def content(self) -> bytes:
        """What the digest of the record is of. Equal records of one format have equal contents."""
        ...

    @property
    def values(self) -> bytes:
        """``record`` as bytes, whatever the order of its keys and its white space. Raises as ``record`` does."""
        ...

    @property
    def record(self) -> Mapping[str, Any]:
        """Its values; images inside of the file are ``StoredImage``. Raises ``DataError`` where it cannot be read."""
        ...


class Row:
    """A record whose values are known: the entry of every format but JSON.

    ``unused``: what of the files is not in ``record``, by the names of ``unused.py``.
    """

    __slots__ = ("record", "unused", "where")

    def __init__(self, record: Mapping[str, Any], where: object, unused: Sequence[str] = ()) -> None:
        self.record, self.where, self.unused = record, where, unused

    @property
    def content(self) -> bytes:
        return canonical(self.record, self.where)

    values = content


class InFolder:
    """A record of one of several files, with the folder of its own file."""

    __slots__ = ("_entry", "folder")

    def __init__(self, entry: FoundRecord, folder: Path) -> None:
        self._entry, self.folder = entry, folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)


def folder_of(entry: FoundRecord) -> Path | None:
    """Return the folder of the record's data file, where it is another one than the source's ``root``."""
    return getattr(entry, "folder", None)


def canonical(record: Mapping[str, Any], where: object) -> bytes:
    """Return a record as bytes, whatever the order of its keys and the format of its file; images by their digest."""
    try:
        return json.dumps(_plain(record), sort_keys=True, separators=(",", ":")).encode()
    except RecursionError as error:
        raise DataError(f"{where}: its values are nested too deeply") from error


def _plain(value: Any) -> Any:
    """Return what JSON can write of a value."""
    if isinstance(value, StoredImage):
        return {"image": value.digest}
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"bytes": xxhash.xxh3_128(bytes(value)).hexdigest()}
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    return str(value)


class Position(NamedTuple):
    """Where a record begins. As text: ``train.jsonl:17``; the file is read for the line number only then."""

    path: Path
    offset: int
    label: str = ""
    """How the file is called; empty: by its name."""

    def __str__(self) -> str:
        with self.path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            file = self.path, status.st_ino, status.st_mtime_ns
            known, lines, at = getattr(_COUNTED, "last", (None, 1, 0))
            if known != file or at > self.offset:
                lines, at = 1, 0
            stream.seek(at)
            while at < self.offset and (block := stream.read(min(self.offset - at, 1 << 20))):
                lines += block.count(b"\n")
                at += len(block)
        _COUNTED.last = file, lines, at
        return f"{self.label or self.path}:{lines}"


_COUNTED = threading.local()
"""Of a thread the last file, line and byte: many bad records follow each other, and the file is read once for all."""


class Names:
    """Many short texts as two arrays, as the index keeps them: names of files, of members of a tar.

    Args:
        letters: all of them as bytes.
        ends: [N] where each of them ends.
    """

    def __init__(self, letters: NDArray[Any], ends: NDArray[Any]) -> None:
        self.letters, self.ends = letters, ends

    @classmethod
    def of(cls, texts: Sequence[str]) -> Names:
        """Return any texts, also those of bytes that are no UTF-8."""
        encoded = [text.encode("utf-8", "surrogateescape") for text in texts]
        ends = np.cumsum([len(one) for one in encoded], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        start = int(self.ends[index - 1]) if index else 0
        return self.letters[start : int(self.ends[index])].tobytes().decode("utf-8", "surrogateescape")


def counts_to_array(counts: Mapping[str, int]) -> NDArray[np.uint8]:
    """Return numbers by name as the index keeps them."""
    return np.frombuffer(json.dumps(counts).encode(), np.uint8)


def counts_from_array(array: NDArray[Any]) -> dict[str, int]:
    """Return what ``counts_to_array`` got."""
    return dict(json.loads(array.tobytes()))


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
    """Of the files of this format, in lower case; one source is made of each file. Empty: of a folder as a whole."""
    batch: ClassVar[int] = 256
    """Records that are read and planned together: few, where they have large values."""

    def __init__(self, path: Path, *, label: str | None = None, folder: Path | None = None) -> None:
        self.path, self.label, self.folder = Path(path), label or str(path), folder
        self.origin = self.path
        """What the config names: of an unpacked copy the compressed file."""
        self.options: Mapping[str, Any] = {}
        """Settings of the format, as the config has them."""
        self.columns: Mapping[str, str] = {}
        """Names of the records' keys -> those of a layout, as the data set has them: ``records.Layout`` reads them."""

    @property
    def title(self) -> str:
        """All of it, in the log."""
        return str(self.origin)

    @property
    def files(self) -> Sequence[Path]:
        """Files whose content decides what the records are."""
        return (self.path,)

    @property
    def root(self) -> Path:
        """The folder that relative image paths start from."""
        return self.origin.parent

    @property
    def own_root(self) -> Path | None:
        """``root``, where its images belong to it alone; None: it may be read together with others."""
        return None

    @property
    def several_folders(self) -> bool:
        """Whether some of its records are ``InFolder``: their file is in another folder than ``root``."""
        return False

    def index_folder(self, cache_dir: Path | None) -> Path | None:
        """Where its index is cached; None: nowhere."""
        return cache_folder(self.origin, cache_dir)

    def content_digest(self, folder: Path | None) -> str:
        """Of all its records, before they are read. ``folder``: where it may be kept."""
        return contents_digest(self.files, folder, name=self.origin.name)

    @property
    def fingerprint(self) -> str:
        """Changes with every setting by which the same files are read as other records."""
        return f"{type(self).__name__} {sorted(self.options.items())}" if self.options else type(self).__name__

    def identity(self, content: str) -> tuple[object, ...]:
        """What the fingerprint of the data has of this source. ``content``: the digest of ``files``."""
        return content, self.fingerprint

    @property
    def cache_facts(self) -> tuple[object, ...]:
        """What decides besides the content of ``files`` whether a cached index is the one of this source."""
        return (self.fingerprint,)

    def scan(self) -> Arrays:
        """Find the records. Raises ``DataError`` where there is none, or where the file cannot be read."""
        raise NotImplementedError(f"{type(self).__name__}.scan")

    def use(self, arrays: Arrays) -> None:
        """Take what ``scan`` returned, in this process or at an earlier start."""
        raise NotImplementedError(f"{type(self).__name__}.use")

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__}.__len__")

    def read(self, start: int, stop: int) -> Sequence[FoundRecord]:
        """Records ``start .. stop``. Raises ``DataError`` where the file is no longer there, and ``MalformedRecord``
        where one of them alone cannot be read.
        """
        raise NotImplementedError(f"{type(self).__name__}.read")

    def file_of(self, index: int) -> tuple[str, int]:
        """The file that has a record, as messages name it, and the record's number there, from 0."""
        return self.label, index

    def notes(self) -> Sequence[str]:
        """What of the files is not read as records, with numbers, for the log. Asked after ``use``."""
        return ()


class RangeSource(RecordSource):
    """Records of a text file, each a range of its bytes. A subclass finds them (``scan`` returns ``offsets`` and
    ``lengths``) and reads one (``entry``).
    """

    def __init__(self, path: Path, *, label: str | None = None, folder: Path | None = None) -> None:
        super().__init__(path, label=label, folder=folder)
        self.offsets = self.lengths = np.empty(0, np.int64)
        check_data_file(self.path)

    def use(self, arrays: Arrays) -> None:
        self.offsets, self.lengths = arrays["offsets"], arrays["lengths"]

    def __len__(self) -> int:
        return len(self.offsets)

    def read(self, start: int, stop: int) -> Sequence[FoundRecord]:
        offsets, lengths = self.offsets[start:stop].tolist(), self.lengths[start:stop].tolist()
        if not offsets:
            return ()
        first = offsets[0]
        block = Span(self.path, first, offsets[-1] + lengths[-1] - first).read()
        return [
            self.entry(block[offset - first : offset - first + length], Position(self.path, offset, self.label))
            for offset, length in zip(offsets, lengths, strict=True)
        ]

    def entry(self, raw: bytes, position: Position) -> FoundRecord:
        """Return the record of some bytes. Raises ``MalformedRecord`` where it cannot be read."""
        raise NotImplementedError(f"{type(self).__name__}.entry")


def ranges(spans: Iterable[tuple[int, int]]) -> Arrays:
    """Return the arrays of a ``RangeSource``. ``spans``: offset and length of each record."""
    table = np.fromiter(chain.from_iterable(spans), np.int64).reshape(-1, 2)  # a file may have millions
    return {"offsets": table[:, 0].copy(), "lengths": table[:, 1].copy()}


class Joined(RecordSource):
    """Several sources of one format, one after the other.

    Args:
        sources: at least one.
        name: how messages call all of them.
    """

    def __init__(self, sources: Sequence[RecordSource], name: str) -> None:
        super().__init__(sources[0].path, label=name, folder=sources[0].folder)
        self.origin = sources[0].origin
        self.sources = tuple(sources)
        self.captions, self.batch = sources[0].captions, sources[0].batch  # type: ignore[misc]
        self._bounds = np.zeros(1, np.int64)
        first = os.path.abspath(sources[0].root)
        self._folders = [None if os.path.abspath(source.root) == first else source.root for source in sources]

    @property
    def several_folders(self) -> bool:
        return any(folder is not None for folder in self._folders)

    @property
    def title(self) -> str:
        return self.label

    @property
    def files(self) -> Sequence[Path]:
        return tuple(file for source in self.sources for file in source.files)

    @property
    def root(self) -> Path:
        folders = dict.fromkeys(source.own_root for source in self.sources)
        if len(folders) > 1:
            raise DataError(
                f"{self.label}: each of these folders has its own images, with names of its own",
                remedy="a data set for each of them: train_dataloader.dataset is a list then; or the folder above",
            )
        return self.sources[0].root

    @property
    def fingerprint(self) -> str:
        return fingerprint(*(source.fingerprint for source in self.sources))

    def scan(self) -> Arrays:
        scans: list[Arrays] = []
        for source in self.sources:
            scans.append(source.scan())
            source.use(scans[-1])
        joined: dict[str, NDArray[Any]] = {}
        for name in sorted({name for arrays in scans for name in arrays}):
            parts = [arrays.get(name, np.empty(0, np.int64)) for arrays in scans]
            joined[name] = np.concatenate(parts)
            joined[f"{name}_of_each"] = np.asarray([len(part) for part in parts], np.int64)
        return joined

    def use(self, arrays: Arrays) -> None:
        names = [name for name in arrays if f"{name}_of_each" in arrays]
        stops = {name: np.cumsum(arrays[f"{name}_of_each"]) for name in names}
        for k, source in enumerate(self.sources):
            source.use({name: arrays[name][stops[name][k - 1] if k else 0 : stops[name][k]] for name in names})
        self._bounds = np.cumsum([0, *map(len, self.sources)])

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def read(self, start: int, stop: int) -> Sequence[FoundRecord]:
        records: list[FoundRecord] = []
        while start < stop:
            k = int(np.searchsorted(self._bounds, start, side="right")) - 1
            first, end = int(self._bounds[k]), min(stop, int(self._bounds[k + 1]))
            entries, folder = self.sources[k].read(start - first, end - first), self._folders[k]
            records += entries if folder is None else [InFolder(entry, folder) for entry in entries]
            start = end
        return records

    def file_of(self, index: int) -> tuple[str, int]:
        k = int(np.searchsorted(self._bounds, index, side="right")) - 1
        return self.sources[k].file_of(index - int(self._bounds[k]))

    def notes(self) -> Sequence[str]:
        return [note for source in self.sources for note in source.notes()]
