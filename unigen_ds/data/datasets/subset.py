"""Some records of a source: the first ones, those that filters keep, or one side of a share for validation.

In: a source and the numbers of its records. Out: a ``Subset``, which is a ``PlannedDataset`` of these records. Numbers
stay those of the data file (``record_number``), so a sample id names the same record with and without a subset. Whether
a record is in a share for validation (``val_dataloader=dict(split=0.02)``) is a function of (seed, digest of the
record's content): equal records are on the same side, in whichever source they are, and records that are appended later
move no other one. What filters decide is cached with the index, and in the fingerprint only where they leave out any.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.data.cache.array_cache import SUFFIX, ArrayFile, fingerprint, load_or_fill
from unigen_ds.data.datasets.dataset import PlannedDataset, UnifiedGenerationDataset, is_streamed, source_names
from unigen_ds.data.datasets.filters import RATED_QUESTIONS, CheckedRecord, RecordFilter
from unigen_ds.data.index.index import batches
from unigen_ds.data.order.order import mix_many
from unigen_ds.data.records.unusable import LIST_FILE, SKIP_KEY, BadRecord
from unigen_ds.data.samples.sample import COLUMNS, Array, Counts, Sample
from unigen_ds.system import dist
from unigen_ds.system.log import logger, notice
from unigen_ds.system.seeding import derive_seed

_FORMAT = "unigen-filters-1"


class Subset:
    """Some records of ``whole`` (a source, or a subset of it) by their ``numbers`` there, ascending. ``choice``: why
    these: ``FirstRecords``, ``Side`` or ``Filtering``. Its ``facts`` are what the fingerprint has beside the source's,
    ``prefix_facts`` what ``prefix_digest`` has; None: its digest is the source's own.
    """

    def __init__(self, whole: PlannedDataset, numbers: Array, choice: Any) -> None:
        self.whole, self.numbers, self.choice = whole, numbers, choice
        self.name, self.weight, self.group = whole.name, whole.weight, getattr(whole, "group", None)
        self.cache_folder: Path | None = whole.cache_folder

    def __len__(self) -> int:
        return len(self.numbers)

    def lengths(self) -> tuple[Array, Array]:
        return self.counts().tokens, self.counts().tiles

    def counts(self) -> Counts:
        return self._counts

    @cached_property
    def _counts(self) -> Counts:
        first = len(self) == int(self.numbers[-1:].sum()) + 1  # the first ones: views, which need no memory
        counts, rows = self.whole.counts(), slice(len(self)) if first else self.numbers
        return Counts(*(getattr(counts, name)[rows] for name in COLUMNS))

    def sample(self, index: int, *, pass_number: int = 0) -> Sample:
        return self.whole.sample(int(self.numbers[index]), pass_number=pass_number)

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.whole.fingerprint, *self.choice.facts(self.numbers))

    def prefix_digest(self, number: int) -> str:
        """Digest of the first ``number`` records, and of those between them that are not chosen."""
        numbers = self.numbers[:number]
        whole = self.whole.prefix_digest(int(numbers[-1]) + 1 if number else 0)
        facts = self.choice.prefix_facts(numbers)
        return whole if facts is None else fingerprint(number, whole, *facts)

    def content_digests(self) -> Array:
        """[N] as of ``UnifiedGenerationDataset``: a record is on the same side of a share in each subset."""
        return self.whole.content_digests()[self.numbers]  # type: ignore[attr-defined]


def subsets(dataset: PlannedDataset) -> Iterator[Subset]:
    """Yield the subsets through which a data set was made, the last one first; none for a source itself."""
    while isinstance(dataset, Subset):
        yield dataset
        dataset = dataset.whole


def subset_by(dataset: PlannedDataset, kind: type) -> Subset | None:
    """Return the subset of a data set whose choice has the type ``kind``, or None if there is none."""
    return next((one for one in subsets(dataset) if isinstance(one.choice, kind)), None)


def whole_of(dataset: PlannedDataset) -> PlannedDataset:
    """Return the source that a sample id refers to."""
    return [dataset, *(subset.whole for subset in subsets(dataset))][-1]


def record_number(dataset: PlannedDataset, index: int) -> int:
    """Return the number that a record of ``dataset`` has in sample ids: that in ``whole_of(dataset)``."""
    for subset in subsets(dataset):
        index = int(subset.numbers[index])
    return getattr(whole_of(dataset), "first_number", 0) + index


def sample_ids(name: str, dataset: PlannedDataset, records: Array) -> list[str]:
    """Return what messages call some records of the source ``name``."""
    return [f"{name}:{record_number(dataset, index)}" for index in records.tolist()]


# --- num_used_data --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FirstRecords:
    """``num_used_data`` of a data set: only its first records are trained on."""

    def facts(self, numbers: Array) -> tuple[object, ...]:
        return "num_used_data", len(numbers)

    def prefix_facts(self, numbers: Array) -> None:
        return None


def first_records(dataset: Any) -> Any:
    """Return the data set, or the part that its ``num_used_data`` asks for. Warns where it has no more than that."""
    number = getattr(dataset, "num_used_data", None)
    if number is not None and number < len(dataset):
        return Subset(dataset, np.arange(number), FirstRecords())
    if number is not None and number > len(dataset) and dist.env_rank() == 0:
        text = "%s: num_used_data is %d, and there are %d records: all of them are used"
        logger().warning(text, dataset.name, number, len(dataset))
    return dataset


# --- val_dataloader.split -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Division:
    """How the records are divided into those that are trained on and those for validation."""

    share: float
    """Share of the records, in (0, 1), that is not trained on; about this share, as each record is drawn on its own."""
    seed: int

    def draw(self, digests: Array) -> NDArray[np.float64]:
        """[N] a number in [0, 1) of each record: below ``share`` it is in the share, so a larger one contains it."""
        key = np.uint64(derive_seed(self.seed, "validation"))
        draws = mix_many(digests.astype(np.int64).view(np.uint64) ^ key) >> np.uint64(11)
        return draws.astype(np.float64) / 2.0**53


@dataclass(frozen=True)
class Side:
    division: Division
    name: str
    """``train`` or ``validation``."""

    def facts(self, numbers: Array) -> tuple[object, ...]:
        return self.division, self.name

    prefix_facts = facts


def division_of(datasets: Sequence[PlannedDataset]) -> Division | None:
    sides = (subset_by(dataset, Side) for dataset in datasets)
    return next((side.choice.division for side in sides if side is not None), None)


def divide(datasets: Sequence[PlannedDataset], division: Division) -> tuple[list[Subset], list[Subset]]:
    """Each source without the share, and the share. Raises ``DataError``: no records; ``ConfigError``: no digests."""
    training: list[Subset] = []
    validation: list[Subset] = []
    what, remedy = f"val_dataloader.split={division.share:g}", "more data, or a dataset of its own for val_dataloader"
    for name, dataset in zip(source_names(datasets), datasets, strict=True):
        kind: Any = type(whole_of(dataset))
        if not hasattr(kind, "content_digests"):
            raise ConfigError(
                f"val_dataloader.split divides {name}, and {kind.__name__} has no content_digests()",
                remedy=f"add content_digests(self) to {kind.__name__}: 64 bits of each record as an int64 array; or"
                " give val_dataloader a dataset of its own",
            )
        is_held_out = division.draw(dataset.content_digests()) < division.share  # type: ignore[attr-defined]
        training.append(Subset(dataset, np.flatnonzero(~is_held_out), Side(division, "train")))
        validation.append(Subset(dataset, np.flatnonzero(is_held_out), Side(division, "validation")))
        if not len(training[-1]):
            problem = f"{what} leaves none of the {len(dataset):,} records of {name} to train on"
            raise DataError(problem, remedy=f"a smaller share, {remedy}")
        if not len(validation[-1]):
            notice(f"{what} selects none of the {len(dataset):,} records of {name}.")
    if not any(map(len, validation)):
        problem = f"{what} selects none of {sum(map(len, datasets)):,} records (each is drawn on its own)"
        raise DataError(problem, remedy=f"a larger share, {remedy}")
    return training, validation


# --- filters, and on_record_error -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Filtering:
    """What filters have decided: the choice of a ``Subset``."""

    settings: tuple[str, ...]
    report: Mapping[str, Any]
    """Plain numbers: records, those that each filter removes (the first one that does), and questions by rating."""
    filter_numbers: Array
    """Number of the filter that removes each record, from 1; one more: ``on_record_error``; 0: none removes it."""
    unusable: Sequence[BadRecord]

    def facts(self, numbers: Array) -> tuple[object, ...]:
        return _FORMAT, hashlib.blake2b(numbers.astype("<i8").tobytes(), digest_size=16).hexdigest()

    def prefix_facts(self, numbers: Array) -> tuple[object, ...] | None:
        """Before the first bad record it is the source's own: a bad one may be appended."""
        if not self.settings and (not len(numbers) or numbers[-1] == len(numbers) - 1):
            return None
        return self.facts(numbers)[1:]


