"""What W&B has written of an offline run: a file ``wandb/offline-run-<time>-<id>/run-<id>.wandb`` for each start.

W&B writes rows some seconds after they are logged, and a kill loses those. The file is LevelDB's log format: 7 bytes
of header, then blocks of 32 KiB with records (checksum, length, kind, content), of which a kill leaves the last one
torn. wandb (0.31) reads it in Go alone, so the framing is read here; records are parsed by wandb's own classes.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_HEADER, _BLOCK = 7, 32768
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def offline_rows(folder: Path, run_id: str, *, starts: int) -> Counter[int] | None:
    """Number of rows by ``update`` that all starts of a run have written; None where that is not known.

    It is not where a start was online, which sends rows before it writes them, or where fewer files than ``starts`` are
    there, or one cannot be read.
    """
    found = sorted((folder / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    online = any((folder / "wandb").glob(f"run-*-{run_id}"))
    if online or not found or len(found) < starts:
        return None
    try:
        return Counter(update for path in found for update in _updates(path))
    except (ImportError, AttributeError, ValueError, OSError):
        return None


def _updates(path: Path) -> Iterator[int]:
    """``update`` of each row. Raises ``ValueError`` for a row that has none as JSON."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from wandb.proto import wandb_internal_pb2

    for content in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        try:
            record.ParseFromString(content)
        except DecodeError:
            return
        if record.WhichOneof("record_type") != "history":
            continue
        values = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
        if "update" not in values:
            raise ValueError(f"{path} has a row without update")
        yield int(json.loads(values["update"]))


def _records(content: bytes) -> Iterator[bytes]:
    """The content of every complete record, up to the first one that is torn."""
    position, parts = _HEADER, b""
    while position + _HEADER <= len(content):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + _HEADER])
        end = position + _HEADER + length
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or end > len(content):
            return
        parts += content[position + _HEADER : end]
        position = end
        if kind in (_FULL, _LAST):
            yield parts
            parts = b""
