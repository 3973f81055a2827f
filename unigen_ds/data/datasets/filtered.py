"""The records of a data set that its filters keep, under their own numbers, and how many each filter removes.

In: a ``UnifiedGenerationDataset`` with filters. Out: a ``PlannedDataset`` of what is left. Each record is checked once;
what was decided is cached with the index. The fingerprint of the data has the numbers that are kept, only where filters
are set: data without filters keeps its fingerprint.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from unigen_ds.core.errors import DataError
from unigen_ds.data.cache.array_cache import SUFFIX, NewArrays, filled, fingerprint
from unigen_ds.data.datasets.dataset import PlannedDataset, ScannedDataset, UnifiedGenerationDataset
from unigen_ds.data.datasets.filters import RATED, CheckedRecord, RecordFilter, decided
from unigen_ds.data.index.planning import batches
from unigen_ds.data.records.unusable import LIST_FILE, SKIPPED, BadRecord
from unigen_ds.data.samples.counts import COLUMNS, Array, Counts
from unigen_ds.data.samples.sample import Sample
from unigen_ds.system import dist
from unigen_ds.system.log import logger


class Selected(ABC):
    """Some records of a source, in its order; a ``PlannedDataset`` of their own number, but for what identifies them.

    Args:
        whole: the source.
        numbers: of the records, ascending.
    """

    def __init__(self, whole: PlannedDataset, numbers: Array) -> None:
        self.whole, self.numbers = whole, numbers
        self.name, self.weight, self.group = whole.name, whole.weight, getattr(whole, "group", None)

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Of the records and of what selected them."""

    @property
    def cache_folder(self) -> Path | None:
        return self.whole.cache_folder

    def __len__(self) -> int:
        return len(self.numbers)

    def lengths(self) -> tuple[Array, Array]:
        return self._counts.tokens, self._counts.tiles

    @cached_property
    def _counts(self) -> Counts:
        return self.whole.counts().some(self.numbers, self.cache_folder, lambda: fingerprint(self.fingerprint, COLUMNS))

    def counts(self) -> Counts:
        return self._counts

    def sample(self, index: int, *, pass_number: int = 0) -> Sample:
        return self.whole.sample(int(self.numbers[index]), pass_number=pass_number)

    def _whole_digest(self, number: int) -> str:
        """Of the first ``number`` records and all that are between them."""
        return self.whole.prefix_digest(int(self.numbers[number - 1]) + 1 if number else 0)


_FORMAT = "unigen-filters-1"


class Filtered(Selected):
    """The records that filters keep.

    Args:
        whole: the source.
        numbers: of the records that are kept, ascending.
        settings: of the filters, in words.
        report: ``removed_by``'s.
        removed: of each record the number of the filter that removes it, from 1; 0: none. One more than there are
            filters: it cannot be trained on (``on_record_error``).
        unusable: those.
    """

    def __init__(
        self,
        whole: PlannedDataset,
        numbers: Array,
        settings: Sequence[str],
        report: Mapping[str, Any],
        removed: Array,
        unusable: Sequence[BadRecord] = (),
    ) -> None:
        super().__init__(whole, numbers)
        self.settings, self.report, self.removed, self.unusable = tuple(settings), report, removed, unusable

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.whole.fingerprint, _FORMAT, self._kept(len(self)))

    def prefix_digest(self, number: int) -> str:
        """Covers the records that are left out between them, too. Before the first of these it is the source's own: a
        bad one may be appended to it.
        """
        if not self.settings and (not number or self.numbers[number - 1] == number - 1):
            return self.whole.prefix_digest(number)
        return fingerprint(number, self._whole_digest(number), self._kept(number))

    def _kept(self, number: int) -> str:
        first = np.ascontiguousarray(self.numbers[:number], dtype="<i8")
        return hashlib.blake2b(first.data, digest_size=16).hexdigest()

    def content_digests(self) -> Array:
        """[N] as of ``UnifiedGenerationDataset``: a record is on the same side of a split with and without filters."""
        whole: Any = self.whole
        digests: Array = whole.content_digests()[self.numbers]
        return digests


