"""Filters of a data set (``filters=[dict(type=...)]``): which of its records are used.

In: a record as a ``CheckedRecord``: its values, turns, sizes of images (from their headers) and counts of the index.
Out: whether it is kept. A filter is a function of the record alone, so what it decides is kept with the index
(``filtering.py``).
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge

from unigen_ds.config.registry import FILTERS, checked
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.data.records.records import RATINGS, Layout, Turn, rated_out
from unigen_ds.data.samples.processor import ConversationProcessor
from unigen_ds.data.sources.base import FoundRecord, folder_of

Limit = Annotated[int, Ge(1)] | None
Most = Annotated[int, Ge(0)] | None
RATED = "rated"
"""Of ``RatingFilter.rules``: questions of records that have ratings."""


class CheckedRecord:
    """One record, as a filter sees it. What needs reading is read when it is asked for."""

    def __init__(
        self, entry: FoundRecord | None, layout: Layout, processor: ConversationProcessor, counts: Mapping[str, int]
    ) -> None:
        self._entry, self._layout, self._processor, self.counts = entry, layout, processor, counts

    @property
    def _read(self) -> FoundRecord:
        assert self._entry is not None, "a filter without `reads` reads a record"
        return self._entry

    @property
    def where(self) -> object:
        """As text ``train.jsonl:17``: it begins every message about the record."""
        return None if self._entry is None else self._entry.where

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """As its file has them, under the names of a layout (``columns``); images inside of the file are
        ``StoredImage``.
        """
        return self._layout.named(self._read.record, self.where)

    @cached_property
    def turns(self) -> Sequence[Turn]:
        """Texts and images in their order, without what ratings remove."""
        return self._layout.at(folder_of(self._read)).turns(self._read.record, self.where)

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

    @property
    def num_text_tokens(self) -> int:
        return self.counts["tokens"] - self.counts["image_tokens"]

    @property
    def num_tiles(self) -> int:
        """Images that a vision tower or the VAE encodes as conditions; of a ``VLM`` its tiles."""
        return self.counts["tiles"]


class RecordFilter:
    """Subclass it, register it in ``FILTERS``, and return in ``keeps`` whether a record is used."""

    reads: bool = True
    """Whether it needs the record itself, not only its counts."""
    rules: ClassVar[Sequence[str]] = ()
    """Names of what ``removed_parts`` counts."""

    def keeps(self, record: CheckedRecord) -> bool:
        """Whether the record is used. A function of the record alone: it is called once, in any process."""
        raise NotImplementedError(f"{type(self).__name__}.keeps")

    def removed_parts(self, record: CheckedRecord) -> Sequence[int]:
        """Parts of the record (questions) that each of ``rules`` removes from it."""
        return ()

    @property
    def ratings(self) -> tuple[tuple[str, int], ...]:
        """As of ``records.Layout``."""
        return ()

    @property
    def name(self) -> str:
        """In the log."""
        return type(self).__name__

    @property
    def settings(self) -> str:
        """In messages, and for recognising what was decided before."""
        arguments = ", ".join(f"{key}={value!r}" for key, value in sorted(vars(self).items()) if value is not None)
        return f"{self.name}({arguments})"

    @property
    def code(self) -> str | None:
        """What changes where it decides in another way: of a user's class a digest of its text. None: not known, so
        nothing is kept from one start to the next.
        """
        kind = type(self)
        if kind.__module__ == __name__:
            return f"{kind.__name__} 1"  # another number where one decides in another way than in 1.0
        return None if kind.__module__ == "__main__" else _source_digest(kind)


@FILTERS.register_module()
class RatingFilter(RecordFilter):
    """nanoVLM's: questions with a rating below the least one are left out, and records without any other question.

    Ratings are those of its rows: ``relevance_ratings`` and so on, one for each of ``texts``. A rating that is missing
    or null removes nothing.

    Args:
        relevance_min_rating: least ``relevance_ratings`` that is kept.
        image_correspondence_min_rating: the same of ``image_correspondence_ratings``.
        visual_dependency_min_rating: the same of ``visual_dependency_ratings``.
        formatting_min_rating: the same of ``formatting_ratings``.
    """

    rules = (*RATINGS, RATED)

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

    @property
    def ratings(self) -> tuple[tuple[str, int], ...]:
        return tuple((rule, getattr(self, f"{rule}_min_rating")) for rule in RATINGS)

    def keeps(self, record: CheckedRecord) -> bool:
        removed = rated_out(record.values, self.ratings, record.where)
        return not removed or None in removed

    def removed_parts(self, record: CheckedRecord) -> Sequence[int]:
        removed = rated_out(record.values, self.ratings, record.where)
        rated = any(record.values.get(f"{rule}_ratings") for rule in RATINGS)
        return [*map(removed.count, RATINGS), len(removed) if rated else 0]


@FILTERS.register_module()
class ImageSizeFilter(RecordFilter):
    """Records all of whose images have such a size, as the file has it; records without images are kept.

    Args:
        min_side: pixels of the shorter side at least.
        max_side: pixels of the longer side at most.
        max_ratio: longer side / shorter side at most.
    """

    @checked()
    def __init__(
        self, *, min_side: Limit = None, max_side: Limit = None, max_ratio: Annotated[float, Ge(1)] | None = None
    ) -> None:
        self.min_side, self.max_side, self.max_ratio = min_side, max_side, max_ratio

    def keeps(self, record: CheckedRecord) -> bool:
        return all(
            _within(min(size), self.min_side, None)
            and _within(max(size), None, self.max_side)
            and (self.max_ratio is None or max(size) <= self.max_ratio * min(size))
            for size in record.image_sizes
        )


@FILTERS.register_module()
class TextLengthFilter(RecordFilter):
    """Records whose texts together are so long.

    Args:
        min_characters: characters at least.
        max_characters: characters at most.
        min_tokens: tokens of texts at least, those of the chat template included.
        max_tokens: the same at most.
    """

    @checked()
    def __init__(
        self,
        *,
        min_characters: Limit = None,
        max_characters: Limit = None,
        min_tokens: Limit = None,
        max_tokens: Limit = None,
    ) -> None:
        self.min_characters, self.max_characters = min_characters, max_characters
        self.min_tokens, self.max_tokens = min_tokens, max_tokens

    @property
    def reads(self) -> bool:  # type: ignore[override]
        return self.min_characters is not None or self.max_characters is not None

    def keeps(self, record: CheckedRecord) -> bool:
        if not _within(record.num_text_tokens, self.min_tokens, self.max_tokens):
            return False
        return not self.reads or _within(sum(map(len, record.texts)), self.min_characters, self.max_characters)


@FILTERS.register_module()
class ImageCountFilter(RecordFilter):
    """Records with so many images.

    Args:
        max_images: images at most, as nanoVLM's ``max_images_per_example`` counts them.
        max_tiles: images that a vision tower or the VAE encodes as conditions at most; of a ``VLM`` its tiles, each
            global one included.
    """

    @checked()
    def __init__(self, *, max_images: Most = None, max_tiles: Most = None) -> None:
        self.max_images, self.max_tiles = max_images, max_tiles

    @property
    def reads(self) -> bool:  # type: ignore[override]
        return self.max_images is not None

    def keeps(self, record: CheckedRecord) -> bool:
        if not _within(record.num_tiles, None, self.max_tiles):
            return False
        return self.max_images is None or len(record.images) <= self.max_images


@FILTERS.register_module()
class FunctionFilter(RecordFilter):
    """A function of your own: ``keeps(record) -> bool`` of a ``CheckedRecord``.

    Args:
        function: its path, ``'my.module.keeps'``, or the function itself.
        version: another number where what the function calls has changed; its own text is compared.
    """

    @checked()
    def __init__(self, *, function: Any, version: int = 1) -> None:
        self.function: Callable[[CheckedRecord], bool] = (
            import_object(function, where="FunctionFilter.function") if isinstance(function, str) else function
        )
        self.version = version
        if not callable(self.function):
            raise ConfigError(f"FunctionFilter.function is {function!r}", allowed="a function, or 'my.module.keeps'")

    @property
    def name(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__name__)

    @property
    def settings(self) -> str:
        return f"{getattr(self.function, '__module__', '')}.{self.name}, version {self.version}"

    @property
    def code(self) -> str | None:
        return _source_digest(self.function)

    def keeps(self, record: CheckedRecord) -> bool:
        """What the function returns. Raises ``DataError`` naming record and function where it fails."""
        try:
            keeps: Any = self.function(record)
        except DataError:
            raise
        except Exception as error:  # a user's own code raises anything
            problem = f"{record.where}: the filter {self.name} failed: {type(error).__name__}: {error}"
            remedy = "it is called with a CheckedRecord (unigen_ds/data/datasets/filters.py)"
            raise DataError(problem, remedy=remedy) from error
        if not isinstance(keeps, (bool, np.bool_)):
            raise DataError(f"{record.where}: the filter {self.name} returned {keeps!r}", allowed="True or False")
        return bool(keeps)


def _within(value: int, low: int | None, high: int | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)


def import_object(path: str, *, where: str) -> Any:
    """The object of a user's own module. ``where``: its path in the config, for the error."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{where} {path!r} cannot be imported: {error}", allowed="'my.module.name'") from error


def _source_digest(what: Any) -> str | None:
    try:
        return hashlib.blake2b(inspect.getsource(what).encode(), digest_size=16).hexdigest()
    except (OSError, TypeError):
        return None
