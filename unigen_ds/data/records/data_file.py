"""What a data file is instead of text (JSON, CSV), from its first bytes, and how it is converted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unigen_ds.core.errors import DataError, close
from unigen_ds.system.files import encoding_problem

_ALLOWED = "text of its format, by default JSON or JSONL: docs/data.md shows the records"
_PANDAS = (
    "python -c \"import pandas; pandas.read_{0}('{{0}}').to_json('converted.jsonl', orient='records', lines=True)\""
)
_DATASETS = "python -c \"import datasets; datasets.Dataset.from_file('{0}').to_json('converted.jsonl')\""
LATIN1 = "iconv -f LATIN1 -t UTF-8 {0} > utf8{1}"
_READ_AS = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow"}
"""First bytes -> the format that reads such a file as it is."""
_MAGIC = {
    b"PAR1": ("a Parquet file", _PANDAS.format("parquet")),
    b"ARROW1": ("an Arrow file", _PANDAS.format("feather")),
    b"\xff\xff\xff\xff": ("an Arrow stream, as Hugging Face's datasets writes it", _DATASETS),
    b"\x1f\x8b": ("compressed by gzip", "gunzip -c {0} > converted.jsonl"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "zstd -dc {0} > converted.jsonl"),
    b"PK\x03\x04": ("a zip archive", "python -m zipfile -e {0} converted"),
    b"BZh91AY&": ("compressed by bzip2", "bunzip2 -c {0} > converted.jsonl"),
    b"\xfd7zXZ\x00": ("compressed by xz", "xz -dc {0} > converted.jsonl"),
}
"""First bytes -> what it is, and a command that works whatever the file's name ends in."""
_EXCEL = ("an Excel workbook", _PANDAS.format("excel"))


def no_utf8(path: Path, where: object, byte: int, of: str = "") -> MalformedRecord:
    """Return the error for a text in another encoding."""
    remedy = f"convert it: {LATIN1.format(path.name, path.suffix)}"
    return MalformedRecord(f"{where}: byte {byte}{of} is no UTF-8", remedy=remedy)


def no_record(path: Path) -> DataError:
    """The error for a file without a record."""
    what = "is empty: it holds no record" if not path.stat().st_size else "holds no record"
    remedy = "fill it, or name another data_path; a data set without records is left out of the config"
    return DataError(f"data file {path} {what}", allowed="at least one record: docs/data.md shows them", remedy=remedy)


def instead_of(path: Path, suffixes: Sequence[str] = (".json", ".jsonl")) -> str:
    """What was probably meant by a path that does not exist, among the files with these suffixes."""
    folder = path.parent
    if not folder.is_dir():
        return f"the folder {folder} does not exist either; relative paths start at {Path.cwd()}"
    inside = sorted(file.name for file in folder.iterdir() if file.suffix.lower() in suffixes)
    if near := close(path.name, inside):
        return f"did you mean {str(folder / near)!r}?"
    more = f" and {len(inside) - 5} more" if len(inside) > 5 else ""
    return f"{folder} has {', '.join(inside[:5])}{more}" if inside else f"{folder} has no such file"


class MalformedRecord(DataError):
    """One record cannot be read; the others of its file can."""


def check_data_file(path: Path) -> None:
    """Raise ``DataError`` for what is missing, a folder, another format or another encoding, with the remedy."""
    if not path.is_file():
        raise DataError(f"data file {path} does not exist, or is not a file", allowed=_ALLOWED, remedy=instead_of(path))
    with path.open("rb") as stream:
        head = stream.read(8)
    for magic, (what, command) in _MAGIC.items():
        if head.startswith(magic):
            if path.suffix.lower() in (".xlsx", ".xlsm"):
                what, command = _EXCEL
            convert = command.format(path.name)
            own = f"; format={_READ_AS[magic]!r} reads it as it is" if magic in _READ_AS else ""
            raise DataError(f"data file {path} is {what}", allowed=_ALLOWED + own, remedy=f"convert it: {convert}")
    if problem := encoding_problem(path, bom_allowed=True):
        raise DataError(f"data file {path} {problem[0]}", allowed=_ALLOWED, remedy=f"convert it: {problem[1]}")
