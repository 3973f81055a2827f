"""The page about the training data of a config: its sources, lengths, balance, packing, what is left out, and the first
sequences as the model has them (``tools/inspect_data.py --html``).

In: the stream of a run and micro-batches of its loader. Numbers come from ``data/statistics.py``, which a start's log
and the tool's text use, and from ``data/left_out.py``, sequences from the batches themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unigen_ds.data.left_out import Reason, reasons
from unigen_ds.data.loader import MicroBatch
from unigen_ds.data.statistics import describe, epoch_balance, first_rows, mandatory_line, titles, tokens_of
from unigen_ds.data.stream import SequenceStream
from unigen_ds.evaluation.report.charts import bar
from unigen_ds.evaluation.report.document import document, write_document
from unigen_ds.evaluation.report.histogram import histogram
from unigen_ds.evaluation.report.markup import Html, details, grouped, number_text, percent, plural, table, tag
from unigen_ds.evaluation.report.sections import missing
from unigen_ds.evaluation.report.sequences import sequences_part

KINDS = ("text", "image", "other")
_PARTS = (
    ("sources", "Sources"),
    ("lengths", "Lengths"),
    ("balance", "Text and images"),
    ("packing", "Packing"),
    ("left-out", "Left out"),
    ("unknown", "Unknown tokens"),
    ("sequences", "First sequences"),
)


@dataclass(frozen=True)
class DataPage:
    """What the page is about."""

    title: str
    """The config's name."""
    stream: SequenceStream
    processor: Any
    batches: Sequence[MicroBatch]
    """Of one sequence each, as the run's loader makes them, in order; the cursor of each is the position after it."""
    skipped_sources: int = 0
    """Data sets of the config that could not be opened (``on_error='skip'``)."""


def write_data_page(page: DataPage, out: Path) -> Path:
    """Raises ``ConfigError`` where ``out`` cannot be written."""
    return write_document(out, render_data(page))


def render_data(page: DataPage) -> str:
    """The page as text."""
    stream, report = page.stream, describe(page.stream)
    balance, left = epoch_balance(stream), reasons(stream)
    found = {
        "sources": _sources(report, balance),
        "lengths": _lengths(stream, report),
        "balance": _balance(balance, titles(stream)),
        "packing": _packing(stream, report),
        "left-out": _left_out(left, page.skipped_sources),
        "unknown": _unknown(report, page.processor, titles(stream)),
        "sequences": sequences_part(stream, page.batches, page.processor),
    }
    header = tag(
        "header",
        tag("h1", f"Training data of {page.title}"),
        tag("p", f"{plural(len(stream.names), 'source')}, fingerprint ", tag("code", stream.fingerprint[:16]),
            class_="soft"),
        tag("div", *(tag("span", text, class_="chip") for text in _chips(stream, report)), class_="chips"),
        _tiles(report, balance, left),
        tag("nav", *(tag("a", title, href=f"#{name}") for name, title in _PARTS), aria_label="Parts"),
    )  # fmt: skip
    sections = [tag("section", tag("h2", title), *found[name], id=name) for name, title in _PARTS]
    source = f"the training data of {page.title}"
    return document(f"{page.title} – training data", header, sections, source, styles=("data.css",))


def _chips(stream: SequenceStream, report: Mapping[str, Any]) -> list[str]:
    packing = (
        "not packed" if stream.packer is None else f"{type(stream.packer).__name__}, window {stream.packer.window:,}"
    )
    chips = [f"seq_length {stream.seq_length:,}", packing, f"seed {stream.order.seed}"]
    if stream.sample_length != stream.seq_length:
        chips.append(f"max_sample_tokens {stream.sample_length:,}")
    if stream.order.weights is not None:
        chips.append("weighted mixture")
    return chips


def _tiles(report: Mapping[str, Any], balance: Mapping[str, Mapping[str, float]], left: Sequence[Reason]) -> Html:
    """The numbers that a reader looks for first."""
    total = {key: sum(one[key] for one in balance.values()) for key in next(iter(balance.values()))}
    tokens = total["text_tokens"] + total["image_tokens"]
    unused = sum(one.number for one in left if not one.used and one.unit == "records")
    drawn = sum(map(_drawn, report["sources"].values()))
    part = any(map(_in_part, report["sources"].values()))
    found = [
        ("Records" + " measured" * part, grouped(report["records"]),
         f"{'about ' * part}{grouped(drawn)} drawn an epoch"),
        ("Sequences", grouped(report["sequences_per_epoch"]), f"{report['samples_per_sequence']:.2f} samples in each"),
        ("Utilisation", percent(report["utilisation"]), "of seq_length"),
        ("Tokens", _short(tokens), f"an epoch, {percent(total['image_tokens'] / max(tokens, 1))} of images"),
        ("Text targets", _short(total["text_targets"]), "an epoch"),
        ("Image targets", _short(total["image_targets"]), "an epoch"),
        ("Left out", grouped(unused), "records"),
    ]  # fmt: skip
    if total["other_targets"]:
        found.insert(6, ("Other targets", _short(total["other_targets"]), "an epoch"))
    return tag("div", *(
        tag("div", tag("span", name, class_="k"), tag("b", value), tag("span", note), class_="tile")
        for name, value, note in found
    ), class_="tiles")  # fmt: skip


