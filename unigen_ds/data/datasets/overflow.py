"""Records longer than ``seq_length`` (``train_dataloader.overflow``): split, truncated, skipped or refused; counted.

In: the counts of a source (from its index) and the settings. Out: the units of the source that the global order draws
(a record, or one piece of it), their lengths, and what is not trained on. Without a setting a plain text is split into
pieces that together have every token and every target once, and any other record is left out, because truncation
separates an answer from its question or an image from its prompt. The index alone shows what is too long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from unigen_ds.core.errors import DataError
from unigen_ds.core.shards import first_names
from unigen_ds.data.cache.array_cache import SUFFIX, ArrayFile, fingerprint, load_or_fill
from unigen_ds.data.datasets.dataset import PlannedDataset
from unigen_ds.data.datasets.subset import filtering_of, record_number, sample_ids
from unigen_ds.data.order.order import Draw
from unigen_ds.data.records.unusable import BadRecord
from unigen_ds.data.samples.sample import COLUMNS, CONTENT, KINDS, Array, count, num_pieces, piece_bounds

_MOST_LOST = 0.5
Action = Literal["split", "truncate", "skip", "error"]
ACTIONS: tuple[Action, ...] = ("split", "truncate", "skip", "error")
_BY_KIND: dict[str | None, dict[str, Action]] = {
    **{action: dict.fromkeys(KINDS, action) for action in ACTIONS},
    None: {"text": "split", "conversation": "skip", "images": "skip"},
    "split": {"text": "split", "conversation": "split", "images": "skip"},  # an image stays with its text
}


@dataclass(frozen=True)
class Overflow:
    """``setting``: ``train_dataloader.overflow``; None: the default of each kind. ``key``: what sets ``seq_length``."""

    seq_length: int
    setting: str | None = None
    key: str = "seq_length"

    @property
    def actions(self) -> dict[str, Action]:
        """What happens to a long record of each kind."""
        return _BY_KIND[self.setting]


class FittedSource:
    """One source, fitted to sequences of ``overflow.seq_length`` tokens."""

    positions: int | None = None
    """Tokens of a document at most, by the model, as far as it has a limit (``check_positions``)."""

    def __init__(self, dataset: PlannedDataset, overflow: Overflow) -> None:
        self.dataset, self.overflow = dataset, overflow
        tokens, tiles = dataset.lengths()
        self.longer: Array = np.flatnonzero(tokens > overflow.seq_length)
        kinds, actions = dataset.counts().kind[self.longer], overflow.actions
        self.by_action: dict[Action, Array] = {
            action: self.longer[np.isin(kinds, [k for k, kind in enumerate(KINDS) if actions[kind] == action])]
            for action in ACTIONS
        }
        """Records that are too long, by what happens to them."""
        units = self._units() if self.longer.size else {"tokens": tokens, "tiles": tiles}
        self.tokens: Array = units["tokens"]
        """Tokens of each unit. Without a longer record it is the index's own array, which needs no memory."""
        self.tiles: Array = units["tiles"]
        self._records, self._pieces = units.get("records"), units.get("pieces")

    def _units(self) -> dict[str, Array]:
        """Return the record of each unit, its piece or -1, its tokens and its tiles."""
        limit, (tokens, tiles) = self.overflow.seq_length, self.dataset.lengths()
        split, skip = self.by_action["split"], self.by_action["skip"]
        number = np.ones(len(tokens), dtype=np.int64)
        number[split], number[skip] = num_pieces(tokens[split], limit), 0
        records = np.repeat(np.arange(len(tokens), dtype=np.int64), number)
        piece = np.arange(len(records), dtype=np.int64) - np.repeat(np.cumsum(number) - number, number)
        whole = number[records] == 1
        start, stop = piece_bounds(tokens[records], limit, piece)
        units = np.where(whole, np.minimum(tokens, limit)[records], stop - start)
        return {"records": records, "pieces": np.where(whole, -1, piece), "tokens": units, "tiles": tiles[records]}

    def __len__(self) -> int:
        return len(self.tokens)

    def lengths_of(self, units: Array) -> tuple[Array, Array]:
        """(tokens, tiles) of some units."""
        return self.tokens[units], self.tiles[units]

    def record(self, unit: Draw) -> Draw:
        """A draw of a unit as a draw of its record, by its number in sample ids (``subset.record_number``)."""
        index, piece = unit.index, -1
        if self._records is not None and self._pieces is not None:
            index, piece = int(self._records[unit.index]), int(self._pieces[unit.index])
        return Draw(unit.source, record_number(self.dataset, index), unit.pass_number, piece)

    @property
    def unusable(self) -> Sequence[BadRecord]:
        filtering = filtering_of(self.dataset)
        return () if filtering is None else filtering.unusable

    def title(self, name: str) -> str:
        """How messages call what the numbers of this source are of: a streamed one is measured in part."""
        return name

    @property
    def long_kinds(self) -> dict[str, Action]:
        """What happens to the kinds of records that have a long one: enters the fingerprint of the data."""
        present = {KINDS[kind] for kind in np.unique(self.dataset.counts().kind[self.longer]).tolist()}
        return {kind: action for kind, action in self.overflow.actions.items() if kind in present}

    @cached_property
    def kept_sums(self) -> dict[str, int]:
        """Sums of the columns ``CONTENT`` of what is trained on. Reads truncated records once (cached)."""
        counts, cut = self.dataset.counts(), self.by_action["truncate"]
        numbers = np.concatenate([self.by_action["skip"], self.by_action["error"], cut])

        def fill(new: ArrayFile) -> None:
            samples = (self.dataset.sample(index) for index in cut.tolist())
            rows = [count(sample.truncate(self.overflow.seq_length)) for sample in samples]
            new.store("rows", np.asarray(rows, dtype=np.int64))

        rows = np.empty((0, len(COLUMNS)), dtype=np.int64)
        if cut.size:
            limit, folder = self.overflow.seq_length, self.dataset.cache_folder
            key = fingerprint("cut", self.dataset.fingerprint, limit, self.overflow.actions, COLUMNS)
            rows = load_or_fill(folder and folder / f"cut-{key[:16]}{SUFFIX}", key, fill)["rows"]
        columns = {name: getattr(counts, name) for name in CONTENT}
        return {
            name: int(column.sum() - column[numbers].sum()) + int(rows[:, COLUMNS.index(name)].sum())
            for name, column in columns.items()
        }

    @property
    def lost_targets(self) -> dict[str, int]:
        """Targets of each loss term that are not trained on."""
        counts, names = self.dataset.counts(), {kind: f"{kind}_targets" for kind in ("text", "image", "other")}
        return {kind: int(getattr(counts, name).sum()) - self.kept_sums[name] for kind, name in names.items()}

    def report(self, name: str) -> dict[str, Any]:
        """Plain numbers. ``name``: of the source in sample ids."""
        counts, lost_targets, targets = self.dataset.counts(), self.lost_targets, dict[str, int]()
        for kind in ("text", "image", *["other"] * bool(counts.other_targets.any())):
            targets[f"{kind}_targets"] = int(getattr(counts, f"{kind}_targets").sum())
            targets[f"{kind}_targets_lost"] = lost_targets[kind]
        return {
            "records": len(self.dataset),
            "seq_length": self.overflow.seq_length,
            "key": self.overflow.key,
            "longer": len(self.longer),
            **{_OUTCOMES[action]: len(self.by_action[action]) for action in ACTIONS},
            "pieces": int(num_pieces(counts.tokens[self.by_action["split"]], self.overflow.seq_length).sum()),
            "skipped_records": sample_ids(name, self.dataset, self.by_action["skip"]),
            **targets,
            "share_lost": sum(lost_targets.values()) / max(int(counts.targets.sum()), 1),
        }


