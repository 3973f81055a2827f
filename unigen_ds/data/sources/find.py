"""What a config calls its data -> a source: by the format's name, by the suffix of a file, or by what a folder has."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unigen_ds.data.sources.base import RecordSource
from unigen_ds.data.sources.json_lines import JsonSource

DataPath = str | Path | Sequence[str | Path]
_NUMBER = re.compile(r"(\d+)")


def default_name(data_path: DataPath) -> str:
    """The first part of sample ids: the stem of the first file, without the signs of a pattern."""
    first = Path(data_path if isinstance(data_path, (str, Path)) else next(iter(data_path), "data"))
    return first.stem


def open_source(
    data_path: DataPath, *, format: str | Mapping[str, Any] | None = None, cache_dir: Path | None = None
) -> RecordSource:
    """Raises ``DataError`` where there are no such files, ``ConfigError`` for an unknown format."""
    return JsonSource(Path(data_path))
