"""nanoVLM's four ratings of each question of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unigen_ds.core.errors import DataError
from unigen_ds.data.records.turn import format_value

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
    low: list[str | None] = [None] * len(texts)
    for name, least in ratings:
        values = record.get(f"{name}_ratings")
        if values is None:
            continue
        numbers = isinstance(values, list) and all(one is None or type(one) in _NUMBERS for one in values)
        if not numbers or len(values) != len(texts):
            allowed = f"{len(texts)} numbers or null, one for each of texts"
            raise DataError(f"{where}: {name}_ratings is {format_value(values)}", allowed=allowed)
        for i, rating in enumerate(values):
            if rating is not None and rating < least and low[i] is None:
                low[i] = name
    return low


def well_rated(record: Mapping[str, Any], ratings: Sequence[tuple[str, int]], where: object) -> Mapping[str, Any]:
    """Return ``record`` without its questions that are rated too low. One without any other question is as it was: a
    filter leaves it out as a whole.
    """
    low = rated_out(record, ratings, where)
    if None not in low or not any(low):
        return record
    return {**record, "texts": [text for text, name in zip(record["texts"], low, strict=True) if name is None]}
