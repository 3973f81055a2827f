"""Sequences of a run as the model has them, as values for ``templates/sequences.html.j2``: text tokens with what is
learned of them, images in their position, sample by sample.

The size of the page is bounded: by the tokens of all sequences that it has, and by the bytes of their pictures.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from PIL import Image

from unigen_ds.data.batches.loader import MicroBatch
from unigen_ds.data.batches.shown import ShownImage, ShownSample, ShownToken, shown
from unigen_ds.data.batches.statistics import tokens_of
from unigen_ds.data.batches.stream import SequenceStream
from unigen_ds.report.document import data_uri, grouped, percent, plural

MAX_TOKENS = 65_536
"""Text tokens of a page."""
MAX_PICTURES = 6 * 2**20
"""Bytes of its pictures."""
LARGEST = 128
"""Pixels of a side of a picture."""
_SMALL_PNG = 6 * 2**10
_ROLES = {
    "target": ("target", "drawn: the model learns its latent patches"),
    "condition": ("condition", "read by the vision tower"),
    "edited": ("condition, latent", "encoded by the autoencoder: the image that an edit begins with"),
}
_VISIBLE = str.maketrans({"\n": "↵\n", "\t": "→\t", "\r": "␍"})


@dataclass
class _Left:
    """What the page may still have, in tokens and bytes of pictures."""

    tokens: int = MAX_TOKENS
    pictures: int = MAX_PICTURES
    without: int = 0
    """Pictures that did not fit."""


def sequences_of(stream: SequenceStream, batches: Sequence[MicroBatch], processor: Any) -> dict[str, Any]:
    left = _Left()
    sequences = [_sequence(stream, one, processor, left) for one in batches]
    numbers = [one["number"] for one in sequences] or [None]
    return {
        "first": numbers[0],
        "last": numbers[-1],
        "sequences": sequences,
        "without": left.without,
        "most_mib": MAX_PICTURES >> 20,
    }


def _sequence(stream: SequenceStream, one: MicroBatch, processor: Any, left: _Left) -> dict[str, Any]:
    (row,) = one.rows
    samples, (planned,) = shown(one.batch, processor), tokens_of(stream, [row])
    used = sum(sample.num_tokens for sample in samples if sample.id)
    targets = {
        term: sum(sample.targets.get(term, 0) for sample in samples) if term in samples[0].targets else round(weight)
        for term, weight in one.batch.target_counts().items()
    }
    fill = [
        (f"p{k % 2}", f"{sample.id}: {plural(sample.num_tokens, 'token')}", sample.num_tokens / stream.seq_length)
        for k, sample in enumerate(samples) if sample.id
    ]  # fmt: skip
    lengths = [*planned, *(sample.num_tokens for sample in samples[len(planned) :])]
    return {
        "number": one.cursor.sequences - 1,
        "facts": [
            f"{grouped(used)} of {grouped(stream.seq_length)} tokens ({percent(used / stream.seq_length)})",
            plural(len(fill), "sample"),
            *(f"{grouped(count)} {term} targets" for term, count in targets.items() if count),
        ],
        "fill": fill,
        "spoken": f"{percent(used / stream.seq_length)} used",
        "samples": [_sample(sample, length, left) for sample, length in zip(samples, lengths, strict=False)],
    }


def _sample(sample: ShownSample, planned: int, left: _Left) -> dict[str, Any]:
    facts = [plural(sample.num_tokens, "token")]
    facts += [plural(count, f"{term} target") for term, count in sample.targets.items() if count]
    if sample.targets and not any(sample.targets.values()):
        facts.append("nothing to learn")
    if sample.num_tokens < planned:
        facts.append(f"{grouped(planned - sample.num_tokens)} left out by condition dropout")
    skipped = f"Skipped, {plural(sample.num_tokens, 'token')} of padding: {sample.skipped}" if sample.skipped else ""
    return {"id": sample.id, "facts": facts, "skipped": skipped, "parts": [] if skipped else [*_parts(sample, left)]}


def _parts(sample: ShownSample, left: _Left) -> Iterator[dict[str, Any]]:
    """Tokens (``text`` and ``css``) and pictures (with a ``role``)."""
    hidden = 0
    for padding, run in groupby(sample.parts, key=lambda part: isinstance(part, ShownToken) and part.kind == "padding"):
        parts = [*run]
        if padding:
            yield {"text": f"{grouped(len(parts))} × padding", "css": "s"}
            continue
        for part in parts:
            if isinstance(part, ShownImage):
                yield _picture(part, left)
            elif left.tokens > 0:
                left.tokens -= 1
                css = ["l"] * part.learned + {"special": ["s"], "unknown": ["u"]}.get(part.kind, [])
                text = part.text if part.kind == "text" else part.text.strip()
                yield {"text": text.translate(_VISIBLE) or "·", "css": " ".join(css)}
                if part.predicts is not None:  # which is not the next one
                    yield {"text": f"predicts {part.predicts.strip()!r}", "css": "l s"}
            else:
                hidden += 1
    if hidden:
        text = f"… {plural(hidden, 'further token')} not shown: the page has at most {grouped(MAX_TOKENS)}"
        yield {"text": text, "css": "s"}


def _picture(image: ShownImage, left: _Left) -> dict[str, Any]:
    """Its ``uri`` is None where it does not fit, or where its pixels cannot be arranged."""
    role, title = _ROLES[image.role]
    pixels = "" if image.size is None else f"{image.size[0]} × {image.size[1]} px · "
    caption = f"{pixels}{plural(image.num_tokens, 'token')}"
    uri = None
    if image.pixels is not None:
        content, kind = _encode(image.pixels)
        if len(content) <= left.pictures:
            left.pictures -= len(content)
            uri = data_uri(content, kind)
        else:
            left.without += 1
    size = _thumbnail(image.size or (1, 1))
    return {"css": image.role, "role": role, "title": title, "caption": caption, "uri": uri, "size": size}


def _thumbnail(size: tuple[int, int]) -> tuple[int, int]:
    """(width, height) within ``LARGEST``; small pictures are shown larger by a whole factor."""
    longer = max(size)
    if longer > LARGEST:
        return max(1, round(size[0] * LARGEST / longer)), max(1, round(size[1] * LARGEST / longer))
    factor = max(1, (LARGEST // 2) // longer)
    return size[0] * factor, size[1] * factor


def _encode(pixels: Any) -> tuple[bytes, str]:
    """PNG where it is small, else JPEG."""
    picture = Image.fromarray(pixels)
    if max(picture.size) > LARGEST:
        picture = picture.resize(_thumbnail(picture.size), Image.Resampling.LANCZOS)
    png, jpeg = io.BytesIO(), io.BytesIO()
    picture.save(png, "PNG", optimize=True)
    if len(png.getvalue()) <= _SMALL_PNG:
        return png.getvalue(), "png"
    picture.save(jpeg, "JPEG", quality=88)
    return jpeg.getvalue(), "jpeg"
