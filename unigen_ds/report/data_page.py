"""The page about the training data of a config: its sources, lengths, balance, packing, what is left out, and the first
sequences as the model has them (``tools/inspect_data.py --html``).

In: the stream of a run and micro-batches of its loader. Numbers come from ``data/batches/statistics.py``, which a
start's log and the tool's text use, sequences from the batches themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unigen_ds.data.batches.loader import MicroBatch
from unigen_ds.data.batches.statistics import (
    Reason,
    describe,
    epoch_balance,
    first_rows,
    group_line,
    reasons,
    titles,
    tokens_of,
)
from unigen_ds.data.batches.stream import SequenceStream
from unigen_ds.report.charts import histogram
from unigen_ds.report.document import write_document
from unigen_ds.report.sequences import sequences_of
from unigen_ds.report.value_formats import grouped, number_text, percent

KINDS = ("text", "image", "other")
_BALANCE = ("text_tokens", "image_tokens", "text_targets", "image_targets", "other_targets")
Report = Mapping[str, Any]
Balance = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class DataPage:
    """What the page is about."""

    title: str
    """The config's name."""
    stream: SequenceStream
    processor: Any
    batches: Sequence[MicroBatch]
    """Batches of one sequence each, as the run's loader makes them; a cursor is the position after its batch."""
    skipped_sources: int = 0
    """Data sets of the config that could not be opened (``on_error='skip'``)."""


def write_data_page(page: DataPage, out: Path) -> Path:
    """Raises ``ConfigError`` where ``out`` cannot be written."""
    stream, report = page.stream, describe(page.stream)
    balance, left, names = epoch_balance(stream), reasons(stream), titles(page.stream)
    return write_document(
        out,
        "data.html.j2",
        title=page.title,
        source=f"the training data of {page.title}",
        stream=stream,
        report=report,
        chips=_chips(stream),
        totals=_totals(report, balance, left),
        sources=_sources(report),
        measured=[(name, one["streamed"]) for name, one in report["sources"].items() if _in_part(one)],
        groups=_groups(report),
        lengths=_lengths(stream, report),
        balance=_balance(balance, names),
        estimated=any(name != title for name, title in names.items()),
        packing=_packing(stream),
        left_out=_left_out(left),
        skipped_sources=page.skipped_sources,
        unknown=_unknown(report, page.processor, names),
        **sequences_of(stream, page.batches, page.processor),
    )


def _chips(stream: SequenceStream) -> list[str]:
    packer = stream.packer
    chips = [
        f"seq_length {stream.seq_length:,}",
        "not packed" if packer is None else f"{type(packer).__name__}, window {packer.window:,}",
        f"seed {stream.order.seed}",
    ]
    if stream.sample_length != stream.seq_length:
        chips.append(f"max_sample_tokens {stream.sample_length:,}")
    return chips + ["weighted mixture"] * (stream.order.weights is not None)


def _totals(report: Report, balance: Balance, left: Sequence[Reason]) -> dict[str, Any]:
    """The numbers that a reader looks for first."""
    total = _sum(balance)
    tokens = total["text_tokens"] + total["image_tokens"]
    kinds = _kinds(total)
    return {
        "tokens": _short(tokens),
        "images": total["image_tokens"] / max(tokens, 1),
        "targets": {kind: _short(total[f"{kind}_targets"]) for kind in kinds},
        "left_out": sum(one.number for one in left if not one.used and one.unit == "records"),
        "drawn": sum(int(one["draws_per_epoch"]) for one in report["sources"].values()),
    }


def _kinds(total: Mapping[str, float]) -> Sequence[str]:
    return KINDS if total["other_targets"] else KINDS[:2]


def _sum(balance: Balance) -> dict[str, float]:
    return {key: sum(one[key] for one in balance.values()) for key in next(iter(balance.values()))}


def _in_part(source: Mapping[str, Any]) -> bool:
    """Whether only some shards of a streamed source are measured."""
    return "streamed" in source and not source["streamed"]["exact"]


def _sources(report: Report) -> list[tuple[Any, ...]]:
    total = sum(int(one["draws_per_epoch"]) for one in report["sources"].values())
    rows = []
    for name, one in report["sources"].items():
        records, draws, lengths = one["records"], int(one["draws_per_epoch"]), one["lengths"]
        weight = "–" if one["weight"] is None else f"{one['weight']:g}"
        rows.append((
            name, records, one["records_with_images"] / max(records, 1), draws, draws / max(total, 1), weight,
            lengths["p50"], lengths["p95"], lengths["max"],
        ))  # fmt: skip
    return rows


