"""nanoVLM's ratings: a record has a number or null for each question of its ``texts``, in ``relevance_ratings`` etc."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unigen_ds.core.errors import DataError, short_value

RATINGS = ("relevance", "image_correspondence", "visual_dependency", "formatting")
RATING_KEYS = tuple(f"{name}_ratings" for name in RATINGS)


def low_ratings(record: Mapping[str, Any], least: Sequence[tuple[str, int]], where: object) -> list[str | None]:
    """Return for each question the first rating below its number in ``least``, or None: it is kept, as in nanoVLM also
    where it is missing or null. Raises ``DataError`` where a record's ratings are not one number for each question.
    """
    texts = record.get("texts")
    if not isinstance(texts, list):
        return []
    names: list[str | None] = [None] * len(texts)
    for name, least_rating in least:
        if (values := record.get(f"{name}_ratings")) is None:
            continue
        numbers = isinstance(values, list) and all(one is None or type(one) in (int, float) for one in values)
        if not numbers or len(values) != len(texts):
            requirement = f"{len(texts)} numbers or null, one for each of texts"
            raise DataError(f"{where}: {name}_ratings is {short_value(values)}", allowed=requirement)
        for i, rating in enumerate(values):
            if rating is not None and rating < least_rating and names[i] is None:
                names[i] = name
    return names


def drop_questions(record: Mapping[str, Any], least: Sequence[tuple[str, int]], where: object) -> Mapping[str, Any]:
    """Return a record without the questions that are rated too low, unless none would be left: a filter removes it."""
    names = low_ratings(record, least, where)
    if None not in names or not any(names):
        return record
    return {**record, "texts": [text for text, name in zip(record["texts"], names, strict=True) if name is None]}
