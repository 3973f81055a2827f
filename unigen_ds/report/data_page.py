"""The page about the training data of a config: lengths, balance of text and images, utilisation, what is left out, and
the first sequences as the model has them (``tools/inspect_data.py --html``).

In: the stream of a run and micro-batches of its loader. Numbers come from ``data/batches/statistics.py``, which a
start's log and the tool's text use, sequences from the batches themselves: text tokens with what is learned of them,
images in their position, sample by sample.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from PIL import Image

from unigen_ds.data.batches.display import ShownImage, ShownSample, ShownToken, display_samples
from unigen_ds.data.batches.loader import MicroBatch
from unigen_ds.data.batches.statistics import describe_data, epoch_balance, first_rows, reasons, titles, tokens_of
from unigen_ds.data.batches.stream import SequenceStream
from unigen_ds.report.document import (
    data_uri,
    document_text,
    group_digits,
    number_text,
    percent,
    plural,
    write_document,
)

LARGEST = 128
"""Pixels of a side of a picture."""
_ROLES = {
    "target": ("target", "drawn: the model learns its latent patches"),
    "condition": ("condition", "read by the vision tower"),
    "edited": ("condition, latent", "encoded by the autoencoder: the image that an edit begins with"),
}
_VISIBLE = str.maketrans({"\n": "↵\n", "\t": "→\t", "\r": "␍"})


def write_data_page(
    out: Path,
    *,
    title: str,
    stream: SequenceStream,
    processor: Any,
    batches: Sequence[MicroBatch],
    skipped_sources: int = 0,
    notes: Mapping[str, str] | None = None,
) -> Path:
    """Write the page of a config. Raises ``ConfigError`` where ``out`` cannot be written. ``batches``: of one sequence
    each, as the run's loader makes them; a cursor is the position after its batch. ``skipped_sources``: data sets of
    the config that could not be opened (``on_error='skip'``). ``notes``: of a sample, by its id.
    """
    report, names = describe_data(stream), titles(stream)
    left_out: dict[bool, list[tuple[Any, ...]]] = {False: [], True: []}  # by whether the run uses the records
    for one in reasons(stream):
        row = (one.source, one.reason, one.number, one.number / max(one.total, 1), ", ".join(one.ids))
        left_out[one.used].append(row)
    text = document_text(
        "data.html.j2",
        title=title,
        source=f"the training data of {title}",
        stream=stream,
        report=report,
        longer=sum(one["overflow"]["longer"] for one in report["sources"].values()),
        length_numbers=" · ".join(f"{key} {number_text(value)}" for key, value in report["lengths"].items()),
        balance=_balance({names[name]: one for name, one in epoch_balance(stream).items()}),
        estimated=any(name != title for name, title in names.items()),
        num_rows=len(first_rows(stream)),
        left_out=left_out,
        skipped_sources=skipped_sources,
        sequences=[_sequence(stream, one, processor, notes or {}) for one in batches],
    )
    return write_document(out, text)


def _balance(sources: Mapping[str, Mapping[str, float]]) -> list[tuple[str, float, list[dict[str, Any]]]]:
    """Return the samples, and bars of tokens and of targets by kind, of all sources and of each of several."""
    total = {key: sum(one[key] for one in sources.values()) for key in next(iter(sources.values()))}
    bars = []
    for name, one in ({"all sources": total, **sources} if len(sources) > 1 else sources).items():
        rows = []
        for label, key in (("tokens", "tokens"), ("loss targets", "targets")):
            parts = {kind: value for kind in ("text", "image", "other") if (value := one.get(f"{kind}_{key}", 0.0))}
            whole = sum(parts.values())
            texts = [f"{kind} {group_digits(value)} ({percent(value / whole)})" for kind, value in parts.items()]
            text = f"{label}: {', '.join(texts) or 'none'}"
            rows.append({"text": text, "bar": [(f"k-{kind}", kind, value / whole) for kind, value in parts.items()]})
        bars.append((name, one["samples"], rows))
    return bars


def _sequence(stream: SequenceStream, one: MicroBatch, processor: Any, notes: Mapping[str, str]) -> dict[str, Any]:
    (row,) = one.rows
    samples, (plan,) = display_samples(one.batch, processor), tokens_of(stream, [row])
    own = [sample for sample in samples if sample.id]
    share = sum(sample.num_tokens for sample in own) / stream.seq_length
    targets = {
        term: sum(sample.targets.get(term, 0) for sample in samples) if term in samples[0].targets else round(weight)
        for term, weight in one.batch.target_counts().items()
    }
    lengths = [*plan, *(sample.num_tokens for sample in samples[len(plan) :])]
    return {
        "number": one.cursor.sequences - 1,
        "facts": [
            f"{percent(share)} of {group_digits(stream.seq_length)} tokens used",
            plural(len(own), "sample"),
            *(f"{group_digits(count)} {term} targets" for term, count in targets.items() if count),
        ],
        "fill": [(f"p{k % 2}", sample.id, sample.num_tokens / stream.seq_length) for k, sample in enumerate(own)],
        "samples": [
            _sample(sample, length, notes.get(sample.id)) for sample, length in zip(samples, lengths, strict=False)
        ],
    }


def _sample(sample: ShownSample, num_planned: int, note: str | None) -> dict[str, Any]:
    facts = [plural(sample.num_tokens, "token"), *([note] if note else [])]
    facts += [plural(count, f"{term} target") for term, count in sample.targets.items() if count]
    if sample.targets and not any(sample.targets.values()):
        facts.append("nothing to learn")
    if sample.num_tokens < num_planned:
        facts.append(f"{group_digits(num_planned - sample.num_tokens)} left out by condition dropout")
    reason = f"Skipped, {plural(sample.num_tokens, 'token')} of padding: {sample.why}" if sample.why else ""
    return {"id": sample.id, "facts": facts, "skipped": reason, "parts": [] if reason else [*_parts(sample)]}


def _parts(sample: ShownSample) -> Iterator[dict[str, Any]]:
    """Tokens (``text`` and ``css``) and pictures (with a ``role``)."""
    for padding, run in groupby(sample.parts, key=lambda part: isinstance(part, ShownToken) and part.kind == "padding"):
        parts = [*run]
        if padding:
            yield {"text": f"{group_digits(len(parts))} × padding", "css": "s"}
            continue
        for part in parts:
            if isinstance(part, ShownImage):
                yield _picture(part)
                continue
            css = ["l"] * part.learned + {"special": ["s"], "unknown": ["u"]}.get(part.kind, [])
            text = part.text if part.kind == "text" else part.text.strip()
            yield {"text": text.translate(_VISIBLE) or "·", "css": " ".join(css)}
            if part.predicts is not None:  # which is not the next one
                yield {"text": f"predicts {part.predicts.strip()!r}", "css": "l s"}


def _picture(image: ShownImage) -> dict[str, Any]:
    """Its ``uri`` is None where its pixels cannot be arranged; small pictures are shown larger by a whole factor."""
    role, title = _ROLES[image.role]
    caption, uri, width = plural(image.num_tokens, "token"), None, 0
    if image.pixels is not None:
        picture, file = Image.fromarray(image.pixels), io.BytesIO()
        caption = f"{picture.width} × {picture.height} px · {caption}"
        picture.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
        picture.save(file, "PNG", optimize=True)
        uri = data_uri(file.getvalue())
        width = picture.width * max(1, LARGEST // 2 // max(picture.size))
    return {"css": image.role, "role": role, "title": title, "caption": caption, "uri": uri, "width": width}
