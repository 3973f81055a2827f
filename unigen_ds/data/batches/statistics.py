"""What a data set or a stream holds, in numbers, and which samples a range of sequences is made of.

For ``tools/inspect_data.py``: nothing is decoded, everything comes from the index.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from unigen_ds.data.batches.collate import unit_tokens
from unigen_ds.data.batches.stream import Cursor, Row, SequenceStream
from unigen_ds.data.datasets.dataset import PlannedDataset, UnifiedGenerationDataset, planned_tokens, unreadable
from unigen_ds.data.datasets.filtering import filtering_of, removal_line
from unigen_ds.data.datasets.streamed_units import StreamedFitted, streamed_lines, streamed_report
from unigen_ds.data.datasets.subset import FirstRecords, first_records_line, subset_by, whole_of
from unigen_ds.data.records.unusable import SKIPPED
from unigen_ds.data.records.unused import UnusedKey, unused_of
from unigen_ds.data.rules import RULE_VERSIONS

_PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
_WINDOWS = 8
IMBALANCE = 10
"""Samples of one kind for each of the other above which a start warns."""


def describe(stream: SequenceStream) -> dict[str, Any]:
    """Plain numbers of each source, of all together, and of the sequences they make."""
    tokens = np.concatenate([d.lengths()[0] for d in stream.datasets])
    return {
        "fingerprint": stream.fingerprint,
        "rules": dict(RULE_VERSIONS),
        "records": len(tokens),
        "sources": {name: _describe_source(stream, name, number) for number, name in enumerate(stream.names)},
        "lengths": _percentiles(tokens),
        "seq_length": stream.seq_length,
        "sequences_per_epoch": stream.sequences_per_epoch,
        **({"groups": group_report(stream)} if stream.blend.facts else {}),
        **_packing(stream),
    }


def _describe_source(stream: SequenceStream, name: str, number: int) -> dict[str, Any]:
    fitted = stream.fitted[number]
    dataset, sums = fitted.dataset, fitted.kept_sums
    counts, filtering, first = dataset.counts(), filtering_of(dataset), subset_by(dataset, FirstRecords)
    with_image, unknown = counts.images > 0, int(counts.unknown.sum())
    report = {
        "name": dataset.name,
        "records": len(dataset),
        "records_with_images": int(with_image.sum()),
        "records_text_only": int((~with_image).sum()),
        "records_unreadable": int((counts.unreadable > 0).sum()),
        "first_unreadable": next(iter(unreadable(dataset, most=1)), None) if counts.unreadable.any() else None,
        "records_with_empty_text": int((counts.empty_texts > 0).sum()),
        "unknown_tokens": unknown,
        "unknown_token_share": unknown / max(int((counts.tokens - counts.image_tokens).sum()), 1),
        "unused_keys": [one._asdict() for one in _unused_in(dataset)],
        "records_special_tokens": int(counts.touched_by("special_tokens").sum()),
        "tokens": sums["tokens"],
        "text_tokens": sums["tokens"] - sums["image_tokens"],
        "image_tokens": sums["image_tokens"],
        "image_token_share": sums["image_tokens"] / max(sums["tokens"], 1),
        "text_targets": sums["text_targets"],
        "image_targets": sums["image_targets"],
        "other_targets": sums["other_targets"],
        "condition_images": sums["tiles"],
        "lengths": _percentiles(dataset.lengths()[0]),
        "overflow": fitted.report(name),
        "draws_per_epoch": stream.draws_per_epoch[number],
        "weight": dataset.weight,
        "records_over_max_tiles": _over_max_tiles(stream, dataset),
    }
    if isinstance(fitted, StreamedFitted):
        report["streamed"] = streamed_report(fitted)
    if filtering is not None:
        report["filters"] = dict(filtering.report)
    if first is not None:
        report["num_used_data"] = {"used": len(first), "records": len(first.whole)}
    return report


def start_lines(stream: SequenceStream) -> Iterator[tuple[bool, str]]:
    """What a start reports of each source: whether it is a warning, and a sentence."""
    for name, fitted in zip(stream.names, stream.fitted, strict=True):
        report, records = fitted.report(name), len(fitted.dataset)
        lost, line = report["share_lost"] > 0 or report["skipped"] > 0, fitted.line(name)
        yield from streamed_lines(name, fitted)
        name = fitted.titled(name)
        if (first := subset_by(fitted.dataset, FirstRecords)) is not None:
            yield False, f"Data, {name}: {first_records_line(first)}."
        if (filtering := filtering_of(fitted.dataset)) is not None:
            removal = filtering.report
            warns = removal.get("questions_rated") == 0 or SKIPPED in removal["removed"]
            yield warns, f"Data, {name}: {removal_line(removal)}."
        yield lost, f"Data, {name}: {line}."
        spelled = int(fitted.dataset.counts().touched_by("special_tokens").sum())
        if spelled:
            yield False, f"Data, {name}: {special_line(spelled, records=records)}."
        if number := _over_max_tiles(stream, fitted.dataset):
            limit = getattr(stream.packer, "max_tiles", None)
            yield True, f"Data, {name}: {over_tiles_line(number, records=records, limit=limit)}."
    yield from balance_lines(stream)
    if left := stream.num_left_out:
        yield (
            False,
            f"Data: {left:,} of the {stream.order.epoch_size:,} samples of an epoch fill no whole iteration of"
            f" {stream.sequences_per_iteration} sequences and are left out, others in each epoch"
            " (train_dataloader.drop_last=False: none).",
        )
    for name, group in group_report(stream).items():
        yield False, f"Data, {group_line(name, group)}."
    mixture = stream.order.mixture
    if mixture is not None and mixture.is_long:
        yield (
            False,
            f"Data: the weights repeat after {mixture.period:.3g} draws. A position that no checkpoint has is found by"
            " following the order from its start, about 2 seconds for a million draws.",
        )


def titles(stream: SequenceStream) -> dict[str, str]:
    """Of each source what the numbers of its records are of: its name, and of a streamed one the part."""
    return {name: fitted.titled(name) for name, fitted in zip(stream.names, stream.fitted, strict=True)}


def group_report(stream: SequenceStream) -> dict[str, dict[str, Any]]:
    """Of each group: its samples in the first epoch, what its weight alone means, and its shares of all samples."""
    facts = stream.blend.facts or {"groups": {}, "sources": []}
    total, by_weight, report = sum(stream.draws_per_epoch), sum(stream.order.counts), {}
    for name, settings in facts["groups"].items():
        members = [k for k, (group, _) in enumerate(facts["sources"]) if group == name]
        drawn = sum(stream.draws_per_epoch[k] for k in members)
        requested = sum(stream.order.counts[k] for k in members)
        shares = {"share": drawn / total, "share_by_weight": requested / by_weight}
        report[name] = {**settings, "draws_per_epoch": drawn, "draws_by_weight": requested, **shares}
    return report


def group_line(name: str, group: Mapping[str, Any]) -> str:
    """A group of ``group_report`` as a sentence."""
    if group["mandatory"]:
        return f"the mandatory group {name}: {mandatory_line(group)}"
    return f"the group {name}: {_samples(group)}"


def mandatory_line(group: Mapping[str, Any]) -> str:
    """A mandatory group of ``group_report`` as a sentence."""
    more = group["draws_per_epoch"] - group["draws_by_weight"]
    suffices = (
        f"{more:,} more than by its weight, so that every sequence has one" if more > 0 else "its weight suffices"
    )
    return f"{_samples(group)} (by its weight {group['share_by_weight']:.1%}): {suffices}"


def _samples(group: Mapping[str, Any]) -> str:
    return f"{group['draws_per_epoch']:,} samples an epoch, {group['share']:.1%} of all"


def _over_max_tiles(stream: SequenceStream, dataset: PlannedDataset) -> int:
    """Records with more condition images than a sequence may have by the packing."""
    limit = getattr(stream.packer, "max_tiles", None)
    return 0 if limit is None else int((dataset.lengths()[1] > limit).sum())


def over_tiles_line(number: int, *, records: int, limit: int | None) -> str:
    """How many records have more condition images than a sequence may have."""
    return (
        f"{number:,} of {records:,} records have more than packing.max_tiles={limit} condition images; each is in a"
        " sequence without another image. ImageCountFilter(max_tiles=...) leaves them out"
    )


def balance_lines(stream: SequenceStream) -> Iterator[tuple[bool, str]]:
    """What an epoch draws of texts and images: one line for each source, one of all, and whether it is balanced.

    A record counts as text generation where it has text targets, and as image generation where it has image targets.
    Of a streamed source the records are those of the part that is measured, and an epoch is estimated from them.
    """
    totals, estimated = np.zeros(6), [name for name, title in titles(stream).items() if name != title]
    for name, fitted, drawn in zip(stream.names, stream.fitted, stream.draws_per_epoch, strict=True):
        counts, skip, sums = fitted.dataset.counts(), fitted.by_action["skip"], fitted.kept_sums
        generating = [(column > 0).sum() - (column[skip] > 0).sum()
                      for column in (counts.text_targets, counts.image_targets)]  # fmt: skip
        records = len(counts.tokens) - len(skip)
        row = np.array([records, sums["tokens"], sums["image_tokens"], sums["text_targets"], *generating], float)
        samples, passes = drawn / max(records, 1), drawn / max(len(fitted.tokens), 1)  # a long text is several
        totals += row * [samples, passes, passes, passes, samples, samples]
        about = "about " * (name in estimated) + f"{drawn:,}" + " of all shards" * (name in estimated)
        yield False, f"Data, {fitted.titled(name)}: {_balance(row)}; {about} drawn an epoch."
    if len(stream.names) > 1:
        how = f" (estimated, since {', '.join(estimated)} is measured in part)" if estimated else ""
        yield False, f"Data, an epoch of all sources{how}: {_balance(totals)}."
    texts, images = totals[4], totals[5]
    if min(texts, images) > 0 and max(texts, images) > IMBALANCE * min(texts, images):
        more, fewer = ("texts", "images") if texts > images else ("images", "texts")
        yield (
            True,
            f"Data: {'about ' * bool(estimated)}{max(texts, images):,.0f} samples of an epoch generate {more},"
            f" {min(texts, images):,.0f} generate {fewer}: more than {IMBALANCE} to 1. What is rare is learned"
            " slowly: set weights of the sources (weight=...), or loss_weights.",
        )


def _balance(counts: np.ndarray) -> str:
    records, tokens, image_tokens, text_targets, texts, images = map(float, counts)
    return (
        f"{records:,.0f} records, {tokens:,.0f} tokens ({image_tokens / max(tokens, 1):.0%} of images,"
        f" {text_targets:,.0f} text targets); {texts:,.0f} generate text, {images:,.0f} generate images"
    )


def _unused_in(dataset: PlannedDataset) -> list[UnusedKey]:
    """What the records of a source have and do not use; of one with filters or ``num_used_data`` those of all of it."""
    whole = whole_of(dataset)
    return unused_of(whole.index.unused) if isinstance(whole, UnifiedGenerationDataset) else []


def special_line(spelled: int, *, records: int) -> str:
    """How many records spell a special token."""
    return f"{spelled:,} of {records:,} records spell a special token, which is read as ordinary text"


def _percentiles(lengths: np.ndarray) -> dict[str, float]:
    values = np.percentile(lengths, _PERCENTILES)
    percentiles = {f"p{p}": float(v) for p, v in zip(_PERCENTILES, values, strict=True)}
    return {"min": float(lengths.min()), **percentiles, "max": float(lengths.max()), "mean": float(lengths.mean())}


def first_rows(stream: SequenceStream) -> list[Row]:
    """The sequences of the first windows of a whole epoch: those that packing is described by."""
    epoch = stream.phases[-1].first_epoch
    if stream.packer is None:
        units = min(stream.epoch_order(epoch).epoch_size, 65536)
        return [row for row, _ in islice(stream.rows(Cursor(epoch)), units)]
    return [r for w in range(min(stream.num_windows(epoch), _WINDOWS)) for r in stream.window_rows(epoch, w)]


def tokens_of(stream: SequenceStream, rows: Sequence[Row]) -> list[list[int]]:
    """Planned tokens of each sample of some rows."""
    sources, limit = stream.sources, stream.sample_length
    return [[unit_tokens(planned_tokens(sources[d.source], d.index), d.piece, limit) for d in row] for row in rows]


def _packing(stream: SequenceStream) -> dict[str, Any]:
    """Share of ``seq_length`` that is filled, and samples a sequence, over ``first_rows``."""
    rows = first_rows(stream)
    tokens = sum(map(sum, tokens_of(stream, rows)))
    return {
        "packed": stream.packer is not None,
        "max_tiles": getattr(stream.packer, "max_tiles", None),
        "utilisation": tokens / (len(rows) * stream.seq_length),
        "samples_per_sequence": sum(map(len, rows)) / len(rows),
    }


def epoch_balance(stream: SequenceStream) -> dict[str, dict[str, float]]:
    """What an epoch has of each source: samples, and by kind its tokens and targets, as far as they are trained on.

    Whole numbers where every record is used once; in a weighted mixture the mean of a record times its samples, which
    of a streamed source is the mean of the part that is measured.
    """
    balance = {}
    for name, fitted, drawn in zip(stream.names, stream.fitted, stream.draws_per_epoch, strict=True):
        sums, passes = dict(fitted.kept_sums), drawn / max(len(fitted.tokens), 1)
        sums["text_tokens"] = sums["tokens"] - sums["image_tokens"]
        keys = ("text_tokens", "image_tokens", "text_targets", "image_targets", "other_targets")
        balance[name] = {"samples": drawn, **{key: sums[key] * passes for key in keys}}
    return balance


def derive(
    stream: SequenceStream, start_sequence: int, stop_sequence: int, *, near: Cursor | None = None
) -> list[list[str]]:
    """The sample ids of each of the global sequences ``start_sequence .. stop_sequence``, in the stream's order.

    ``near``: a cursor at or before the start (of a checkpoint, for example); otherwise the position is found from
    the number of sequences of each window, which plans the windows between epoch 0 and it.
    """
    if near is not None and near.sequences <= start_sequence:
        cursor, passed = near, start_sequence - near.sequences
    else:
        cursor, passed = stream.seek(start_sequence), 0
    rows = islice(stream.rows(cursor), passed, passed + stop_sequence - start_sequence)
    return [[draw.sample_id(stream.names) for draw in row] for row, _ in rows]
