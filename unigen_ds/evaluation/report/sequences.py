"""Sequences of a run as the model has them: text tokens coloured by loss, images in their position, sample by sample.

The size of the page is bounded: by the tokens of all sequences that are shown, and by the bytes of their pictures.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from PIL import Image

from unigen_ds.data.loader import MicroBatch
from unigen_ds.data.shown import ShownImage, ShownSample, ShownToken, shown
from unigen_ds.data.statistics import tokens_of
from unigen_ds.data.stream import SequenceStream
from unigen_ds.evaluation.report.charts import bar
from unigen_ds.evaluation.report.markup import Html, grouped, join, percent, plural, tag
from unigen_ds.evaluation.report.sections import missing

MAX_TOKENS = 65_536
"""Text tokens of a page."""
MAX_PICTURES = 6 * 2**20
"""Bytes of its pictures."""
LARGEST = 128
"""Pixels of a side of a picture."""
_SMALL_PNG = 6 * 2**10
_OPENED = 3
_ROLES = {
    "target": ("target", "drawn: the model learns its latent patches"),
    "condition": ("condition", "read by the vision tower"),
    "edited": ("condition, latent", "encoded by the autoencoder: the image that an edit begins with"),
}
_VISIBLE = str.maketrans({"\n": "↵\n", "\t": "→\t", "\r": "␍"})


@dataclass
class _Left:
    """What the page may still have."""

    tokens: int = MAX_TOKENS
    pictures: int = MAX_PICTURES
    without: int = 0
    """Pictures that did not fit."""


def sequences_part(stream: SequenceStream, batches: Sequence[MicroBatch], processor: Any) -> list[Any]:
    """The section."""
    if not batches:
        return [missing("No sequence is shown.")]
    left = _Left()
    first = batches[0].cursor.sequences - 1
    articles = [_sequence(stream, one, processor, left, opened=i < _OPENED) for i, one in enumerate(batches)]
    note = (
        f"Sequences {grouped(first)} to {grouped(first + len(batches) - 1)} of the run, as its loader makes them, after"
        " packing, condition dropout and random changes of images. A thin line is the border of two tokens. Samples do"
        " not see each other."
    )
    parts: list[Any] = [tag("p", note, class_="note"), _legend(), *articles]
    if left.without:
        parts.append(
            missing(f"{plural(left.without, 'picture')} left out: the page has at most {MAX_PICTURES >> 20} MiB.")
        )
    return parts


def _legend() -> Html:
    keys = [
        (tag("i", "token", class_="l"), "learned: predicted with loss from all before it"),
        (tag("i", "token"), "read only"),
        (tag("i", "<|token|>", class_="s"), "special token"),
        (tag("i", "<unk>", class_="u"), "unknown to the tokenizer"),
        (tag("span", class_="swatch target"), "image that is drawn"),
        (tag("span", class_="swatch condition"), "image that is read"),
    ]
    return tag("ul", *(tag("li", tag("span", sign, class_="toks"), f" {text}") for sign, text in keys), class_="signs")


def _sequence(stream: SequenceStream, one: MicroBatch, processor: Any, left: _Left, *, opened: bool) -> Html:
    number, (row,) = one.cursor.sequences - 1, one.rows
    samples, (planned,) = shown(one.batch, processor), tokens_of(stream, [row])
    used = sum(sample.num_tokens for sample in samples if sample.id)
    targets = {
        term: sum(sample.targets.get(term, 0) for sample in samples) if term in samples[0].targets else round(weight)
        for term, weight in one.batch.target_counts().items()
    }
    facts = [
        f"{grouped(used)} of {grouped(stream.seq_length)} tokens ({percent(used / stream.seq_length)})",
        plural(sum(bool(sample.id) for sample in samples), "sample"),
        *(f"{grouped(count)} {term} targets" for term, count in targets.items() if count),
    ]
    fill = [
        (f"p{k % 2}", f"{sample.id}: {plural(sample.num_tokens, 'token')}", sample.num_tokens / stream.seq_length)
        for k, sample in enumerate(samples) if sample.id
    ]  # fmt: skip
    head = tag("summary", tag("b", f"Sequence {grouped(number)}"), tag("span", " · ".join(facts)))
    body = [
        _sample(sample, planned[k] if k < len(planned) else sample.num_tokens, left) for k, sample in enumerate(samples)
    ]
    return tag("details", head, bar(fill, spoken=f"{percent(used / stream.seq_length)} used"), *body, class_="sequence",
               open="" if opened else None)  # fmt: skip


def _sample(sample: ShownSample, planned: int, left: _Left) -> Html:
    facts = [plural(sample.num_tokens, "token")]
    facts += [
        f"{grouped(count)} {term} {'target' if count == 1 else 'targets'}"
        for term, count in sample.targets.items()
        if count
    ]
    if sample.targets and not any(sample.targets.values()):
        facts.append("nothing to learn")
    if sample.num_tokens < planned:
        facts.append(f"{grouped(planned - sample.num_tokens)} left out by condition dropout")
    name = tag("code", sample.id) if sample.id else tag("span", "filled up")
    head = tag("div", name, tag("span", " · ".join(facts)), class_="which")
    if sample.skipped:
        return tag("div", head, tag("p", f"Skipped, {plural(sample.num_tokens, 'token')} of padding: {sample.skipped}",
                                    class_="skipped"), class_="sample")  # fmt: skip
    return tag("div", head, tag("div", *_parts(sample, left), class_="toks") if sample.parts else None, class_="sample")


def _parts(sample: ShownSample, left: _Left) -> Iterator[Html]:
    hidden = 0
    for padding, run in groupby(sample.parts, key=lambda part: isinstance(part, ShownToken) and part.kind == "padding"):
        parts = [*run]
        if padding:
            yield tag("i", f"{grouped(len(parts))} × padding", class_="s")
            continue
        for part in parts:
            if isinstance(part, ShownImage):
                yield _image(part, left)
            elif left.tokens > 0:
                left.tokens -= 1
                yield _token(part)
            else:
                hidden += 1
    if hidden:
        yield tag(
            "i",
            f"… {plural(hidden, 'further token')} not shown: the page has at most {grouped(MAX_TOKENS)}",
            class_="s",
        )


def _token(token: ShownToken) -> Html:
    css = ["l"] if token.learned else []
    css += ["s"] if token.kind == "special" else ["u"] if token.kind == "unknown" else []
    text = token.text if token.kind == "text" else token.text.strip()
    shown_text = tag("i", text.translate(_VISIBLE) or "·", class_=" ".join(css) or None)
    if token.predicts is None:
        return shown_text
    return join([shown_text, tag("i", f"predicts {token.predicts.strip()!r}", class_="l s")])


def _image(image: ShownImage, left: _Left) -> Html:
    role, title = _ROLES[image.role]
    size = "" if image.size is None else f"{image.size[0]} × {image.size[1]} px · "
    caption = tag("figcaption", tag("b", role), f" {size}{plural(image.num_tokens, 'token')}")
    picture: Html | None = None
    if image.pixels is not None:
        content, kind = _encoded(image)
        if len(content) <= left.pictures:
            left.pictures -= len(content)
            width, height = _thumbnail(image.size or (1, 1))
            data = base64.b64encode(content).decode()
            picture = tag(
                "img", src=f"data:image/{kind};base64,{data}", alt=f"{role} image", width=width, height=height
            )
        else:
            left.without += 1
    return tag("figure", picture, caption, class_=f"im {image.role}", title=title)


def _thumbnail(size: tuple[int, int]) -> tuple[int, int]:
    """(width, height) within ``LARGEST``; small pictures are shown larger by a whole factor."""
    longer = max(size)
    if longer > LARGEST:
        return max(1, round(size[0] * LARGEST / longer)), max(1, round(size[1] * LARGEST / longer))
    factor = max(1, (LARGEST // 2) // longer)
    return size[0] * factor, size[1] * factor


def _encoded(image: ShownImage) -> tuple[bytes, str]:
    """PNG where it is small, else JPEG."""
    picture = Image.fromarray(image.pixels)  # type: ignore[arg-type]
    if max(picture.size) > LARGEST:
        picture = picture.resize(_thumbnail(picture.size), Image.Resampling.LANCZOS)
    png = io.BytesIO()
    picture.save(png, "PNG", optimize=True)
    if len(png.getvalue()) <= _SMALL_PNG:
        return png.getvalue(), "png"
    jpeg = io.BytesIO()
    picture.save(jpeg, "JPEG", quality=88)
    return jpeg.getvalue(), "jpeg"
