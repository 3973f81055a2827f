"""What a data file is instead of JSON or JSONL, from its first bytes, and how it is converted."""

from __future__ import annotations

from pathlib import Path

from unigen_ds.core.encoding import encoding_problem
from unigen_ds.core.errors import DataError

_ALLOWED = "a .json or .jsonl file: docs/data.md shows the records"
_PANDAS = (
    "python -c \"import pandas; pandas.read_{0}('{{0}}').to_json('converted.jsonl', orient='records', lines=True)\""
)
_DATASETS = "python -c \"import datasets; datasets.Dataset.from_file('{0}').to_json('converted.jsonl')\""
_MAGIC = {
    b"PAR1": ("a Parquet file", _PANDAS.format("parquet")),
    b"ARROW1": ("an Arrow file", _PANDAS.format("feather")),
    b"\xff\xff\xff\xff": ("an Arrow stream, as Hugging Face's datasets writes it", _DATASETS),
    b"\x1f\x8b": ("compressed by gzip", "gunzip -c {0} > converted.jsonl"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "zstd -dc {0} > converted.jsonl"),
    b"PK\x03\x04": ("a zip archive", "python -m zipfile -e {0} converted"),
}
"""First bytes -> what it is, and a command that works whatever the file's name ends in."""


def check_data_file(path: Path) -> None:
    """Raise ``DataError`` for what is missing, a folder, another format or another encoding, with the remedy."""
    if path.is_dir():
        inside = sorted(found.name for found in path.iterdir() if found.suffix in (".json", ".jsonl"))
        remedy = (
            f"name one of its files ({', '.join(inside[:5])})" if inside else "it holds no .json and no .jsonl file"
        )
        raise DataError(f"data file {path} is a folder", allowed=_ALLOWED, remedy=remedy)
    if not path.is_file():
        raise DataError(f"data file {path} does not exist", allowed="a .json or .jsonl file")
    with path.open("rb") as stream:
        head = stream.read(8)
    for magic, (what, command) in _MAGIC.items():
        if head.startswith(magic):
            convert = command.format(path.name)
            raise DataError(f"data file {path} is {what}", allowed=_ALLOWED, remedy=f"convert it: {convert}")
    if problem := encoding_problem(path, bom_allowed=True):
        raise DataError(f"data file {path} {problem[0]}", allowed=_ALLOWED, remedy=f"convert it: {problem[1]}")
