"""Records that only an iteration returns, shard after shard: the base of a user's own streamed source.

The records of a shard are iterated once and written into the spool, as lines of JSON with images in base64; after that
the shard is a file like any other. So its position is exact, whatever the iteration could do.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.data.images.stored_image import StoredImage
from unigen_ds.data.sources.base import FoundRecord, RecordSource, Row
from unigen_ds.data.sources.json_lines import JsonSource

_BYTES = "unigen:bytes"


class IterableShards(RecordSource):
    """Records without random access. A subclass is registered in ``SOURCES`` and used with ``streaming=True``.

    ``path`` is the ``data_path`` of the config; further arguments of ``__init__`` are settings, which belong to the
    fingerprint of the data.
    """

    def shards(self) -> Sequence[str] | None:
        """Names of the parts that can be iterated on their own, always the same ones. None: they are unknown, and all
        records are one shard.
        """
        return None

    def records(self, shard: str) -> Iterable[Mapping[str, Any]]:
        """The records of a shard, in any layout, always the same ones in the same order. An image is its bytes, or
        ``{'bytes': ..., 'path': ...}``. Errors are tried again.
        """
        raise NotImplementedError(f"{type(self).__name__}.records")

    def index_folder(self, cache_dir: Path | None) -> Path | None:
        """Raises ``ConfigError``: there is no index of the whole."""
        raise ConfigError(
            f"{type(self).__name__} can only be iterated", remedy="streaming=True of UnifiedGenerationDataset"
        )


def write_records(records: Iterable[Mapping[str, Any]], target: Path, *, name: str, limit: int) -> None:
    """The records of shard ``name`` as a file of at most ``limit`` bytes. Raises ``DataError`` for others."""
    written = 0
    with target.open("wb") as stream:
        for number, record in enumerate(records):
            if not isinstance(record, Mapping):
                raise DataError(f"{name}, record {number}: it is a {type(record).__name__}", allowed="a mapping")
            line = json.dumps(_written(record, f"{name}, record {number}"), ensure_ascii=False).encode() + b"\n"
            written += len(line)
            if written > limit:
                raise DataError(
                    f"shard {name} has more than {limit:,} bytes after {number:,} records, as many as"
                    " streaming.cache_gib keeps",
                    remedy="smaller shards, or a larger streaming.cache_gib",
                )
            stream.write(line)


def _written(value: Any, where: str) -> Any:
    """What JSON can write."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        if set(value) == {"bytes", "path"}:
            return value["path"] if value["bytes"] is None else _written(value["bytes"], where)
        if len({str(key) for key in value}) < len(value) or _BYTES in value:
            raise DataError(f"{where} has a key twice as text, or the key {_BYTES!r}", allowed="other names of keys")
        return {str(key): _written(one, f"{where}: {key}") for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_written(one, where) for one in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise DataError(
        f"{where} is a {type(value).__name__}",
        allowed="texts, numbers, lists, mappings, and images as bytes",
        remedy="of the package datasets: cast_column('image', Image(decode=False))",
    )


class WrittenRecords(JsonSource):
    """A file of ``write_records``."""

    captions = "generate"

    def read(self, start: int, stop: int) -> Sequence[FoundRecord]:
        rows = []
        for number, entry in enumerate(super().read(start, stop), start=start):
            where = f"{self.label}, record {number}"
            rows.append(Row(_found(entry.record, where), where))
        return rows


def _found(value: Any, where: str) -> Any:
    """``_written``'s inverse, with images in place of bytes."""
    if isinstance(value, dict):
        if set(value) == {_BYTES}:
            return StoredImage(where, base64.b64decode(value[_BYTES]))
        return {key: _found(one, f"{where}: {key}") for key, one in value.items()}
    return [_found(one, where) for one in value] if isinstance(value, list) else value
