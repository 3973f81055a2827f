"""Tiny real tokenizers, images and data files for the data tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.support.golden_files import BAGEL_META
from unigen_ds.config.registry import FILTERS
from unigen_ds.data.batches.stream import SequenceStream
from unigen_ds.data.datasets.dataset import UnifiedGenerationDataset
from unigen_ds.data.datasets.filters import CheckedRecord, RecordFilter
from unigen_ds.data.datasets.overflow import FittedSource, Overflow
from unigen_ds.data.images.image_files import ImageTransform
from unigen_ds.data.index.index import Index
from unigen_ds.data.order.order import GlobalOrder
from unigen_ds.data.order.packing import BestFitPacking
from unigen_ds.data.sources.text_files import JsonSource
from unigen_ds.families.bagel.processor import UnifiedProcessor

_SPECIAL = BAGEL_META["special_ids"]


@FILTERS.register_module()
class MostCharacters(RecordFilter):
    def __init__(self, *, most: int) -> None:
        self.most = most

    def keeps(self, record: CheckedRecord) -> bool:
        return sum(map(len, record.texts)) <= self.most


class ByteTokenizer:
    bos_id, eos_id, pad_id, image_start_id, image_end_id = 256, 257, 258, 259, 260
    fingerprint = "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode()


class NumberTokenizer(ByteTokenizer):
    """``"76 12"`` -> [76, 12], with the special ids of the golden pack."""

    bos_id, eos_id, pad_id = _SPECIAL["bos_token_id"], _SPECIAL["eos_token_id"], 0
    image_start_id, image_end_id = _SPECIAL["start_of_image"], _SPECIAL["end_of_image"]
    fingerprint = "numbers"

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]


def make_processor(**changes: Any) -> UnifiedProcessor:
    """Small: ViT patches of 4, one latent patch of 2 latent pixels over 8 pixels."""
    arguments: dict[str, Any] = dict(
        vit_transform=ImageTransform(16, 8, 4),
        vit_patch_size=4,
        vae_transform=ImageTransform(32, 8, 8),
        latent_channels=3,
        latent_patch_size=2,
        vae_spatial_downsample=4,
        max_latent_size=4,
        vit_max_patches_per_side=4,
        seed=5,
    )
    arguments.update(changes)
    return UnifiedProcessor(arguments.pop("tokenizer", ByteTokenizer()), **arguments)


def picture(path: Path, width: int, height: int, *, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def text(role: str, content: str) -> dict[str, str]:
    return {"role": role, "type": "text", "content": content}


def image(role: str, path: str) -> dict[str, str]:
    return {"role": role, "type": "image", "image_path": path}


def talk(*turns: dict[str, str]) -> dict[str, Any]:
    return {"conversations": list(turns)}


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
    return path


def write_parquet(path: Path, records: list[Any], **more: Any) -> Path:
    import pyarrow as pa  # here: not every test needs it
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(records), path, **more)
    return path


def mixed_records(folder: Path, number: int) -> list[Any]:
    sizes = [(8, 8), (16, 24), (32, 16)]
    for k, (w, h) in enumerate(sizes):
        picture(folder / f"{k}.png", w, h, seed=k)
    records: list[Any] = []
    for i in range(number):
        one, two = f"{i % 3}.png", f"{(i + 1) % 3}.png"
        records.append(
            [
                talk(text("user", f"q{i}"), text("assistant", f"answer {i} " * (1 + i * 7 % 5))),
                {"text_prompt": f"draw {i}", "image_path": one},
                talk(image("user", one), text("assistant", f"seen {i}")),
                talk(image("user", one), text("user", f"edit {i}"), image("assistant", two)),
            ][i % 4]
        )
    return records


def build_index(path: Path, processor: UnifiedProcessor | None = None, **more: Any) -> Index:
    return Index.build(JsonSource(path), processor or make_processor(), **more)


def mixed_dataset(folder: Path, number: int = 40, **changes: Any) -> UnifiedGenerationDataset:
    processor = changes.pop("processor", None) or make_processor()
    name = changes.pop("name", None) or "train"
    path = write_jsonl(folder / f"{name}.jsonl", mixed_records(folder, number))
    return UnifiedGenerationDataset(path, processor, name=name, **changes)


def make_stream(datasets: list[Any], *, window: int | None = None, seq_length: int = 96, **more: Any) -> SequenceStream:
    overflow = more.pop("overflow", None)
    overflow = overflow if isinstance(overflow, Overflow) else Overflow(seq_length, overflow)
    sizes = [len(FittedSource(d, overflow)) for d in datasets]
    order = GlobalOrder(
        sizes,
        more.pop("weights", None),
        seed=more.pop("seed", 3),
        mandatory=more["blend"].mandatory if "blend" in more else (),
    )
    packer = None if window is None else more.pop("packing", BestFitPacking)(window, more.pop("max_tiles", None))
    return SequenceStream(datasets, order, packer=packer, seq_length=seq_length, overflow=overflow, **more)