def filtered(dataset: Any) -> Any:
    """The data set, or what its filters keep of it. Raises ``DataError`` where that is nothing."""
    origin = _whole(dataset)
    if isinstance(origin, ScannedDataset) and (bad := [one for one in origin.unusable() if one.number < len(dataset)]):
        removed = np.zeros(len(dataset), dtype=np.int64)
        removed[[one.number for one in bad]] = 1
        report = removed_by((), removed, removed)
        found = Filtered(dataset, np.flatnonzero(removed == 0), (), report, removed, bad)
    elif not isinstance(origin, UnifiedGenerationDataset) or not leaves_out(origin) or origin.shards is not None:
        return dataset  # of a streamed one each shard is filtered when it is reached
    else:
        found = kept_records(dataset, origin)
    if not len(found):
        raise all_removed(found)
    return found


def kept_records(dataset: Any, origin: Any) -> Filtered:
    """What the filters of ``origin`` keep of it, or of its first records ``dataset``. It may be nothing."""
    removed, parts = _decide(origin)
    removed, parts = removed[: len(dataset)], parts[: len(dataset)]  # num_used_data counts records of the file
    report = removed_by(origin.filters, removed, parts)
    numbers = np.flatnonzero(removed == 0)
    bad, first = origin.index.unusable() if origin.index.left_out.size else (), getattr(origin, "first", 0)
    unusable = [replace(one, number=first + one.number) for one in bad if one.number < len(dataset)]
    return Filtered(dataset, numbers, [one.settings for one in origin.filters], report, removed, unusable)


def all_removed(found: Filtered, *, title: str | None = None) -> DataError:
    """For a source of which nothing is kept. ``title``: how the message calls it; None: its name."""
    return DataError(
        f"{title or found.name}: all {found.report['records']:,} records are left out ({removal_line(found.report)})",
        remedy="weaker limits in `filters`, or other data",
    )


def filters_of(dataset: Any) -> Filtered | None:
    """The filters through which a data set, or a part of it, was made."""
    while not isinstance(dataset, Filtered):
        if (dataset := getattr(dataset, "whole", None)) is None:
            return None
    return dataset


def _whole(dataset: Any) -> Any:
    """The data set itself, without what leaves records out."""
    while hasattr(dataset, "whole"):
        dataset = dataset.whole
    return dataset


def leaves_out(dataset: Any) -> bool:
    """Whether a data set has filters, or records that ``on_record_error`` leaves out."""
    return bool(dataset.filters) or dataset.index.left_out.size > 0


def _decide(dataset: UnifiedGenerationDataset) -> tuple[Array, Array]:
    """Of each record the number of the first filter that removes it, from 1, or 0; and ``removed_parts`` [N, rules]."""
    filters, index = dataset.filters, dataset.index
    facts = [fact for one in filters for fact in (one.settings, one.code)]
    key = fingerprint(_FORMAT, dataset.prefix_digest(len(dataset)), dataset.fingerprint, *facts)
    usable = index.folder is not None and filters and all(one.code is not None for one in filters)
    name = f"{index.source.origin.name}-filters-{key[:16]}{SUFFIX}"
    cache = index.folder / name if usable and index.folder else None
    found = filled(cache, key, lambda new: _decide_all(dataset, new))
    removed = found["removed"]
    if index.left_out.size:
        removed = removed.copy()
        removed[index.left_out] = len(filters) + 1
    return removed, found["parts"]


def _decide_all(dataset: UnifiedGenerationDataset, new: NewArrays) -> None:
    filters, index = dataset.filters, dataset.index
    reads, rules = any(one.reads for one in filters), sum(len(one.rules) for one in filters)
    new.add("removed", len(index))
    new.add("parts", len(index) * rules, shape=(-1, rules) if rules else (len(index), 0))
    step, malformed = index.source.batch, set(index.malformed.tolist())
    for first in range(0, len(index) if filters else 0, step):
        stop = min(first + step, len(index))
        columns = [getattr(index.counts, name)[first:stop].tolist() for name in COLUMNS]
        entries: Sequence[Any] = [None] * (stop - first)
        if reads:
            ((_, entries),) = batches(index.source, (first, stop))
        removed: list[int] = []
        parts: list[int] = []
        for number, (entry, row) in enumerate(zip(entries, zip(*columns, strict=True), strict=True), first):
            if number in malformed:
                removed.append(0)
                parts += [0] * rules
                continue
            record = CheckedRecord(entry, index.layout, dataset.processor, dict(zip(COLUMNS, row, strict=True)))
            removed.append(next((k for k, one in enumerate(filters, start=1) if not decided(one, record)), 0))
            parts += [value for one in filters if one.rules for value in one.removed_parts(record)]
        new.put("removed", first, np.asarray(removed, dtype=np.int64))
        new.put("parts", first * rules, np.asarray(parts, dtype=np.int64))


