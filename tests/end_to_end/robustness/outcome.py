"""What the package makes of a damaged data set: read as it is, a counted skip, or a named error. All else is wrong.

``outcome`` raises ``AssertionError`` where a record is lost or read as another one without a message, where an error
names neither file nor position, and where something was unpickled. Any other exception is the package's own fault.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.data.support import make_processor
from tests.end_to_end.robustness.cases import Case, case
from unigen_ds.core.batch import PackedBatch
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.data.batches.display import ShownToken, display_samples
from unigen_ds.data.batches.loader import collate
from unigen_ds.data.datasets.dataset import UnifiedGenerationDataset
from unigen_ds.data.datasets.filters import ImageCountFilter, RatingFilter
from unigen_ds.data.datasets.subset import apply_filters
from unigen_ds.data.order.order import Draw

LONGEST_S = 20
"""A case that needs longer hangs."""
_MOST_MESSAGE = 4000


class Hangs(BaseException):
    """Raised by the alarm: no handler of the package may catch it."""


def ending_of(seed: int, number: int, folder: Path) -> tuple[str, str]:
    """(kind of the case, ``sample``, ``skip`` or ``named``) of one case, in an empty folder.

    Raises ``Hangs`` after ``LONGEST_S``, and ``AssertionError`` where a file was unpickled.
    """
    with _alarm(LONGEST_S), _watch():
        one = case(seed, number, folder)
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            ending = outcome(one, folder, number)
        assert not (folder / "unpickled").exists(), "a file was executed"
        assert not _UNPICKLED, f"unpickled: {_UNPICKLED}"
        return one.kind, ending


def outcome(case: Case, folder: Path, number: int) -> str:
    processor = make_processor()
    try:
        dataset = UnifiedGenerationDataset(
            case.path, processor, name="data", cache_dir=folder / "cache", **case.options
        )
        if number % 5 == 0:
            dataset.content_digests()
            dataset.filters = (ImageCountFilter(max_images=10**9), RatingFilter(relevance_min_rating=1))
            apply_filters(dataset)
        batches = [collate([(Draw(0, i, 0),)], [dataset], processor, seq_length=10**9) for i in range(len(dataset))]
    except (DataError, ConfigError) as error:
        return _check_names(case, error)
    if case.records is not None:
        assert len(dataset) == case.records, f"{len(dataset)} of {case.records} records"
    skips = [one for batch in batches for one in batch.skipped]
    for one in skips:
        assert one["why"] and len(one["why"]) < 3 * _MOST_MESSAGE, one
        one["why"].encode()
    if case.read is not None:
        _compare(case, batches, processor, expected=_reference(case))
    return "skip" if skips else "sample"


def _check_names(case: Case, error: Exception) -> str:
    text = str(error)
    text.encode()  # a log file and a terminal can print it
    assert len(text) < _MOST_MESSAGE, f"a message of {len(text)} characters"
    assert any(name in text for name in case.names), f"no file is named: {text}"
    if case.row and not re.search(r"first row|No valid|no image|none of its|twice|cannot be read|no record", text):
        assert case.row in text, f"the record {case.row} is not named: {text}"
    return "named"


def _reference(case: Case) -> list[Any]:
    assert case.read is not None
    depth = sys.getrecursionlimit()
    sys.setrecursionlimit(10 * depth)
    try:
        return case.read()
    except Exception as error:
        raise AssertionError(f"it was read, and another reader refuses it: {type(error).__name__}: {error}") from error
    finally:
        sys.setrecursionlimit(depth)


def _compare(case: Case, batches: list[PackedBatch], processor: Any, *, expected: list[Any]) -> None:
    """Every text of a record is in its sample."""
    assert len(batches) == len(expected), f"{len(batches)} records, {len(expected)} by another reader"
    for record, batch in zip(expected, batches, strict=True):
        if batch.skipped or not isinstance(record, dict):
            continue
        (sample,) = display_samples(batch, processor)
        ids = [part.id for part in sample.parts if isinstance(part, ShownToken)]
        learned = bytes(i if i < 256 else 0 for i in ids).decode("utf-8", "replace")
        for text in _texts(record):
            for piece in text.split("<image>"):
                assert piece.strip() in learned, f"{piece.strip()[:60]!r} is not in the sample {learned[:200]!r}"


def _texts(record: dict[str, Any]) -> Iterator[str]:
    """Texts that a layout reads; of a record with keys of several layouts those of the first (``records.py``)."""
    lists = {"conversations": ("content", "value"), "messages": ("content",), "texts": ("user", "assistant")}
    if "conversations" in record:
        name = "conversations"
    elif key := next((key for key in ("text_prompt", "text") if isinstance(record.get(key), str)), None):
        yield record[key]
        return
    else:
        name = next((name for name in lists if name in record), "")
    for turn in record.get(name) or () if isinstance(record.get(name), list) else ():
        if isinstance(turn, dict) and turn.get("type", "text") == "text":
            keys = ("value",) if "from" in turn else lists[name]
            yield from (turn[key] for key in keys if isinstance(turn.get(key), str))
    if not name and "image_list" not in record and "captions" not in record:
        yield from (record[key] for key in ("instruction", "caption") if isinstance(record.get(key), str))


_UNPICKLED: list[str] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class":
        _UNPICKLED.append(".".join(map(str, arguments)))


@cache
def _hook() -> None:
    """An audit hook stays as long as the process."""
    sys.addaudithook(_audit)


@contextlib.contextmanager
def _watch() -> Iterator[None]:
    """Every class that is looked up for unpickling is recorded; the package logs nothing."""
    _hook()
    _UNPICKLED.clear()
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _alarm(seconds: int) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Hangs(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def scratch() -> str | None:
    """A folder in memory, where there is one: each case writes an index."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
