"""What a data set or a stream holds, in numbers; what of it a run does not use, or uses in another way than a reader
would expect; and which samples a range of sequences is made of.

For the log of a start, ``tools/inspect_data.py`` and its page. Nothing is decoded: every number is that of the run's
own objects (its index, its filters, its rule for long records).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from unigen_ds.data.batches.stream import PackedRow, SequenceStream
from unigen_ds.data.datasets.dataset import PlannedDataset, UnifiedGenerationDataset, planned_tokens
from unigen_ds.data.datasets.overflow import ACTIONS, FittedSource, overflow_line
from unigen_ds.data.datasets.streamed_units import StreamedSource, streamed_lines, streamed_report
from unigen_ds.data.datasets.subset import (
    Filtering,
    FirstRecords,
    Side,
    filtering_of,
    removal_line,
    sample_ids,
    subset_by,
    subsets,
    whole_of,
)
from unigen_ds.data.order.order import Cursor
from unigen_ds.data.records.unusable import LIST_FILE, SKIP_KEY, BadRecord, unusable_error, unused_records
from unigen_ds.data.samples.sample import Array, unit_tokens
from unigen_ds.system.files import write_text_atomic

_MOST_WINDOWS = 8
_EXAMPLES = 3
IMBALANCE = 10
"""Samples of one kind for each of the other above which a start warns."""
_ACTIONS = {"split": "split into pieces", "truncate": "truncated", "skip": "left out", "error": "refused"}


# --- what is left out, and what a reader would not expect ----------------------------------------------------------


@dataclass(frozen=True)
class Reason:
    source: str
    reason: str
    number: int
    total: int
    """Size of the source, of which ``number`` were counted."""
    ids: Sequence[str] = ()
    used: bool = True
    """Whether the run uses them, in whole or in part."""
    unit: str = "records"

    def __str__(self) -> str:
        share = 100 * self.number / max(self.total, 1)
        return f"{self.number:,} of {self.total:,} {self.unit} ({float(f'{share:.2g}'):g} %): {self.reason}"


def reasons(stream: SequenceStream) -> list[Reason]:
    """Return the reasons in the order in which a record meets them, without those that no record has."""
    every: list[Reason] = []
    for name, source in zip(stream.names, stream.fitted_sources, strict=True):
        every += _left_out(name, source)
        every += _notices(name, source, getattr(stream.packer, "max_tiles", None))
    return [reason for reason in every if reason.number]


def _left_out(name: str, source: FittedSource) -> Iterator[Reason]:
    """What is no longer in the data set that is packed, and long records."""
    title, dataset, overflow = source.title(name), source.dataset, source.overflow
    for subset in reversed([*subsets(dataset)]):
        choice, whole = subset.choice, subset.whole
        if not isinstance(choice, Filtering):
            text = "after the first num_used_data"
            if isinstance(choice, Side):
                text = f"held out for validation (val_dataloader.split={choice.division.share:g})"
            yield Reason(title, text, len(whole) - len(subset), len(whole), used=False)
            continue
        for k, (rule, number) in enumerate(choice.report["removed"].items(), start=1):
            text = f"cannot be trained on ({SKIP_KEY})" if rule == SKIP_KEY else f"removed by {rule}"
            ids = sample_ids(name, whole, np.flatnonzero(choice.filter_numbers == k)[:_EXAMPLES])
            yield Reason(title, text, number, len(choice.filter_numbers), ids, used=False)
        for rule, number in choice.report.get("questions_removed", {}).items():
            text = f"below the least {rule} rating (their records stay)"
            yield Reason(title, text, number, choice.report["questions_rated"], used=False, unit="questions")
    for action in ACTIONS:
        text = f"longer than {overflow.key} {overflow.seq_length:,}: {_ACTIONS[action]}"
        long, used = source.by_action[action], action in ("split", "truncate")
        yield Reason(title, text, len(long), len(dataset), sample_ids(name, dataset, long[:_EXAMPLES]), used)


def _notices(name: str, source: FittedSource, max_tiles: int | None) -> Iterator[Reason]:
    """What of the records that are packed is not learned as their author may think."""
    title, dataset, counts = source.title(name), source.dataset, source.dataset.counts()
    whole = whole_of(dataset)

    def reason(text: str, records: Array, of: PlannedDataset = dataset, *, used: bool = True) -> Reason:
        return Reason(title, text, len(records), len(of), sample_ids(name, of, records[:_EXAMPLES]), used)

    yield reason(
        "an image that cannot be read: padding in their position", np.flatnonzero(counts.unreadable), used=False
    )
    if isinstance(whole, UnifiedGenerationDataset):
        for text, records in unused_records(whole.index.unused_codes).items():
            yield reason(text, records, whole)
        texts = whole.index.unused_texts
        text = f"several texts to choose from: one is used, always the same; {int(texts.sum()):,} texts are not used"
        yield reason(text, np.flatnonzero(texts), whole)
    yield reason("an empty text (a caption, a question or an answer)", np.flatnonzero(counts.empty_texts))
    if max_tiles is not None:
        text = f"more than packing.max_tiles={max_tiles} condition images: each in a sequence without another image"
        yield reason(text, np.flatnonzero(counts.tiles > max_tiles))
    text, tokens = "words that the tokenizer does not have (<unk>)", int((counts.tokens - counts.image_tokens).sum())
    ids = sample_ids(name, dataset, np.flatnonzero(counts.unknown)[:_EXAMPLES])
    yield Reason(title, text, int(counts.unknown.sum()), tokens, ids, unit="text tokens")


def check_unusable(sources: Sequence[FittedSource], names: Sequence[str], limit: float) -> None:
    """Raise ``DataError`` where more than a share ``limit`` of all records is left out by ``on_record_error``."""
    unusable: list[BadRecord] = []
    records = 0
    for source in sources:
        if isinstance(source, StreamedSource):
            source.limit = limit
            source.count_unusable(source)
        else:
            unusable += source.unusable
            records += len(whole_of(source.dataset))
    if len(unusable) > limit * records:
        raise unusable_error(unusable, ", ".join(names), records, limit=limit)


def list_left_out(parts: Sequence[Any], folder: Path) -> None:
    """Write ``left_out.jsonl``, on rank 0: each record that ``on_record_error`` left out of ``parts``."""
    path, lines = folder / LIST_FILE, list[str]()
    before = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    for name, source in (pair for part in parts for pair in zip(part.names, part.fitted_sources, strict=True)):
        lines += [one.line(name) for one in source.unusable]
        if isinstance(source, StreamedSource):
            source.left_out_file = path
            source.old_lines = {line for line in before if line.startswith(f'{{"sample": "{name}:')}
            lines += sorted(source.old_lines)
    if lines or before:
        write_text_atomic(path, "".join(dict.fromkeys(lines)))


# --- the log of a start ---------------------------------------------------------------------------------------------


def source_lines(name: str, source: FittedSource, max_tiles: int | None = None) -> Iterator[tuple[bool, str]]:
    """What a start reports of a source: whether it is a warning, and a sentence."""
    report = source.report(name)
    if (first := subset_by(source.dataset, FirstRecords)) is not None:
        number = f"{len(first):,}"
        yield False, f"num_used_data={number}: the first {number} of {len(first.whole):,} records are used"
    if (filtering := filtering_of(source.dataset)) is not None:
        removal = filtering.report
        yield removal.get("questions_rated") == 0 or SKIP_KEY in removal["removed"], removal_line(removal)
    yield report["share_lost"] > 0 or report["skipped"] > 0, overflow_line(report)
    for reason in _notices(name, source, max_tiles):
        if reason.number:
            yield True, str(reason)


def start_lines(stream: SequenceStream) -> Iterator[tuple[bool, str]]:
    """What a start reports of its training data: whether it is a warning, and a sentence."""
    for name, source in zip(stream.names, stream.fitted_sources, strict=True):
        yield from streamed_lines(name, source)
        for warns, line in source_lines(name, source, getattr(stream.packer, "max_tiles", None)):
            yield warns, f"Data, {source.title(name)}: {line}."
    yield from _balance_lines(stream)
    rows = stream.phases[-1].rows_per_epoch
    if rows is not None and (rest := stream.order.epoch_size - rows) > 0:
        line = f"{rest:,} of the {stream.order.epoch_size:,} samples of an epoch fill no whole iteration"
        line += f" of {stream.sequences_per_iteration} sequences and are left out, others in each epoch"
        yield False, f"Data: {line} (train_dataloader.drop_last=False: none)."
    for name, group in group_report(stream).items():
        yield False, f"Data, {group_line(name, group)}."


def _balance_lines(stream: SequenceStream) -> Iterator[tuple[bool, str]]:
    """What an epoch draws of texts and images: one line for each source, one of all, and whether it is balanced."""
    names, balance = titles(stream), epoch_balance(stream)
    total = {key: sum(one[key] for one in balance.values()) for key in next(iter(balance.values()))}
    for name, one in {**balance, **({"all sources": total} if len(balance) > 1 else {})}.items():
        tokens, about = one["text_tokens"] + one["image_tokens"], "about " * (names.get(name, name) != name)
        yield (
            False,
            f"Data, {names.get(name, name)}: {about}{one['samples']:,.0f} samples drawn an epoch, {tokens:,.0f} tokens"
            f" ({one['image_tokens'] / max(tokens, 1):.0%} of images, {one['text_targets']:,.0f} text targets);"
            f" {one['text_samples']:,.0f} generate text, {one['image_samples']:,.0f} generate images.",
        )
    texts, images = total["text_samples"], total["image_samples"]
    if min(texts, images) > 0 and max(texts, images) > IMBALANCE * min(texts, images):
        more, fewer = ("texts", "images") if texts > images else ("images", "texts")
        yield (
            True,
            f"Data: {max(texts, images):,.0f} samples of an epoch generate {more}, {min(texts, images):,.0f} generate"
            f" {fewer}: more than {IMBALANCE} to 1. What is rare is learned slowly: set weights of the sources"
            " (weight=...), or loss_weights.",
        )


def titles(stream: SequenceStream) -> dict[str, str]:
    """Name of each source -> how messages call what its numbers are of: of a streamed source a part."""
    return {name: source.title(name) for name, source in zip(stream.names, stream.fitted_sources, strict=True)}


def group_report(stream: SequenceStream) -> dict[str, dict[str, Any]]:
    """Name of each group -> its samples in the first epoch, those by its weight alone, and both shares of all."""
    facts = stream.blend.facts or {"groups": {}, "sources": []}
    total, by_weight, report = sum(stream.draws_per_epoch), sum(stream.order.counts), {}
    for name, settings in facts["groups"].items():
        members = [k for k, (group, _) in enumerate(facts["sources"]) if group == name]
        draws = sum(stream.draws_per_epoch[k] for k in members)
        draws_by_weight = sum(stream.order.counts[k] for k in members)
        shares = {"share": draws / total, "share_by_weight": draws_by_weight / by_weight}
        report[name] = {**settings, "draws_per_epoch": draws, "draws_by_weight": draws_by_weight, **shares}
    return report


def group_line(name: str, group: Mapping[str, Any]) -> str:
    """A group of ``group_report`` as a sentence."""
    samples = f"{group['draws_per_epoch']:,} samples an epoch, {group['share']:.1%} of all"
    if not group["mandatory"]:
        return f"the group {name}: {samples}"
    more = group["draws_per_epoch"] - group["draws_by_weight"]
    reason = f"{more:,} more than by its weight, so that every sequence has one" if more > 0 else "its weight suffices"
    return f"the mandatory group {name}: {samples} (by its weight {group['share_by_weight']:.1%}): {reason}"


# --- the numbers of tools/inspect_data.py ---------------------------------------------------------------------------


def describe_data(stream: SequenceStream) -> dict[str, Any]:
    """Plain numbers of each source, of all together, and of the sequences they make."""
    tokens, rows = np.concatenate([d.lengths()[0] for d in stream.datasets]), first_rows(stream)
    return {
        "fingerprint": stream.fingerprint,
        "records": len(tokens),
        "sources": {name: _describe_source(stream, name, number) for number, name in enumerate(stream.names)},
        "lengths": _percentiles(tokens),
        "seq_length": stream.seq_length,
        "sequences_per_epoch": stream.sequences_per_epoch,
        **({"groups": group_report(stream)} if stream.blend.facts else {}),
        "packed": stream.packer is not None,
        "max_tiles": getattr(stream.packer, "max_tiles", None),
        "utilisation": sum(map(sum, tokens_of(stream, rows))) / (len(rows) * stream.seq_length),
        "samples_per_sequence": sum(map(len, rows)) / len(rows),
    }


def _describe_source(stream: SequenceStream, name: str, number: int) -> dict[str, Any]:
    source = stream.fitted_sources[number]
    dataset, sums = source.dataset, source.kept_sums
    counts, filtering, first = dataset.counts(), filtering_of(dataset), subset_by(dataset, FirstRecords)
    with_image, unknown = int((counts.images > 0).sum()), int(counts.unknown.sum())
    notices = [one for one in _notices(name, source, getattr(stream.packer, "max_tiles", None)) if one.number]
    return {
        "name": dataset.name,
        "records": len(dataset),
        "records_with_images": with_image,
        "records_text_only": len(dataset) - with_image,
        "unknown_tokens": unknown,
        "unknown_token_share": unknown / max(int((counts.tokens - counts.image_tokens).sum()), 1),
        "noticed": [
            {"reason": one.reason, "number": one.number, "of": one.total, "unit": one.unit, "text": str(one),
             "first": one.ids}
            for one in notices
        ],
        **sums,
        "text_tokens": sums["tokens"] - sums["image_tokens"],
        "image_token_share": sums["image_tokens"] / max(sums["tokens"], 1),
        "condition_images": sums["tiles"],
        "lengths": _percentiles(dataset.lengths()[0]),
        "overflow": source.report(name),
        "draws_per_epoch": stream.draws_per_epoch[number],
        "weight": dataset.weight,
        **({"streamed": streamed_report(source)} if isinstance(source, StreamedSource) else {}),
        **({"filters": dict(filtering.report)} if filtering is not None else {}),
        **({"num_used_data": {"used": len(first), "records": len(first.whole)}} if first is not None else {}),
    }  # fmt: skip


def _percentiles(lengths: np.ndarray) -> dict[str, float]:
    percentiles = {f"p{p}": float(np.percentile(lengths, p)) for p in (1, 5, 25, 50, 75, 95, 99)}
    return {"min": float(lengths.min()), **percentiles, "max": float(lengths.max()), "mean": float(lengths.mean())}


def first_rows(stream: SequenceStream) -> list[PackedRow]:
    """The sequences of the first windows of a whole epoch: those that packing is described by."""
    epoch = stream.phases[-1].first_epoch
    if stream.packer is None:
        units = min(stream.epoch_order(epoch).epoch_size, 65536)
        return [row for row, _ in islice(stream.skipping(()).rows(Cursor(epoch)), units)]
    return [r for w in range(min(stream.num_windows(epoch), _MOST_WINDOWS)) for r in stream.window_rows(epoch, w)]


def tokens_of(stream: SequenceStream, rows: Sequence[PackedRow]) -> list[list[int]]:
    """Planned tokens of each sample of some rows."""
    sources, limit = stream.sources, stream.sample_length
    return [[unit_tokens(planned_tokens(sources[d.source], d.index), d.piece, limit) for d in row] for row in rows]


def epoch_balance(stream: SequenceStream) -> dict[str, dict[str, float]]:
    """What an epoch has of each source: samples, its tokens and targets by kind as far as they are trained on, and the
    samples that have text targets, and image targets. Whole numbers where every record is used once; in a weighted
    mixture the mean of a record (of a streamed source, of its first shard) times its samples.
    """
    balance = {}
    for name, source, draws in zip(stream.names, stream.fitted_sources, stream.draws_per_epoch, strict=True):
        counts, skip = source.dataset.counts(), source.by_action["skip"]
        sums, passes = dict(source.kept_sums), draws / max(len(source.tokens), 1)  # a long text is several samples
        sums["text_tokens"] = sums["tokens"] - sums["image_tokens"]
        keys = ("text_tokens", "image_tokens", "text_targets", "image_targets", "other_targets")
        balance[name] = {"samples": draws, **{key: sums[key] * passes for key in keys}}
        for kind in ("text", "image"):
            has = getattr(counts, f"{kind}_targets") > 0
            share = (has.sum() - has[skip].sum()) / max(len(has) - len(skip), 1)
            balance[name][f"{kind}_samples"] = draws * float(share)
    return balance


def derive(stream: SequenceStream, start: int, stop: int) -> list[list[str]]:
    """The sample ids of each of the global sequences ``start .. stop``, in the stream's order."""
    rows = islice(stream.skipping(()).rows(stream.seek(start)), stop - start)
    return [[draw.sample_id(stream.names) for draw in row] for row, _ in rows]
