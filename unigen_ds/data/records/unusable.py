"""Data that cannot be trained on: files of another kind, malformed records, and records with an unreadable image.

Planning finds the records (``index.py``) and the index keeps a line of JSON for each, so every start and every process
leaves out the same ones. ``on_record_error`` of the data set decides: a malformed one is an error that lists the first
of all kinds, or all of them are left out, counted, and listed in ``left_out.jsonl`` of the work dir.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import log
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from unigen_ds.core.errors import DataError, close
from unigen_ds.data.records.records import format_value

OnRecordError = Literal["error", "skip"]
SKIPPED = "on_record_error='skip'"
LIST_FILE = "left_out.jsonl"
NUM_LISTED = 20
_ADVICE = re.compile(r"(.*?)((?: Allowed: | Remedy: |\Z).*)", re.DOTALL)
_ALPHA = 2.87e-7
"""The probability beyond 5 standard deviations of a normal distribution, on one side."""
_ALLOWED = "text of its format, by default JSON or JSONL: docs/data.md shows the records"
_MAGIC = {
    b"PAR1": "a Parquet file: format='parquet' reads it",
    b"ARROW1": "an Arrow file: format='arrow' reads it",
    b"\xff\xff\xff\xff": "an Arrow stream: format='arrow' reads it",
    b"\x1f\x8b": "compressed by gzip: convert it: gunzip -c {0} > converted.jsonl",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: convert it: zstd -dc {0} > converted.jsonl",
    b"\xff\xfe": "UTF-16 text, not UTF-8: convert it: iconv -f UTF-16 -t UTF-8 {0} > converted.jsonl",
    b"\xfe\xff": "UTF-16 text, not UTF-8: convert it: iconv -f UTF-16 -t UTF-8 {0} > converted.jsonl",
    b"PK\x03\x04": "a zip archive: convert it: python -m zipfile -e {0} converted",
}
"""First bytes -> what a file is, and what reads or converts it."""


class MalformedRecord(DataError):
    """One record cannot be read; the others of its file can."""


def check_data_file(path: Path) -> None:
    """Raise ``DataError`` for what is missing, a folder, another format or another encoding, with the remedy."""
    if not path.is_file():
        raise DataError(f"data file {path} does not exist, or is not a file", allowed=_ALLOWED, remedy=instead_of(path))
    with path.open("rb") as stream:
        head = stream.read(8)
    for magic, text in _MAGIC.items():
        if head.startswith(magic):
            what, _, remedy = text.format(path.name).partition(": ")
            raise DataError(f"data file {path} is {what}", allowed=_ALLOWED, remedy=remedy)


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


def decode_text(raw: bytes, where: object, *, encoding: str = "utf-8-sig", first: int = 0, of: str = "") -> str:
    """Return a text of a file, which begins at its byte ``first``. Raises ``MalformedRecord`` where it is no UTF-8."""
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        problem = f"{where}: byte {first + error.start}{of} is no UTF-8"
        raise MalformedRecord(problem, remedy="convert it: iconv -f LATIN1 -t UTF-8 FILE > NEW") from error


@dataclass(frozen=True)
class BadRecord:
    """One record that cannot be trained on."""

    number: int
    """In its source."""
    file: str
    index: int
    """In its file, from 0."""
    id: str | int | None
    reason: str
    """Begins with its position, as of ``FoundRecord.where``."""
    malformed: bool
    """False: only an image of it cannot be read."""

    @classmethod
    def of(cls, number: int, file: str, index: int, record: Any, reason: str, *, image: bool) -> BadRecord:
        """``record``: its values, as far as they are known."""
        own = record.get("id")
        own = own if own is None or isinstance(own, (str, int)) else format_value(own)
        return cls(number, file, index, own, reason, not image)

    def __str__(self) -> str:
        return f"index {self.index}{'' if self.id is None else f', id {format_value(self.id)}'}, {self.reason}"

    def line(self, name: str) -> str:
        """Of ``left_out.jsonl``. ``name``: of the source in sample ids."""
        facts = {"sample": f"{name}:{self.number}", **asdict(self)}
        return json.dumps({key: facts[key] for key in ("sample", "file", "index", "id", "reason")}) + "\n"


def as_array(records: Iterable[BadRecord]) -> NDArray[np.uint8]:
    """Return some records as the index keeps them."""
    return np.frombuffer("".join(json.dumps(asdict(one)) + "\n" for one in records).encode(), np.uint8)


def from_array(lines: NDArray[np.uint8]) -> tuple[BadRecord, ...]:
    """``as_array``'s inverse."""
    return tuple(BadRecord(**json.loads(line)) for line in lines.tobytes().splitlines())


def unusable_error(
    bad: Sequence[BadRecord], title: str, records: int, *, number: int | None = None, limit: float | None = None
) -> DataError:
    """Return the error that lists the first; what is allowed, and the remedy, once where several have the same.
    ``number``: of them, where ``bad`` are a part; ``limit``: of the share that may be left out; None: malformed ones
    are an error.
    """
    number = len(bad) if number is None else number
    allowed, remedy = None, f"mend or remove them; {SKIPPED} of the data set leaves them out, listed in {LIST_FILE}"
    if limit is not None:
        share = share_above(number, records, limit)
        allowed = f"a share of {limit:g} (train_dataloader.max_skipped_fraction); it is {share}"
        remedy = "mend or remove them, or raise the limit"
    listed = f"{remedy}. The first {NUM_LISTED}:" if number > NUM_LISTED else f"{remedy}. They are:"
    earlier = set[str]()
    for one in bad[:NUM_LISTED]:
        problem, advice = _ADVICE.match(str(one)).groups()  # type: ignore[union-attr]
        listed += f"\n  {problem}{'' if advice in earlier else advice}"
        earlier.add(advice)
    return DataError(f"{title}: {number:,} of {records:,} records cannot be used", allowed=allowed, remedy=listed)


def share_above(number: int, total: int, limit: float) -> str:
    """``number / total`` with as many digits as show that it is above ``limit``."""
    share = number / max(total, 1)
    return next((text for digits in range(3, 17) if float(text := f"{share:.{digits}g}") > limit), f"{share:g}")


def exceeds(number: int, total: int, limit: float) -> bool:
    """Whether ``number`` of ``total`` samples show that more than a share ``limit`` of all is unusable: a true share of
    half of it would have so many with less than the probability of 5 sigma (Chernoff's bound of the binomial).
    """
    if not number or number <= limit * total:
        return False
    share, rate = number / total, limit / 2
    if rate == 0:
        return True
    divergence = share * log(share / rate) + (1 - share) * (log((1 - share) / (1 - rate)) if share < 1 else 0)
    return total * divergence > -log(_ALPHA)
