"""WebDataset: tar files whose members with one name and different suffixes are a record. Indexed once, then read at
random: a member is a range of bytes of the tar.

The name ends at the first dot of the last part: ``photos/0001.seg.png`` belongs to ``photos/0001``. Images become
images, ``.txt`` the text, the object of a ``.json`` the record itself, in any layout; an image that
it names (``0001.jpg``, in whatever folder, or ``jpg``) is the member.
Members need not be sorted. Pickled ones are never loaded, and counted.
"""

from __future__ import annotations

import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from unigen_ds.config.registry import SOURCES
from unigen_ds.core.errors import DataError
from unigen_ds.data.images.image_files import Span, StoredImage
from unigen_ds.data.records.unusable import BESIDE_JSON, IMAGE_BESIDE_JSON, MalformedRecord, decode_text
from unigen_ds.data.sources.base import Arrays, Names, RecordSource, Row
from unigen_ds.data.sources.text_files import load_record
from unigen_ds.data.sources.unpacked import AGAIN

IMAGES = frozenset((
    "jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm", "jp2", "avif", "ico", "tga", "pcx", "qoi",
))  # fmt: skip
_IMAGE_KEYS = (
    "image", "images", "image_path", "image_list", "input_image", "input_images", "output_image", "output_images",
    "image_url", "url", "path",
)  # fmt: skip
"""Keys of a JSON object whose texts may be names of members."""


@SOURCES.register_module(name="webdataset")
class WebDatasetSource(RecordSource):
    """One tar file."""

    fingerprint = "webdataset"
    suffixes = (".tar", ".tgz")
    batch = 64

    def scan(self) -> Arrays:
        groups: dict[str, dict[str, tuple[int, int]]] = {}
        left_out: Counter[str] = Counter()
        for member in self._members():
            key, stem, suffix = _parts(member.name)
            last = suffix.rpartition(".")[2].lower()
            if not member.isreg() or member.issparse():
                left_out["folders, links and other special members"] += not member.isdir()
            elif not stem or not suffix:
                left_out["without a suffix"] += 1
            elif last not in IMAGES and last not in ("json", "txt"):
                left_out[f"of another kind (.{last}), never loaded"] += 1
            elif suffix in groups.setdefault(key, {}):
                problem = f"{self.label} has the member {member.name} twice"
                raise DataError(problem, remedy="write the tar again, without one")
            else:
                groups[key][suffix] = (member.offset_data, member.size)
        most = [f"{number} {reason}" for reason, number in left_out.most_common(5) if number]
        if not groups:
            raise DataError(f"data file {self.path} holds no record: {', '.join(most) or 'it is empty'}")
        members = [(f"{key}.{suffix}", span) for key, group in groups.items() for suffix, span in sorted(group.items())]
        return {
            "member_spans": np.asarray([span for _, span in members], np.int64).reshape(-1),
            "members_of_record": np.asarray([len(group) for group in groups.values()], np.int64),
            **Names.to_arrays([name for name, _ in members], "member"),
            **Names.to_arrays([f"members that are not read: {', '.join(most)}"] if most else [], "note"),
        }

    def _members(self) -> Iterator[tarfile.TarInfo]:
        """All of them. A damaged header ends Python's reader silently, so only zeros may follow the last one."""
        end = self.path.stat().st_size
        try:
            with tarfile.open(self.path, "r:") as tar:
                while (member := tar.next()) is not None:
                    if member.size < 0 or member.offset_data + (member.size if member.isreg() else 0) > end:
                        raise DataError(f"data file {self.path} ends within its member {member.name}", remedy=AGAIN)
                    yield member
                    tar.members = []  # type: ignore[attr-defined]  # it keeps each, and is asked for none again
                last = tar.offset
        except (DataError, MemoryError):
            raise
        except Exception as error:  # a damaged header raises anything
            raise DataError(f"data file {self.path} is no whole tar file: {error}", remedy=AGAIN) from error
        with self.path.open("rb") as stream:
            stream.seek(last)
            first = stream.read(tarfile.BLOCKSIZE)
            rest = any(any(block) for block in iter(lambda: stream.read(1 << 20), b""))
        if len(first) < tarfile.BLOCKSIZE:
            problem = f"ends at byte {end:,} without the end mark of a tar: a part of it is missing"
        elif any(first) or rest:
            problem = f"has bytes that are no member after byte {last:,}: a damaged header, or several tars in one file"
        else:
            return
        raise DataError(f"data file {self.path} {problem}", remedy=f"{AGAIN}; give several tars as several files")

    def use(self, arrays: Arrays) -> None:
        self._spans = arrays["member_spans"].reshape(-1, 2)
        self._names, self.notes = Names(arrays, "member"), Names(arrays, "note")
        self._firsts = np.concatenate([[0], np.cumsum(arrays["members_of_record"])])

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def read(self, start: int, stop: int) -> Sequence[Row]:
        return [self._entry(i) for i in range(start, stop)]

    def _entry(self, index: int) -> Row:
        members: dict[str, Span] = {}
        key = stem = ""
        for i in range(int(self._firsts[index]), int(self._firsts[index + 1])):
            key, stem, suffix = _parts(self._names[i])
            members[suffix] = Span(self.path, *map(int, self._spans[i]))
        where = f"{self.label} sample {key}"
        record: dict[str, Any] = {}
        images: dict[str, StoredImage] = {}
        text: str | None = None
        for suffix, span in members.items():
            kind = suffix.rpartition(".")[2].lower()
            if kind == "json":
                record |= load_record(span.read(), f"{where}: {suffix}")
            elif kind in IMAGES:
                images[suffix] = StoredImage(f"{where}: {suffix}", span)
            else:
                text = decode_text(span.read(), f"{where}: {suffix}").strip()
        names: set[str] = set()
        try:
            by_name = images | {f"{stem}.{suffix}": image for suffix, image in images.items()}
            record = _with_images(record, by_name, names)
        except RecursionError as error:
            raise MalformedRecord(f"{where}: its values are nested too deeply") from error
        unused_parts = []
        if text is not None:
            others = [record.pop(name) for name in ("caption", "text") if isinstance(record.get(name), str)]
            if any(other.strip() not in ("", text) for other in others):
                unused_parts.append(BESIDE_JSON)
            record["caption" if images else "text"] = text
        if images and not {"image", "images", "image_path", "image_list", "instruction"} & record.keys():
            several = list(images.values())
            record |= {"image": several[0]} if len(several) == 1 else {"images": several}
        elif any(not {suffix, f"{stem}.{suffix}"} & names for suffix in images):
            unused_parts.append(IMAGE_BESIDE_JSON)
        return Row(record, where, unused_parts)


def _parts(name: str) -> tuple[str, str, str]:
    """Return a member's key (of its record), the key without its folder, and the suffix."""
    folder, slash, base = name.rpartition("/")
    stem, _, suffix = base.partition(".")
    return folder + slash + stem, stem, suffix


def _with_images(value: Any, images: Mapping[str, StoredImage], names: set[str], of_image: bool = False) -> Any:
    """``value`` with the images in place of their names, which ``names`` gets, under the keys that images have."""
    if isinstance(value, str):
        name = value if value in images else value.rpartition("/")[2]
        if not of_image or name not in images or ("." not in name and name != value):
            return value
        names.add(name)
        return images[name]
    if isinstance(value, list):
        return [_with_images(one, images, names, of_image) for one in value]
    if isinstance(value, dict):
        return {key: _with_images(one, images, names, key in _IMAGE_KEYS) for key, one in value.items()}
    return value
