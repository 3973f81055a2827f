"""The records of a data set that its filters keep, and how many each filter removes.

In: a data set with filters (``filters.py``), or with records that ``on_record_error`` leaves out. Out: a ``Subset`` of
what is left. Each record is checked once; what was decided is cached with the index. The fingerprint of the data has
the numbers that are kept, only where records are left out: data without filters keeps its fingerprint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unigen_ds.core.errors import DataError
from unigen_ds.data.cache.array_cache import SUFFIX, ArrayFile, fingerprint, load_or_fill
from unigen_ds.data.datasets.dataset import PlannedDataset, ScannedDataset, UnifiedGenerationDataset, is_streamed
from unigen_ds.data.datasets.filters import RATED, CheckedRecord, RecordFilter
from unigen_ds.data.datasets.subset import Subset, subset_by, whole_of
from unigen_ds.data.index.index import batches
from unigen_ds.data.records.unusable import LIST_FILE, SKIPPED, BadRecord
from unigen_ds.data.samples.sample import COLUMNS, Array

_FORMAT = "unigen-filters-1"


@dataclass(frozen=True)
class Filtering:
    """What filters have decided: the choice of a ``Subset``."""

    settings: tuple[str, ...]
    """Of the filters, in words."""
    report: Mapping[str, Any]
    """``_report``'s."""
    removed: Array
    """Of each record the number of the filter that removes it, from 1; 0: none. One more than there are filters: it
    cannot be trained on (``on_record_error``)."""
    unusable: Sequence[BadRecord]
    """Those."""

    def facts(self, numbers: Array) -> tuple[object, ...]:
        """See ``Choice``."""
        return _FORMAT, _digest(numbers)

    def prefix_facts(self, numbers: Array) -> tuple[object, ...] | None:
        """See ``Choice``. Before the first bad record it is the source's own: a bad one may be appended."""
        if not self.settings and (not len(numbers) or numbers[-1] == len(numbers) - 1):
            return None
        return (_digest(numbers),)


def _digest(numbers: Array) -> str:
    return hashlib.blake2b(np.ascontiguousarray(numbers, dtype="<i8").data, digest_size=16).hexdigest()


def apply_filters(dataset: Any) -> Any:
    """Return the data set, or what its filters keep of it. Raises ``DataError`` where that is nothing."""
    if is_streamed(whole_of(dataset)):
        return dataset  # each shard is filtered when it is reached
    kept = kept_records(dataset)
    if kept is not dataset and not len(kept):
        raise all_removed(kept, kept.name)
    return kept


def kept_records(dataset: Any) -> Any:
    """Return the data set, or what its filters keep of it, which may be nothing."""
    whole, number = whole_of(dataset), len(dataset)  # num_used_data counts records of the file
    if not isinstance(whole, (UnifiedGenerationDataset, ScannedDataset)):
        return dataset
    filters, first = getattr(whole, "filters", ()), whole.first_number
    unusable = [one for one in whole.unusable() if one.number - first < number]
    if not filters and not unusable:
        return dataset
    removed, parts = np.zeros(number, dtype=np.int64), np.zeros((number, 0), dtype=np.int64)
    if filters:
        removed, parts = (array[:number].copy() for array in _decide(whole))
    removed[[one.number - first for one in unusable]] = len(filters) + 1
    report = _report(filters, removed, parts)
    filtering = Filtering(tuple(one.settings for one in filters), report, removed, unusable)
    return Subset(dataset, np.flatnonzero(removed == 0), filtering)


def all_removed(subset: Subset, title: str) -> DataError:
    """Return the error for a source of which nothing is kept."""
    report = subset.choice.report
    return DataError(
        f"{title}: all {report['records']:,} records are left out ({removal_line(report)})",
        remedy="weaker limits in `filters`, or other data",
    )


def filtering_of(dataset: PlannedDataset) -> Filtering | None:
    """Return what the filters of a data set have decided, or None if it has none."""
    subset = subset_by(dataset, Filtering)
    return None if subset is None else subset.choice


def _decide(dataset: Any) -> tuple[Array, Array]:
    """Of each record the number of the first filter that removes it, from 1, or 0; and ``removed_parts`` [N, rules]."""
    filters, index = dataset.filters, dataset.index
    facts = [fact for one in filters for fact in (one.settings, one.code)]
    key = fingerprint(_FORMAT, dataset.prefix_digest(len(dataset)), dataset.fingerprint, *facts)
    cache = None
    if index.folder is not None and all(one.code is not None for one in filters):
        cache = index.folder / f"{index.source.origin.name}-filters-{key[:16]}{SUFFIX}"
    arrays = load_or_fill(cache, key, lambda new: _decide_all(dataset, new))
    return arrays["removed"], arrays["parts"]


def _decide_all(dataset: UnifiedGenerationDataset, new: ArrayFile) -> None:
    filters, index, batch = dataset.filters, dataset.index, dataset.index.source.batch
    reads, rules = any(one.reads for one in filters), sum(len(one.rules) for one in filters)
    new.add("removed", len(index))
    new.add("parts", len(index) * rules, shape=(len(index), rules))
    malformed = set(index.malformed.tolist())
    for start in range(0, len(index), batch):
        stop = min(start + batch, len(index))
        removed, parts = np.zeros(stop - start, dtype=np.int64), np.zeros((stop - start, rules), dtype=np.int64)
        entries: Sequence[Any] = [None] * (stop - start)
        if reads:
            ((_, entries),) = batches(index.source, (start, stop))
        columns = [getattr(index.counts, name)[start:stop].tolist() for name in COLUMNS]
        for i, (entry, row) in enumerate(zip(entries, zip(*columns, strict=True), strict=True)):
            if start + i in malformed:
                continue
            record = CheckedRecord(entry, index.layout, dataset.processor, dict(zip(COLUMNS, row, strict=True)))
            removed[i] = next((k for k, one in enumerate(filters, start=1) if not one.keeps(record)), 0)
            parts[i] = [value for one in filters if one.rules for value in one.removed_parts(record)]
        new.put("removed", start, removed)
        new.put("parts", start * rules, parts.reshape(-1))


def _report(filters: Sequence[RecordFilter], removed: Array, parts: Array) -> dict[str, Any]:
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
    """The numbers of ``Filtering.report`` as a sentence."""
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
