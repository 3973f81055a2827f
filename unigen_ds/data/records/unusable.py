"""Records that cannot be trained on: malformed ones, and those with an image that cannot be read.

Planning finds them (``planning.py``) and the index keeps a line of JSON for each, so every start and every process
leaves out the same ones. ``on_record_error`` of the data set decides: a malformed one is an error that lists the first
of all kinds, or all of them are left out, counted, and listed in ``left_out.jsonl`` of the work dir.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, lgamma, log, log1p
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from unigen_ds.core.errors import DataError
from unigen_ds.data.records.turn import format_value

OnRecordError = Literal["error", "skip"]
SKIPPED = "on_record_error='skip'"
LIST_FILE = "left_out.jsonl"
_ADVICE = re.compile(r"(.*?)((?: Allowed: | Remedy: |\Z))(.*)", re.DOTALL)
NUM_LISTED = 20
_ALPHA = 2.87e-7
"""The probability beyond 5 standard deviations of a normal distribution, on one side."""


@dataclass(frozen=True)
class BadRecord:
    """One record."""

    number: int
    """In its source."""
    file: str
    index: int
    """In its file, from 0."""
    id: str | int | None
    """Its own, where it has one."""
    reason: str
    """Begins with its position, as of ``FoundRecord.where``."""
    malformed: bool
    """False: only an image of it cannot be read."""

    @classmethod
    def of(
        cls, number: int, file: str, index: int, record: Mapping[str, Any], reason: str, *, image: bool
    ) -> BadRecord:
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
    """Return the error that lists the first.

    ``number``: of them, where ``bad`` are a part; ``limit``: of the share that may be left out; None: malformed ones
    are an error.
    """
    number = len(bad) if number is None else number
    allowed, remedy = None, f"mend or remove them; {SKIPPED} of the data set leaves them out, listed in {LIST_FILE}"
    if limit is not None:
        share = share_above(number, records, limit)
        allowed = f"a share of {limit:g} (train_dataloader.max_skipped_fraction); it is {share}"
        remedy = "mend or remove them, or raise the limit"
    first = f"The first {NUM_LISTED}" if number > NUM_LISTED else "They are"
    listed = "\n  ".join(_listed(bad[:NUM_LISTED]))
    text = f"{title}: {number:,} of {records:,} records cannot be used"
    return DataError(text, allowed=allowed, remedy=f"{remedy}. {first}:\n  {listed}")


def _listed(bad: Sequence[BadRecord]) -> Iterator[str]:
    """A line for each. What is allowed, and the remedy, are given once where several have the same."""
    earlier = set[str]()
    for one in bad:
        problem, advice, rest = _ADVICE.match(str(one)).groups()  # type: ignore[union-attr]
        yield problem if advice + rest in earlier else problem + advice + rest
        earlier.add(advice + rest)


def share_above(number: int, total: int, limit: float) -> str:
    """``number / total`` with as many digits as show that it is above ``limit``."""
    share = number / max(total, 1)
    return next((text for digits in range(3, 17) if float(text := f"{share:.{digits}g}") > limit), f"{share:g}")


def exceeds(number: int, total: int, limit: float) -> bool:
    """Whether ``number`` of ``total`` drawn samples show that more than a share ``limit`` of all is unusable.

    Their share is above it, and a true share of half of it would have so many with the probability of 5 sigma alone.
    """
    if not number or number <= limit * total:
        return False
    rate = min(limit / 2, 1.0)
    return rate == 0 or _tail(number, total, rate) < _ALPHA


def _tail(number: int, total: int, rate: float) -> float:
    """The probability of at least ``number`` of ``total``, each with probability ``rate``, below ``number``."""
    term = exp(
        lgamma(total + 1) - lgamma(number + 1) - lgamma(total - number + 1)
        + number * log(rate) + (total - number) * log1p(-rate)
    )  # fmt: skip
    tail = 0.0
    for k in range(number, total + 1):
        tail += term
        term *= (total - k) / (k + 1) * rate / (1 - rate)
        if term < tail * 1e-6:
            break
    return tail
