"""What of the data a run does not use, or uses in another way than a reader would expect: numbers, reasons, examples.

Every number is that of the run's own objects: its filters, its rule for long records, its index. Examples are the first
records, with the beginning of their text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unigen_ds.core.errors import DataError
from unigen_ds.data.batches.stream import SequenceStream
from unigen_ds.data.datasets.dataset import PlannedDataset, UnifiedGenerationDataset
from unigen_ds.data.datasets.filtering import Filtering
from unigen_ds.data.datasets.overflow import ACTIONS, Action, Fitted
from unigen_ds.data.datasets.streamed_units import StreamedFitted
from unigen_ds.data.datasets.subset import Side, Subset, record_number, subsets, whole_of
from unigen_ds.data.records.unusable import LIST_FILE, SKIPPED, BadRecord, unusable_error
from unigen_ds.data.records.unused import unused_of, with_unused
from unigen_ds.data.samples.counts import Array
from unigen_ds.system.files import write_text_atomic

NUM_EXAMPLES = 3
_TEXT = 240
_WORDS: dict[Action, str] = {
    "split": "longer than {key} {limit:,}: split into pieces",
    "truncate": "longer than {key} {limit:,}: truncated",
    "skip": "longer than {key} {limit:,}: left out",
    "error": "longer than {key} {limit:,}: refused",
}


@dataclass(frozen=True)
class Example:
    """One record."""

    id: str
    text: str
    """The beginning of its texts, and why it is an example."""


@dataclass(frozen=True)
class Reason:
    """Records of one source with one reason."""

    source: str
    reason: str
    number: int
    records: int
    """Of the source, from which ``number`` were counted."""
    used: bool
    """Whether the run uses them, in whole or in part."""
    examples: Sequence[Example]
    unit: str = "records"
    """What is counted."""


def reasons(stream: SequenceStream) -> list[Reason]:
    """In the order in which a record meets them. Those without a record are not in the list."""
    max_tiles = getattr(stream.packer, "max_tiles", None)
    sources = [_Source(*pair, max_tiles) for pair in zip(stream.names, stream.fitted, strict=True)]
    return [reason for source in sources for reason in source.reasons() if reason.number]


def check_unusable(sources: Sequence[Fitted], names: Sequence[str], limit: float) -> None:
    """Raise ``DataError`` where more than a share ``limit`` of all records is left out by ``on_record_error``."""
    unusable: list[BadRecord] = []
    records = 0
    for source in sources:
        if isinstance(source, StreamedFitted):
            source.limit = limit
            source.count_unusable(source)
        else:
            unusable += source.unusable
            records += len(whole_of(source.dataset))
    if len(unusable) > limit * records:
        raise unusable_error(unusable, ", ".join(names), records, limit=limit)


def list_left_out(parts: Sequence[Any], folder: Path) -> None:
    """Write ``left_out.jsonl``: a line for each record that ``on_record_error`` leaves out, and of a streamed source
    those of every shard that was reached. ``parts``: of training and validation, each with ``fitted``. On rank 0.
    """
    path, lines = folder / LIST_FILE, list[str]()
    before = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    for name, source in (pair for part in parts for pair in zip(part.names, part.fitted, strict=True)):
        own = [one.line(name) for one in source.unusable]
        if isinstance(source, StreamedFitted):
            source.left_out_file = path
            source.listed = {line for line in before if line.startswith(f'{{"sample": "{name}:')}
            own += sorted(source.listed)
        lines += own
    if lines or before:
        write_text_atomic(path, "".join(dict.fromkeys(lines)))


class _Source:
    """One source of a stream."""

    def __init__(self, name: str, fitted: Fitted, max_tiles: int | None) -> None:
        self.name, self.title, self.fitted, self.max_tiles = name, fitted.titled(name), fitted, max_tiles
        self.dataset, self.whole = fitted.dataset, whole_of(fitted.dataset)

    def reasons(self) -> Iterator[Reason]:
        yield from self._not_part()
        counts, (tokens, tiles) = self.dataset.counts(), self.dataset.lengths()
        overflow = self.fitted.overflow
        for action in ACTIONS:
            text = _WORDS[action].format(key=overflow.key, limit=overflow.seq_length)
            used = action in ("split", "truncate")
            yield self._reason(text, self.fitted.by_action[action], used=used, unit="tokens", values=tokens)
        text = "an image that cannot be read: padding in their position"
        yield self._reason(text, np.flatnonzero(counts.unreadable), used=False)
        if isinstance(self.whole, UnifiedGenerationDataset):
            codes = self.whole.index.unused
            for one in unused_of(codes):
                examples = tuple(self._example(i, "") for i in with_unused(codes, one)[:NUM_EXAMPLES].tolist())
                yield Reason(self.title, one.text, one.records, len(codes), True, examples)
        yield self._reason("an empty text", np.flatnonzero(counts.empty_texts))
        if self.max_tiles is not None:
            text = f"more than packing.max_tiles {self.max_tiles} condition images: a sequence without another image"
            yield self._reason(text, np.flatnonzero(tiles > self.max_tiles), unit="images", values=tiles)
        unknown = counts.unknown
        most = np.argsort(-unknown, kind="stable")[: int((unknown > 0).sum())]
        yield self._reason("words that the tokenizer does not have", most, unit="tokens", values=unknown)
        text = "a text that spells a special token, read as ordinary text"
        yield self._reason(text, np.flatnonzero(counts.touched_by("special_tokens")))

    def _not_part(self) -> Iterator[Reason]:
        """What is no longer in the data set that is packed."""
        for subset in reversed([*subsets(self.dataset)]):
            choice = subset.choice
            if isinstance(choice, Filtering):
                yield from self._removed(subset, choice)
                continue
            text = "after the first num_used_data"
            if isinstance(choice, Side):
                text = f"held out for validation (val_dataloader.split={choice.division.share:g})"
            yield Reason(self.title, text, len(subset.whole) - len(subset), len(subset.whole), False, ())

    def _removed(self, subset: Subset, filtering: Filtering) -> Iterator[Reason]:
        """By each filter, and by each rating."""
        records, unusable = len(filtering.removed), filtering.unusable
        for k, (rule, number) in enumerate(filtering.report["removed"].items(), start=1):
            if rule == SKIPPED:
                continue
            first = np.flatnonzero(filtering.removed == k)[:NUM_EXAMPLES].tolist()
            examples = tuple(self._example(record_number(subset.whole, i), "") for i in first)
            yield Reason(self.title, f"removed by {rule}", number, records, False, examples)
        if unusable:
            examples = tuple(Example(f"{self.name}:{one.number}", one.reason) for one in unusable[:NUM_EXAMPLES])
            text = "cannot be trained on (on_record_error='skip')"
            yield Reason(self.title, text, len(unusable), records, False, examples)
        for rule, number in filtering.report.get("questions_removed", {}).items():
            text = f"questions below the least {rule} rating (their records stay)"
            yield Reason(self.title, text, number, filtering.report["questions_rated"], False, (), "questions")

    def _reason(
        self, text: str, records: Array, *, used: bool = True, unit: str = "", values: Array | None = None
    ) -> Reason:
        """``values``: of each record of the source, for the examples."""
        examples = tuple(
            self._example(record_number(self.dataset, i), "" if values is None else f"{int(values[i]):,} {unit}")
            for i in records[:NUM_EXAMPLES].tolist()
        )
        return Reason(self.title, text, len(records), len(self.dataset), used, examples)

    def _example(self, number: int, value: str) -> Example:
        """``number``: of the record in its source."""
        text = ": ".join(part for part in (value, record_text(self.whole, number)) if part)
        return Example(f"{self.name}:{number}", text)


def record_text(dataset: PlannedDataset, number: int) -> str:
    """The beginning of the texts of a record, images as their names; '' for a class of a user's own."""
    if not isinstance(dataset, UnifiedGenerationDataset):
        return ""
    try:
        turns = dataset.turns(number)
        broken = [split.error for split in dataset.sample(number).splits if split.error]
    except DataError as error:
        return str(error)
    parts = [turn.value if turn.kind == "text" else f"[image {turn.value}]" for turn in turns]
    text = " | ".join([*broken, *parts])
    return text if len(text) <= _TEXT else text[: _TEXT - 1] + "…"
