"""Conversations are converted to splits by BAGEL's rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.data.support import ByteTokenizer, image, make_processor, picture, talk, text
from unigen_ds.core.errors import DataError
from unigen_ds.data.images.image_files import ImageTransform
from unigen_ds.data.records.records import parse_record
from unigen_ds.data.samples.sample import IGNORED, Sample
from unigen_ds.data.samples.splits import ImageSplit, TextSplit, TokenSplit


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in "abc":
        picture(tmp_path / f"{name}.png", 16, 8)
    return tmp_path


def plan(folder: Path, *turns: dict[str, str], **changes: Any) -> Sample:
    return make_processor(**changes).plan(parse_record(talk(*turns), "w", image_root=folder), "w")


def descriptions(sample: Sample) -> list[str]:
    """``kind:name`` of images, ``+``/``-`` (loss or not) and the text; ``?`` marks what may be dropped."""
    out = []
    for split in sample.splits:
        assert not isinstance(split, TokenSplit)
        mark = "?" if split.droppable else ""
        if isinstance(split, ImageSplit):
            out.append(f"{split.kind}:{Path(split.path).stem}{mark}")
        else:
            out.append(f"{'+' if split.loss else '-'}{bytes(split.ids).decode()}{mark}")
    return out


def test_text_to_image(folder: Path) -> None:
    sample = plan(folder, text("user", "draw"), image("assistant", "a.png"))
    assert descriptions(sample) == ["-draw?", "noise:a"]
    assert sample.splits[1].grid == (1, 2)  # 8 x 16 pixels, 8 per latent patch
    assert sample.num_tokens == 6 + 4


ASK, DRAWN, SEEN = text("user", "1"), image("assistant", "a.png"), image("user", "a.png")
TURNS = {
    "understanding": ([SEEN, ASK, text("assistant", "that")], ["vit:a?", "-1?", "+that"]),
    "editing has the clean latent before the ViT": (
        [SEEN, ASK, image("assistant", "b.png")], ["vae:a?", "vit:a?", "-1?", "noise:b"],
    ),
    "a drawn image is shown again": (
        [ASK, DRAWN, text("user", "2"), text("assistant", "3")], ["-1?", "noise:a", "vit:a?", "-2?", "+3"],
    ),
    "and edited": (
        [ASK, DRAWN, text("user", "2"), image("assistant", "b.png")],
        ["-1?", "noise:a", "vae:a?", "vit:a?", "-2?", "noise:b"],
    ),
    "an image that only a text follows is no edit": (
        [DRAWN, image("user", "b.png"), text("assistant", "x")], ["noise:a", "vit:a?", "vit:b?", "+x"],
    ),
    "neighbouring texts of one role are joined": (
        [text("system", "s"), text("user", "a"), text("human", "b"), text("gpt", "c"), text("assistant", "d")],
        ["-s?", "-a\nb?", "+c\nd"],
    ),
    "but not around an image": (
        [text("user", "a"), SEEN, text("user", "b"), text("assistant", "c")], ["-a?", "vit:a?", "-b?", "+c"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TURNS)
def test_splits_of_turns(folder: Path, case: str) -> None:
    turns, expected = TURNS[case]
    assert descriptions(plan(folder, *turns)) == expected


def test_unreadable_header_is_the_smallest_image(folder: Path) -> None:
    sample = plan(folder, image("user", "none.png"), text("assistant", "x"))
    split = sample.splits[0]
    assert isinstance(split, ImageSplit) and "none.png" in split.error and split.grid == (2, 2)


def test_models_without_one_of_the_towers(folder: Path) -> None:
    edit = [image("user", "a.png"), text("user", "edit"), image("assistant", "b.png")]
    assert descriptions(plan(folder, *edit, vit_transform=None)) == ["vae:a?", "-edit?", "noise:b"]
    with pytest.raises(
        DataError, match=r"w: image .*b\.png is to be generated, but the processor has no vae_transform"
    ):
        plan(folder, *edit, vae_transform=None)
    with pytest.raises(DataError, match="no vit_transform"):
        plan(folder, image("user", "a.png"), text("assistant", "x"), vit_transform=None)


def test_truncation_never_divides_an_image(folder: Path) -> None:
    sample = plan(folder, image("user", "a.png"), text("user", "what"), text("assistant", "that"))
    lengths = [split.num_tokens for split in sample.splits]
    assert lengths == [10, 6, 6]
    assert sample.truncate(22) == sample
    assert sample.truncate(21).splits[2] == TextSplit(tuple(b"that"), loss=True, following=IGNORED)
    assert len(sample.truncate(17).splits) == 2 and len(sample.truncate(9).splits) == 0
    sample = Sample((TokenSplit((1, 2, 3), (2, 3, -100)),))
    assert sample.truncate(2).splits == (TokenSplit((1, 2), (2, IGNORED)),)


def test_fingerprint_follows_what_changes_a_plan() -> None:
    class Other(ByteTokenizer):
        fingerprint = "other"

    base = make_processor().fingerprint
    assert make_processor(text_dropout=0.5, seed=9, ce_reweight=True).fingerprint == base
    assert make_processor(tokenizer=Other()).fingerprint != base
    assert make_processor(vit_transform=ImageTransform(12, 8, 4)).fingerprint != base
    assert make_processor(vae_transform=None).fingerprint != base