def _groups(report: Report) -> dict[str, Any]:
    groups = report.get("groups") or {}
    return {
        "rows": [
            (name, one["mandatory"], one["draws_per_epoch"], one["share"], one["share_by_weight"])
            for name, one in groups.items()
        ],
        "mandatory": [f"{group_line(name, one)}." for name, one in groups.items() if one["mandatory"]],
    }


def _lengths(stream: SequenceStream, report: Report) -> dict[str, Any]:
    sources = zip(titles(stream).values(), stream.datasets, strict=True)
    groups = {title: dataset.lengths()[0] for title, dataset in sources}
    name = "seq_length" if stream.sample_length == stream.seq_length else "max_sample_tokens"
    limit = (name, stream.sample_length)
    return {
        "longer": sum(one["overflow"]["longer"] for one in report["sources"].values()),
        "figure": histogram("Tokens of a record", groups, unit="tokens", count="records", limit=limit),
        "numbers": " · ".join(f"{key} {number_text(value)}" for key, value in report["lengths"].items()),
    }


def _balance(balance: Balance, names: Mapping[str, str]) -> dict[str, Any]:
    """For each source, and all of them: bars of tokens and of targets by kind, and the numbers."""
    sources = {names[name]: one for name, one in balance.items()}
    if len(sources) > 1:
        sources = {"all sources": _sum(balance), **sources}
    bars = [
        (name, one["samples"], [_stacked(name, what, one, key) for what, key in
                                (("tokens", "tokens"), ("loss targets", "targets"))])
        for name, one in sources.items()
    ]  # fmt: skip
    return {
        "bars": bars,
        "rows": [(name, *(one[key] for key in _BALANCE)) for name, one in sources.items()],
        "kinds": _kinds(_sum(balance)),
    }


def _stacked(name: str, what: str, one: Mapping[str, float], key: str) -> dict[str, Any]:
    parts = {kind: value for kind in KINDS if (value := one.get(f"{kind}_{key}", 0.0))}
    total = sum(parts.values())
    texts = ", ".join(f"{kind} {percent(value / total)}" for kind, value in parts.items()) or "none"
    shares = [(f"k-{kind}", f"{kind}: {grouped(value)}", value / total) for kind, value in parts.items()]
    return {"text": f"{what}: {texts}", "bar": shares, "spoken": f"{name}, {what}: {texts}"}


def _packing(stream: SequenceStream) -> dict[str, Any]:
    rows = first_rows(stream)
    tokens = np.asarray([sum(row) for row in tokens_of(stream, rows)])
    samples = np.asarray([len(row) for row in rows])
    limit = ("seq_length", stream.seq_length)
    return {
        "number": len(rows),
        "figures": [
            histogram("Tokens of a sequence", {"": tokens}, unit="tokens", count="sequences", limit=limit),
            histogram("Samples of a sequence", {"": samples}, unit="samples", count="sequences"),
        ],
    }


def _left_out(left: Sequence[Reason]) -> dict[bool, list[tuple[Any, ...]]]:
    """Rows of the reasons whose records the run does not use, and of those whose records it uses."""
    rows: dict[bool, list[tuple[Any, ...]]] = {False: [], True: []}
    for one in left:
        rows[one.used].append((one.source, one.reason, one.number, one.number / max(one.total, 1), one.examples))
    return rows


def _unknown(report: Report, processor: Any, names: Mapping[str, str]) -> list[tuple[Any, ...]] | None:
    """None: the tokenizer has no unknown token."""
    if getattr(getattr(processor, "tokenizer", None), "unk_id", None) is None:
        return None
    rows = []
    for name, one in report["sources"].items():
        share = one["unknown_token_share"]
        text = percent(share) if not share or share >= 0.001 else f"{100 * share:.2g} %"
        rows.append((names[name], one["unknown_tokens"], text))
    return rows


def _short(value: float) -> str:
    """``12.3 M``."""
    for size, ending in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if ending == 'k' else size):.4g} {ending}"
    return grouped(value)