def removed_by(filters: Sequence[RecordFilter], removed: Array, parts: Array) -> dict[str, Any]:
    """Plain numbers: records, those that each filter removes (the first one that does), and questions by rating."""
    names: list[str] = []
    for one in filters:
        names.append(one.name if one.name not in names else f"{one.name}#{len(names)}")
    rules = [rule for one in filters for rule in one.rules]
    report: dict[str, Any] = {
        "records": len(removed),
        "removed": {name: int((removed == number).sum()) for number, name in enumerate(names, start=1)},
    }
    if unusable := int((removed > len(names)).sum()):
        report["removed"][SKIPPED] = unusable
    if rules:
        counts = {rule: int(parts[:, k].sum()) for k, rule in enumerate(rules)}
        report["questions_rated"] = counts.pop(RATED)
        report["questions_removed"] = counts
    return report


def removal_line(report: Mapping[str, Any]) -> str:
    """``removed_by``'s numbers as a sentence."""
    removed, records = sum(report["removed"].values()), report["records"]
    each = ", ".join(f"{name} {number:,}" for name, number in report["removed"].items())
    who = "filters remove"
    if list(report["removed"]) == [SKIPPED]:
        who, each = f"{SKIPPED} leaves out", f"see {LIST_FILE}"
    line = f"{who} {removed:,} of {records:,} records ({removed / max(records, 1):.1%}): {each}"
    if "questions_removed" in report:
        questions = report["questions_removed"]
        by_rule = ", ".join(f"{rule} {number:,}" for rule, number in questions.items())
        line += f"; {sum(questions.values()):,} of {report['questions_rated']:,} questions by their ratings: {by_rule}"
        if not report["questions_rated"]:
            line += ". RatingFilter does nothing: no record has ratings"
    return line


# ``num_used_data`` of a data set: only its first records are trained on.


class FirstRecords:
    """The first ``number`` records of a source, under their own numbers; everything else is the source's."""

    def __init__(self, whole: PlannedDataset, number: int) -> None:
        self.whole, self.number = whole, number
        if hasattr(whole, "content_digests"):
            self.content_digests = partial(_first_digests, whole, number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "whole":  # not yet unpickled
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __len__(self) -> int:
        return self.number

    def lengths(self) -> tuple[Array, Array]:
        tokens, tiles = self.whole.lengths()
        return tokens[: self.number], tiles[: self.number]

    @cached_property
    def _counts(self) -> Counts:
        counts = self.whole.counts()
        return Counts(*(getattr(counts, name)[: self.number] for name in COLUMNS))

    def counts(self) -> Counts:
        return self._counts

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.whole.fingerprint, "num_used_data", self.number)


def _first_digests(whole: Any, number: int) -> Array:
    digests: Array = whole.content_digests()[:number]
    return digests


def used_of(dataset: Any) -> FirstRecords | None:
    """The first records that a data set is made of; None: it has all."""
    while not isinstance(dataset, FirstRecords):
        if (dataset := getattr(dataset, "whole", None)) is None:
            return None
    return dataset


def used_line(found: FirstRecords) -> str:
    """As a sentence."""
    return f"num_used_data={found.number:,}: the first {found.number:,} of {len(found.whole):,} records are used"


def used(dataset: Any) -> Any:
    """The data set, or the part of it that its ``num_used_data`` asks for. Warns where it has no more than that."""
    number = getattr(dataset, "num_used_data", None)
    if number is None or number == len(dataset):
        return dataset
    if number < len(dataset):
        return FirstRecords(dataset, number)
    if dist.env_rank() == 0:
        logger().warning(
            "%s: num_used_data is %d, and there are %d records: all of them are used", dataset.name, number,
            len(dataset),
        )  # fmt: skip
    return dataset