def apply_filters(dataset: Any) -> Any:
    """Return the data set, or what its filters keep of it. Raises ``DataError`` where that is nothing."""
    if is_streamed(whole_of(dataset)):
        return dataset  # each shard is filtered when it is reached
    subset = kept_records(dataset)
    if subset is not dataset and not len(subset):
        raise all_removed(subset, subset.name)
    return subset


def kept_records(dataset: Any) -> Any:
    """Return the data set, or what its filters keep of it, which may be nothing."""
    whole: Any = whole_of(dataset)
    number = len(dataset)  # num_used_data counts records of the file
    if not hasattr(whole, "unusable"):
        return dataset
    filters, first = getattr(whole, "filters", ()), whole.first_number
    unusable = [one for one in whole.unusable() if one.number - first < number]
    if not filters and not unusable:
        return dataset
    filter_numbers, parts = np.zeros(number, dtype=np.int64), np.zeros((number, 0), dtype=np.int64)
    if filters:
        filter_numbers, parts = (array[:number].copy() for array in _decide(whole))
    filter_numbers[[one.number - first for one in unusable]] = len(filters) + 1
    names: list[str] = []
    for kind in (type(one).__name__ for one in filters):
        names.append(kind if kind not in names else f"{kind}#{len(names)}")
    counts = {name: int((filter_numbers == k).sum()) for k, name in enumerate(names, start=1)}
    skips = {SKIP_KEY: len(unusable)} if unusable else {}
    report: dict[str, Any] = {"records": number, "removed": {**counts, **skips}}
    if rules := [rule for one in filters for rule in one.rules]:
        questions = dict(zip(rules, parts.sum(axis=0).tolist(), strict=True))
        report |= {"questions_rated": questions.pop(RATED_QUESTIONS), "questions_removed": questions}
    filtering = Filtering(tuple(one.settings for one in filters), report, filter_numbers, unusable)
    return Subset(dataset, np.flatnonzero(filter_numbers == 0), filtering)


