"""Filters of a data set (``filters=[dict(type=...)]``): which of its records are used.

In: a record as a ``CheckedRecord``: its values, turns, sizes of images (from their headers) and counts of the index.
Out: whether it is kept. A filter is a function of the record alone, so what it decides is kept with the index
(``subset.py``).
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar

from annotated_types import Ge

from unigen_ds.config.registry import FILTERS, checked
from unigen_ds.data.records.ratings import RATING_KEYS, RATINGS, low_ratings
from unigen_ds.data.records.records import Layout, Turn
from unigen_ds.data.samples.processor import ConversationProcessor
from unigen_ds.data.sources.base import Row

Most = Annotated[int, Ge(0)] | None
RATED_QUESTIONS = "rated"
"""The rule of ``RatingFilter`` that counts all questions of records that have ratings."""


class CheckedRecord:
    """One record, as a filter sees it. What needs reading is read when it is asked for."""

    def __init__(self, entry: Row, layout: Layout, processor: ConversationProcessor, counts: Mapping[str, int]) -> None:
        self._entry, self._layout, self._processor, self.counts = entry, layout, processor, counts
        self.where: object = entry.where
        """Position of the record, as text ``train.jsonl:17``: it begins every message about the record."""
        self.num_text_tokens = counts["tokens"] - counts["image_tokens"]
        self.num_tiles = counts["tiles"]
        """Images that a vision tower or the VAE encodes as conditions; of a ``VLM`` its tiles."""

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """Values of the record under the names of a layout (``columns``); images in its file are ``StoredImage``."""
        return self._layout.rename_keys(self._entry.record, self.where)

    @cached_property
    def turns(self) -> Sequence[Turn]:
        """Texts and images in their order, without what ratings remove."""
        return self._layout.at(self._entry).turns(self._entry.record, self.where)

    @property
    def texts(self) -> list[str]:
        return [turn.value for turn in self.turns if turn.kind == "text"]

    @property
    def images(self) -> list[str]:
        """Paths, or ``StoredImage``."""
        return [turn.value for turn in self.turns if turn.kind == "image"]

    @cached_property
    def image_sizes(self) -> list[tuple[int, int]]:
        """(width, height) in pixels of each image whose header can be read; one that cannot is a skipped sample."""
        headers = (self._processor.header(path, keep=False) for path in self.images)
        return [header.size for header in headers if header.size is not None]


class RecordFilter:
    """Subclass it, register it in ``FILTERS``, and return in ``keeps`` whether a record is used."""

    rules: ClassVar[Sequence[str]] = ()
    """Names of what ``removed_parts`` counts."""
    ratings: tuple[tuple[str, int], ...] = ()

    def keeps(self, record: CheckedRecord) -> bool:
        """Whether the record is used. A function of the record alone: it is called once, in any process."""
        raise NotImplementedError

    def removed_parts(self, record: CheckedRecord) -> Sequence[int]:
        """Parts of the record (questions) that each of ``rules`` removes from it."""
        return ()

    @property
    def settings(self) -> str:
        """Class and arguments as text, for messages, and to find what was decided before."""
        values = [(key, value) for key, value in sorted(vars(self).items()) if value is not None and key != "ratings"]
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in values)})"

    @property
    def code(self) -> str | None:
        """Changes with what it decides: of a user's class a digest of its text. None: unknown, so nothing is kept."""
        kind = type(self)
        if kind.__module__ == __name__:
            return f"{kind.__name__} 1"  # another number where one decides in another way than in 1.0
        try:
            return hashlib.blake2b(inspect.getsource(kind).encode(), digest_size=16).hexdigest()
        except (OSError, TypeError):
            return None


@FILTERS.register_module()
class RatingFilter(RecordFilter):
    """nanoVLM's: questions with a rating below the least one are left out, and records without any other question.

    Its rows have them: ``relevance_ratings`` and so on, one for each of ``texts``; a missing one removes nothing.

    Args:
        relevance_min_rating: least ``relevance_ratings`` that is kept.
        image_correspondence_min_rating: the same of ``image_correspondence_ratings``.
        visual_dependency_min_rating: the same of ``visual_dependency_ratings``.
        formatting_min_rating: the same of ``formatting_ratings``.
    """

    rules = (*RATINGS, RATED_QUESTIONS)

    @checked()
    def __init__(
        self,
        *,
        relevance_min_rating: int = 1,
        image_correspondence_min_rating: int = 1,
        visual_dependency_min_rating: int = 1,
        formatting_min_rating: int = 1,
    ) -> None:
        self.relevance_min_rating = relevance_min_rating
        self.image_correspondence_min_rating = image_correspondence_min_rating
        self.visual_dependency_min_rating = visual_dependency_min_rating
        self.formatting_min_rating = formatting_min_rating
        self.ratings = tuple((rule, getattr(self, f"{rule}_min_rating")) for rule in RATINGS)

    def keeps(self, record: CheckedRecord) -> bool:
        names = low_ratings(record.values, self.ratings, record.where)
        return not names or None in names

    def removed_parts(self, record: CheckedRecord) -> Sequence[int]:
        names = low_ratings(record.values, self.ratings, record.where)
        return [*map(names.count, RATINGS), len(names) if any(map(record.values.get, RATING_KEYS)) else 0]


@FILTERS.register_module()
class ImageCountFilter(RecordFilter):
    """Records with so many images.

    Args:
        max_images: images at most, as nanoVLM's ``max_images_per_example`` counts them.
        max_tiles: condition images of a vision tower or the VAE at most; of a ``VLM`` tiles, global ones included.
    """

    @checked()
    def __init__(self, *, max_images: Most = None, max_tiles: Most = None) -> None:
        self.max_images, self.max_tiles = max_images, max_tiles

    def keeps(self, record: CheckedRecord) -> bool:
        few_tiles = self.max_tiles is None or record.num_tiles <= self.max_tiles
        return few_tiles and (self.max_images is None or len(record.images) <= self.max_images)