def _drawn(source: Mapping[str, Any]) -> int:
    return int(source["draws_per_epoch"])


def _in_part(source: Mapping[str, Any]) -> bool:
    """Whether only some shards of a streamed source are measured."""
    return "streamed" in source and not source["streamed"]["exact"]


def _sources(report: Mapping[str, Any], balance: Mapping[str, Mapping[str, float]]) -> list[Any]:
    total = sum(map(_drawn, report["sources"].values()))
    rows = []
    for name, source in report["sources"].items():
        lengths, records = source["lengths"], source["records"]
        rows.append((
            tag("b", name), grouped(records), percent(source["records_with_images"] / max(records, 1)),
            grouped(_drawn(source)), percent(_drawn(source) / max(total, 1)),
            "–" if source["weight"] is None else f"{source['weight']:g}",
            number_text(lengths["p50"]), number_text(lengths["p95"]), number_text(lengths["max"]),
        ))  # fmt: skip
    heads = (
        "Source",
        "Records",
        "With images",
        "Drawn an epoch",
        "Share",
        "Weight",
        "Tokens, median",
        "95 %",
        "Longest",
    )
    parts: list[Any] = [table(heads, rows, numbers=range(1, len(heads)))]
    for name, streamed in ((name, one["streamed"]) for name, one in report["sources"].items() if _in_part(one)):
        measured = streamed["measured"]
        text = (
            f"{name} is streamed: what this page shows of its records (lengths, balance, left out, unknown tokens) is"
            f" of the {grouped(measured['records'])} of shard {', '.join(measured['shards'])},"
            f" {len(measured['shards'])} of {grouped(streamed['shards'])} shards. What an epoch has of it is estimated"
            " from them; packing and sequences are those of the run."
        )
        parts.append(tag("div", text, class_="missing"))
    if groups := report.get("groups"):
        shown = [
            (tag("b", name), "yes" if group["mandatory"] else "no", grouped(group["draws_per_epoch"]),
             percent(group["share"]), percent(group["share_by_weight"]))
            for name, group in groups.items()
        ]  # fmt: skip
        of_groups = ("Group", "Mandatory", "Drawn an epoch", "Share", "Share by its weight")
        parts += [tag("h3", "Groups"), table(of_groups, shown, numbers=range(2, 5))]
        parts += [missing(f"{name}: {mandatory_line(one)}.") for name, one in groups.items() if one["mandatory"]]
    return parts


def _lengths(stream: SequenceStream, report: Mapping[str, Any]) -> list[Any]:
    named = zip(titles(stream).values(), stream.datasets, strict=True)
    groups = {title: dataset.lengths()[0] for title, dataset in named}
    longer = sum(source["overflow"]["longer"] for source in report["sources"].values())
    limit, name = (
        stream.sample_length,
        "seq_length" if stream.sample_length == stream.seq_length else "max_sample_tokens",
    )
    note = "All records fit." if not longer else f"{plural(longer, 'record is', 'records are')} longer than the limit."
    numbers = " · ".join(f"{key} {number_text(value)}" for key, value in report["lengths"].items())
    return [
        tag(
            "p", "Tokens of each record, whole, before anything is split, truncated or left out. ", note, class_="note"
        ),
        histogram("Tokens of a record", groups, unit="tokens", count="records", limit=(name, limit)),
        tag("p", numbers, class_="note numbers"),
    ]


def _balance(balance: Mapping[str, Mapping[str, float]], titles: Mapping[str, str]) -> list[Any]:
    rows, cells = [], []
    balance = {titles[name]: one for name, one in balance.items()}
    shown = dict(balance)
    if len(balance) > 1:
        shown = {
            "all sources": {key: sum(one[key] for one in balance.values()) for key in next(iter(balance.values()))},
            **balance,
        }
    for name, one in shown.items():
        tokens, targets = _kinds(one, "tokens"), _kinds(one, "targets")
        rows.append(tag(
            "div",
            tag("div", tag("b", name), tag("span", f"{_whole(one['samples'])} samples an epoch"), class_="who"),
            _stacked(name, "tokens", tokens), _stacked(name, "loss targets", targets),
            class_="balance",
        ))  # fmt: skip
        cells.append((tag("b", name), *(_whole(one[key]) for key in
                      ("text_tokens", "image_tokens", "text_targets", "image_targets", "other_targets"))))  # fmt: skip
    heads = ("Source", "Text tokens", "Image tokens", "Text targets", "Image targets", "Other targets")
    note = (
        "Of one epoch, as far as it is trained on. Text is learned token by token, an image by its latent patches; what"
        " is only read has no target."
    ) + " Estimated, where a source is streamed, from the shard that is named." * any(a != b for a, b in titles.items())
    keys = [
        tag("li", tag("b", name), class_=f"k-{name}")
        for name in KINDS[: 2 + any(o["other_targets"] for o in shown.values())]
    ]
    return [
        tag("p", note, class_="note"), tag("ul", *keys, class_="keys kinds"), *rows,
        details("The numbers", table(heads, cells, numbers=range(1, 6))),
    ]  # fmt: skip


