"""What a check of a dry run returns, and how it is shown."""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from unigen_ds.core.errors import UnigenError

Status = Literal["ok", "warning", "problem", "not checked"]
_SEVERAL = re.compile(r"\d+ problems in the config:\n  ")


@dataclass(frozen=True)
class Checked:
    """One line of a dry run."""

    status: Status
    text: str
    """A problem: what was given, what is allowed, the remedy."""
    check: str = ""
    """Which check it is of: set by the dry run."""


def ok(text: str) -> Checked:
    return Checked("ok", text)


def warning(text: str) -> Checked:
    """The run would start and is probably not what is wanted."""
    return Checked("warning", text)


def problem(text: str, *, allowed: str | None = None, remedy: str | None = None) -> Checked:
    """The run would fail, or would not do what the config asks for."""
    return Checked("problem", str(UnigenError(text, allowed=allowed, remedy=remedy)))


def unchecked(text: str) -> Checked:
    return Checked("not checked", text)


_OF_TRACING = (
    "DynamicOutputShapeException", "DataDependentOutputException", "UnsupportedOperatorException",
    "UnsupportedFakeTensorException",
)  # fmt: skip
"""Errors of torch's tensors without memory where an operation depends on values."""


def untraced(why: str | None) -> Checked:
    """Why an update could not be traced: the model or the engine fails, or computes what cannot be without memory."""
    if any(name in str(why) for name in _OF_TRACING):
        return unchecked(f"an update cannot be traced without memory: {why}")
    return problem(f"an update fails: {why}")


def problems_of(error: Exception) -> list[Checked]:
    """One for each problem that an error names; of any other error than ours its kind and where it was raised."""
    if not isinstance(error, UnigenError):
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = (str(error).splitlines() or [""])[0]
        return [problem(f"{type(error).__name__}: {text} ({last.filename}:{last.lineno})")]
    text = str(error)
    lines = _SEVERAL.sub("", text, count=1).split("\n  ") if _SEVERAL.match(text) else [text]
    return [Checked("problem", line.rstrip()) for line in lines]


def lines(results: Sequence[Checked], *, title: str) -> Iterator[str]:
    """As text: all results, then the problems counted."""
    yield title
    width = max(len(result.check) for result in results)
    for result in results:
        first, *rest = result.text.splitlines()
        yield f"{result.status:<11}  {result.check:<{width}}  {first}"
        yield from (" " * (15 + width) + line for line in rest)
    number = Counter(result.status for result in results)
    found = number["problem"]
    yield (
        f"{found} problem{'s' * (found != 1)}, {number['warning']} warning{'s' * (number['warning'] != 1)},"
        f" {number['not checked']} not checked. The work dir is as it was."
    )
