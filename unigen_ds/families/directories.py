"""The formats of all families, which importing this registers; a format of a user's own is asked before theirs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unigen_ds.families.auto import family as _auto  # noqa: F401 - these register themselves
from unigen_ds.families.bagel import family as _bagel  # noqa: F401
from unigen_ds.families.base import PublishedFormat, families
from unigen_ds.families.decoder_lm import family as _decoder_lm  # noqa: F401
from unigen_ds.families.nanovlm import family as _nanovlm  # noqa: F401


def formats() -> Iterator[PublishedFormat]:
    """Yield the formats of all registered families, those that recognise many kinds of models last."""
    of_users_first = sorted(families(), key=lambda each: type(each).__module__.startswith("unigen_ds."))
    every = [each for family in of_users_first for each in family.published]
    yield from sorted(every, key=lambda each: each.general)


def published_format(folder: Path, *, complete: bool = False) -> PublishedFormat | None:
    """The format of a directory, if any family has it. ``complete``: only one of those."""
    return next((each for each in formats() if (each.complete or not complete) and each.recognises(folder)), None)


def format_of_file(path: Path) -> PublishedFormat | None:
    """The format of the directory that a file of weights cannot be read without."""
    return next((each for each in formats() if path.name in each.parts and each.recognises(path.parent)), None)


def published_sizes(folder: Path) -> dict[str, Any]:
    """Arguments of a model that a family reads from the configs in a folder; {} where none does."""
    return next((sizes for each in formats() if (sizes := each.sizes(folder))), {})