def _kinds(one: Mapping[str, float], what: str) -> dict[str, float]:
    return {kind: one.get(f"{kind}_{what}", 0.0) for kind in KINDS}


def _stacked(name: str, what: str, parts: Mapping[str, float]) -> Html:
    total = sum(parts.values())
    texts = [f"{kind} {percent(value / total)}" for kind, value in parts.items() if value] if total else ["none"]
    shares = [(f"k-{kind}", f"{kind}: {_whole(value)}", value / total) for kind, value in parts.items() if value]
    return tag("div", tag("span", f"{what}: ", ", ".join(texts), class_="soft"),
               bar(shares, spoken=f"{name}, {what}: {', '.join(texts)}"))  # fmt: skip


def _packing(stream: SequenceStream, report: Mapping[str, Any]) -> list[Any]:
    rows = first_rows(stream)
    filled = np.asarray([sum(row) for row in tokens_of(stream, rows)])
    samples = np.asarray([len(row) for row in rows])
    how = (
        f"Packed within windows of {stream.packer.window:,} samples"
        if stream.packer is not None
        else "Not packed: a sample is a sequence"
    )
    text = (
        f"{how}. {plural(len(rows), 'sequence')} of the first windows: {percent(report['utilisation'])} of their"
        f" {grouped(stream.seq_length)} tokens are used, {report['samples_per_sequence']:.2f} samples in each."
    )
    figures = [
        histogram("Tokens of a sequence", {"": filled}, unit="tokens", count="sequences",
                  limit=("seq_length", stream.seq_length)),
        histogram("Samples of a sequence", {"": samples}, unit="samples", count="sequences"),
    ]  # fmt: skip
    return [tag("p", text, class_="note"), tag("div", *(tag("div", one) for one in figures), class_="grid2")]


def _left_out(left: Sequence[Reason], skipped_sources: int) -> list[Any]:
    parts: list[Any] = []
    if skipped_sources:
        number = plural(skipped_sources, "data set")
        text = f"{number} of the config cannot be opened: left out of the data (on_error='skip')."
        parts.append(tag("div", text, class_="missing"))
    for used, title, none in (
        (False, "Not trained on", "Every record is trained on."),
        (True, "Trained on, and worth a look", "There is nothing else to report of the records."),
    ):
        chosen = [one for one in left if one.used == used]
        parts.append(tag("h3", title))
        if not chosen:
            parts.append(missing(none))
            continue
        rows = [
            (
                tag("b", one.source),
                one.reason,
                grouped(one.number),
                percent(one.number / max(one.records, 1)),
                _examples(one),
            )
            for one in chosen
        ]
        parts.append(table(("Source", "Reason", "Number", "Share", "The first ones"), rows, numbers=(2, 3)))
    return parts


def _examples(one: Reason) -> Html | str:
    if not one.examples:
        return "–"
    return tag("ul", *(tag("li", tag("code", e.id), f" {e.text}") for e in one.examples), class_="examples")


def _unknown(report: Mapping[str, Any], processor: Any, titles: Mapping[str, str]) -> list[Any]:
    if getattr(getattr(processor, "tokenizer", None), "unk_id", None) is None:
        return [missing("The tokenizer has no unknown token: every text has ids of its own.")]
    rows = [
        (tag("b", titles[name]), grouped(one["unknown_tokens"]), _share(one["unknown_token_share"]))
        for name, one in report["sources"].items()
    ]
    note = "Text tokens of words that the tokenizer does not have; all of them look the same to the model."
    return [
        tag("p", note, class_="note"),
        table(("Source", "Unknown tokens", "Share of its text tokens"), rows, numbers=(1, 2)),
    ]


def _share(value: float) -> str:
    return percent(value) if not value or value >= 0.001 else f"{100 * value:.2g} %"


def _whole(value: float) -> str:
    return grouped(round(value))


def _short(value: float) -> str:
    """``12.3 M``."""
    for size, ending in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if ending == 'k' else size):.4g} {ending}"
    return _whole(value)