def all_removed(subset: Subset, title: str) -> DataError:
    report = subset.choice.report
    return DataError(
        f"{title}: all {report['records']:,} records are left out ({removal_line(report)})",
        remedy="weaker limits in `filters`, or other data",
    )


def filtering_of(dataset: PlannedDataset) -> Filtering | None:
    subset = subset_by(dataset, Filtering)
    return None if subset is None else subset.choice


def _decide(dataset: UnifiedGenerationDataset) -> tuple[Array, Array]:
    """Return for each record the first filter that removes it, from 1, or 0; and ``removed_parts`` [N, rules]."""
    filters: Sequence[RecordFilter] = dataset.filters
    index, rules = dataset.index, sum(len(one.rules) for one in filters)
    facts = [fact for one in filters for fact in (one.settings, one.code)]
    key = fingerprint(_FORMAT, dataset.prefix_digest(len(dataset)), dataset.fingerprint, *facts)
    cache = None
    if index.folder is not None and all(one.code is not None for one in filters):
        cache = index.folder / f"{index.source.origin.name}-filters-{key[:16]}{SUFFIX}"

    def fill(new: ArrayFile) -> None:
        new.add("removed", len(index))
        new.add("parts", len(index) * rules, shape=(len(index), rules))
        malformed_numbers = set(index.malformed_numbers.tolist())
        for start, entries in batches(index.source, (0, len(index))):
            numbers, parts = np.zeros(len(entries), dtype=np.int64), np.zeros((len(entries), rules), dtype=np.int64)
            columns = [getattr(index.counts, name)[start : start + len(entries)].tolist() for name in COLUMNS]
            for i, (entry, row) in enumerate(zip(entries, zip(*columns, strict=True), strict=True)):
                if start + i in malformed_numbers:
                    continue
                record = CheckedRecord(entry, index.layout, dataset.processor, dict(zip(COLUMNS, row, strict=True)))
                numbers[i] = next((k for k, one in enumerate(filters, start=1) if not one.keeps(record)), 0)
                parts[i] = [value for one in filters if one.rules for value in one.removed_parts(record)]
            new.put("removed", start, numbers)
            new.put("parts", start * rules, parts.reshape(-1))

    arrays = load_or_fill(cache, key, fill)
    return arrays["removed"], arrays["parts"]


def removal_line(report: Mapping[str, Any]) -> str:
    """The numbers of ``Filtering.report`` as a sentence."""
    total, records = sum(report["removed"].values()), report["records"]
    each = ", ".join(f"{name} {number:,}" for name, number in report["removed"].items())
    who = "filters remove"
    if list(report["removed"]) == [SKIP_KEY]:
        who, each = f"{SKIP_KEY} leaves out", f"see {LIST_FILE}"
    line = f"{who} {total:,} of {records:,} records ({total / max(records, 1):.1%}): {each}"
    if "questions_removed" in report:
        questions, num_rated = report["questions_removed"], report["questions_rated"]
        by_rule = ", ".join(f"{rule} {number:,}" for rule, number in questions.items())
        line += f"; {sum(questions.values()):,} of {num_rated:,} questions by their ratings: {by_rule}"
        if not num_rated:
            line += ". RatingFilter does nothing: no record has ratings"
    return line