_OUTCOMES: dict[Action, str] = {"split": "split", "truncate": "truncated", "error": "refused", "skip": "skipped"}


def overflow_line(report: Mapping[str, Any]) -> str:
    """``FittedSource.report`` as a sentence."""
    records, limit = report["records"], f"{report['key']} {report['seq_length']:,}"
    if not report["longer"]:
        return f"all {records:,} records fit {limit}: 0.0% of the targets are lost"
    more = {"split": f" into {report['pieces']:,} samples", "skipped": f" ({first_names(report['skipped_records'])})"}
    parts = [f"{report[what]:,} {what}{more.get(what, '')}" for what in _OUTCOMES.values() if report[what]]
    targets = (
        f"{report[f'{kind}_targets_lost']:,} of {report[f'{kind}_targets']:,} {kind} targets"
        for kind in ("text", "image", "other")
        if f"{kind}_targets" in report
    )
    return (
        f"{report['longer']:,} of {records:,} records are longer than {limit}: {', '.join(parts)};"
        f" {report['share_lost']:.1%} of the targets are lost ({', '.join(targets)})"
    )


def check_refused(source: FittedSource, name: str, title: str) -> None:
    """Raise ``DataError`` where a record is too long and ``overflow`` is 'error'. ``name``: as in sample ids."""
    records, limit, key = source.by_action["error"], source.overflow.seq_length, source.overflow.key
    if records.size:
        raise DataError(
            f"{title}: {len(records):,} of {len(source.dataset):,} records are longer than {key} {limit:,}"
            f" ({first_names(sample_ids(name, source.dataset, records))}), and train_dataloader.overflow is 'error'",
            remedy=f"{key} of at least {int(source.dataset.lengths()[0].max()):,}, or another overflow:"
            " 'split', 'truncate' or 'skip'",
        )


