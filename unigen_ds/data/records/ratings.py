"""nanoVLM's four ratings of each question of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unigen_ds.core.errors import DataError
from unigen_ds.data.records.turn import wrong

RATINGS = ("relevance", "image_correspondence", "visual_dependency", "formatting")
"""nanoVLM's ratings of a question and its answer; a record has them as ``relevance_ratings`` and so on."""
_NUMBERS = (int, float)
"""Types of a rating: ``bool`` is none."""


def rated_out(record: Mapping[str, Any], ratings: Sequence[tuple[str, int]], where: object) -> list[str | None]:
    """For each question of nanoVLM's rows the first rating that is below its least one, or None: it is kept. Other
    layouts have none. As in nanoVLM, a rating that is missing or null keeps a question.

    Raises ``DataError`` where the ratings of a record are not one number for each question.
    """
    texts = record.get("texts")
    if not isinstance(texts, list):
        return []
    found: list[str | None] = [None] * len(texts)
    for name, least in ratings:
        given = record.get(f"{name}_ratings")
        if given is None:
            continue
        if not isinstance(given, list) or len(given) != len(texts):
            raise _wrong_ratings(where, name, given, len(texts))
        for i, rating in enumerate(given):
            if rating is None:
                continue
            if type(rating) not in _NUMBERS:
                raise _wrong_ratings(where, name, given, len(texts))
            if rating < least and found[i] is None:
                found[i] = name
    return found


def _wrong_ratings(where: object, name: str, given: Any, number: int) -> DataError:
    return wrong(where, f"{name}_ratings", given, f"{number} numbers or null, one for each of texts")


def well_rated(record: Mapping[str, Any], ratings: Sequence[tuple[str, int]], where: object) -> Mapping[str, Any]:
    """``record`` without its questions that are rated too low. One without any other question is as it was: a filter
    leaves it out as a whole.
    """
    found = rated_out(record, ratings, where)
    if None not in found or not any(found):
        return record
    return {**record, "texts": [text for text, rule in zip(record["texts"], found, strict=True) if rule is None]}
