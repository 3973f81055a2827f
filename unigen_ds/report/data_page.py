"""The page about the training data of a config: its sources, lengths, balance, packing, what is left out, and the first
sequences as the model has them (``tools/inspect_data.py --html``).

In: the stream of a run and micro-batches of its loader. Numbers come from ``data/batches/statistics.py``, which a
start's log and the tool's text use, sequences from the batches themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unigen_ds.data.batches.loader import MicroBatch
from unigen_ds.data.batches.statistics import (
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
from unigen_ds.report.document import grouped, number_text, percent, write_document
from unigen_ds.report.sequences import sequences_of

KINDS = ("text", "image", "other")
_BALANCE = ("text_tokens", "image_tokens", "text_targets", "image_targets", "other_targets")
Report = Mapping[str, Any]
Balance = Mapping[str, Mapping[str, float]]


def write_data_page(
    out: Path,
    *,
    title: str,
    stream: SequenceStream,
    processor: Any,
    batches: Sequence[MicroBatch],
    skipped_sources: int = 0,
) -> Path:
    """Write the page of a config. Raises ``ConfigError`` where ``out`` cannot be written.

    Args:
        out: the file.
        title: the config's name.
        stream: that of a run.
        processor: the run's.
        batches: of one sequence each, as the run's loader makes them; a cursor is the position after its batch.
        skipped_sources: data sets of the config that could not be opened (``on_error='skip'``).
    """
    report, names, packer = describe(stream), titles(stream), stream.packer
    balance, left = epoch_balance(stream), reasons(stream)
    total = {key: sum(one[key] for one in balance.values()) for key in next(iter(balance.values()))}
    kinds = KINDS if total["other_targets"] else KINDS[:2]
    tokens = total["text_tokens"] + total["image_tokens"]
    sources, groups = report["sources"], report.get("groups") or {}
    streamed = {name: one["streamed"] for name, one in sources.items() if "streamed" in one}
    chips = [
        f"seq_length {stream.seq_length:,}",
        "not packed" if packer is None else f"{type(packer).__name__}, window {packer.window:,}",
        f"seed {stream.order.seed}",
        *([f"max_sample_tokens {stream.sample_length:,}"] if stream.sample_length != stream.seq_length else []),
        *(["weighted mixture"] if stream.order.weights is not None else []),
    ]
    left_out: dict[bool, list[tuple[Any, ...]]] = {False: [], True: []}  # by whether the run uses the records
    for one in left:
        left_out[one.used].append((one.source, one.reason, one.number, one.number / max(one.total, 1), one.examples))
    return write_document(
        out,
        "data.html.j2",
        title=title,
        source=f"the training data of {title}",
        stream=stream,
        report=report,
        chips=chips,
        totals={
            "tokens": _short(tokens),
            "images": total["image_tokens"] / max(tokens, 1),
            "targets": {kind: _short(total[f"{kind}_targets"]) for kind in kinds},
            "left_out": sum(one.number for one in left if not one.used and one.unit == "records"),
            "drawn": sum(int(one["draws_per_epoch"]) for one in sources.values()),
        },
        sources=_sources(sources),
        measured=[(name, one) for name, one in streamed.items() if not one["exact"]],
        groups={
            "rows": [
                (name, one["mandatory"], one["draws_per_epoch"], one["share"], one["share_by_weight"])
                for name, one in groups.items()
            ],
            "mandatory": [f"{group_line(name, one)}." for name, one in groups.items() if one["mandatory"]],
        },
        lengths=_lengths(stream, report),
        balance={"kinds": kinds, **_balance({names[name]: one for name, one in balance.items()}, total)},
        estimated=any(name != title for name, title in names.items()),
        packing=_packing(stream),
        left_out=left_out,
        skipped_sources=skipped_sources,
        unknown=_unknown(sources, processor, names),
        **sequences_of(stream, batches, processor),
    )


def _sources(sources: Report) -> list[tuple[Any, ...]]:
    total = sum(int(one["draws_per_epoch"]) for one in sources.values())
    rows = []
    for name, one in sources.items():
        records, draws, lengths = one["records"], int(one["draws_per_epoch"]), one["lengths"]
        weight = "–" if one["weight"] is None else f"{one['weight']:g}"
        rows.append((
            name, records, one["records_with_images"] / max(records, 1), draws, draws / max(total, 1), weight,
            lengths["p50"], lengths["p95"], lengths["max"],
        ))  # fmt: skip
    return rows


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


def _balance(sources: Balance, total: Mapping[str, float]) -> dict[str, Any]:
    """For each source, and all of them: bars of tokens and of targets by kind, and the numbers."""
    several = {"all sources": total, **sources} if len(sources) > 1 else sources
    bars = []
    for name, one in several.items():
        stacked = []
        for what, key in (("tokens", "tokens"), ("loss targets", "targets")):
            parts = {kind: value for kind in KINDS if (value := one.get(f"{kind}_{key}", 0.0))}
            whole = sum(parts.values())
            texts = ", ".join(f"{kind} {percent(value / whole)}" for kind, value in parts.items()) or "none"
            shares = [(f"k-{kind}", f"{kind}: {grouped(value)}", value / whole) for kind, value in parts.items()]
            stacked.append({"text": f"{what}: {texts}", "bar": shares, "spoken": f"{name}, {what}: {texts}"})
        bars.append((name, one["samples"], stacked))
    return {"bars": bars, "rows": [(name, *(one[key] for key in _BALANCE)) for name, one in several.items()]}


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


def _unknown(sources: Report, processor: Any, names: Mapping[str, str]) -> list[tuple[Any, ...]] | None:
    """None: the tokenizer has no unknown token."""
    if getattr(getattr(processor, "tokenizer", None), "unk_id", None) is None:
        return None
    rows = []
    for name, one in sources.items():
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