def check_overflow(sources: Sequence[FittedSource], names: Sequence[str]) -> None:
    """Raise ``DataError`` where ``check_refused`` does, or where most image targets, or all targets, would be lost."""
    for name, source in zip(names, sources, strict=True):
        title, limit, key = source.title(name), source.overflow.seq_length, source.overflow.key
        check_refused(source, name, title)
        counts, tokens = source.dataset.counts(), source.dataset.lengths()[0]
        remedy = f"a train_dataloader.{key} of {int(tokens.min()):,} or more (the longest: {int(tokens.max()):,})"
        if not len(source):
            if KINDS.index("images") not in counts.kind:
                remedy += ", or train_dataloader.overflow='split'"
            raise DataError(
                f"{title}: all {len(source.dataset):,} records are longer than {key} {limit:,}", remedy=remedy
            )
        total, lost_targets = int(counts.image_targets.sum()), source.lost_targets["image"]
        if lost_targets > _MOST_LOST * total:
            raise DataError(
                f"{title}: {lost_targets:,} of {total:,} image targets do not fit {key} {limit:,}",
                allowed="at most half of a source's image targets lost",
                remedy=f"{remedy}, or a smaller max_size of processor.vae_transform",
            )
        targets = int(counts.targets.sum())
        if targets and sum(source.lost_targets.values()) == targets:
            problem = f"{title}: all {targets:,} targets are lost: what of its records fits {key} {limit:,} has none"
            raise DataError(problem, allowed="records that leave something to learn", remedy=remedy)


def check_positions(sources: Sequence[FittedSource], names: Sequence[str], *, limit: int | None) -> None:
    """Raise ``DataError`` where a document is longer than the ``limit`` of positions that a model has (None: any)."""
    for name, source in zip(names, sources, strict=True):
        source.positions, longest = limit, int(source.tokens.max(initial=0))
        if limit is not None and longest > limit:
            number = int((source.tokens > limit).sum())
            raise DataError(
                f"{source.title(name)}: {number:,} of {len(source.tokens):,} samples have more tokens (up to"
                f" {longest:,}) than the model has positions, model.llm.max_position_embeddings {limit:,}",
                remedy=f"train_dataloader.seq_length of at most {limit:,}: longer texts are split",
            )
