"""Transforms and edits through real runs: what changes an image, alike in every process, and records of several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.support import image, make_processor, talk, text, write_jsonl, write_parquet
from tests.tiny import tiny_config
from unigen_ds.config.registry import TRANSFORMS, build
from unigen_ds.core.batch import PackedBatch
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.data.batches.loader import collate
from unigen_ds.data.datasets.dataset import UnifiedGenerationDataset
from unigen_ds.data.order.order import Draw
from unigen_ds.data.records.records import parse_record
from unigen_ds.runner import Runner
from unigen_ds.system.journals import read_lines

CHANGES: list[dict[str, Any]] = [{"type": "RandomFlip"}, {"type": "RandomCrop", "min_area": 0.5}]


@TRANSFORMS.register_module()
class Smaller:
    """A change of a user's own that is none."""

    def __call__(self, image: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return image[:, 1:]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Edits, of which every third has the same image before and after."""
    folder = tmp_path_factory.mktemp("images")
    for k in range(4):
        pixels = np.random.default_rng(k).integers(0, 256, (8 + k, 9), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{k}.png")
    records = [
        talk(
            image("user", f"{i % 4}.png"), text("user", "draw two"), image("assistant", f"{i % 3 and (i + 1) % 4}.png")
        )
        for i in range(8)
    ]
    return write_jsonl(folder / "edits.jsonl", records)


def config(folder: Path, path: Path, **options: Any) -> Any:
    cfg = tiny_config(
        folder, folder, **{"train_dataloader__batch_size": 1, "train_dataloader__seq_length": 160, **options}
    )
    cfg["train_dataloader"]["dataset"] = {"type": "UnifiedGenerationDataset", "data_path": str(path), "name": "data"}
    return cfg


def train(folder: Path, path: Path, *, updates: int = 4, **options: Any) -> list[float]:
    Runner.from_cfg(config(folder, path, **options), max_updates=updates).train()
    return losses(folder)


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_lines(folder / "metrics.jsonl") if "loss" in line]


def test_changes_are_the_same_in_every_process_and_after_a_resume(data: Path, tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", data)
    assert train(tmp_path / "empty", data, processor__augment=[], processor__vit_augment=[]) == plain
    losses = train(tmp_path / "changed", data, processor__augment=CHANGES)
    assert len(set(losses) & set(plain)) == 0
    assert train(tmp_path / "workers", data, processor__augment=CHANGES, train_dataloader__num_workers=2) == losses
    train(tmp_path / "cut", data, updates=2, processor__augment=CHANGES)
    assert train(tmp_path / "cut", data, processor__augment=CHANGES, resume=True) == losses


def one_edit(folder: Path, name: str, **changes: Any) -> PackedBatch:
    """A batch of one record: an image, and the same image once more."""
    pixels = np.random.default_rng(3).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "a.png")
    path = write_jsonl(folder / f"{name}.jsonl", [talk(image("user", "a.png"), image("assistant", "a.png"))])
    dataset = UnifiedGenerationDataset(path, make_processor(**changes))
    batch = collate([(Draw(0, 0, 0),)], [dataset], dataset.processor, seq_length=200)
    assert not batch.skipped and len(batch.vae_images) == 2
    return batch


def test_all_images_of_a_record_are_changed_alike(tmp_path: Path) -> None:
    transforms = [build(TRANSFORMS, spec, where="processor.augment") for spec in CHANGES]
    plain, other = one_edit(tmp_path, "a"), one_edit(tmp_path, "a", augment=transforms)
    assert torch.equal(other.vae_images[0], other.vae_images[1])
    assert not torch.equal(other.vae_images, plain.vae_images)
    assert other.vae_images.min() >= -1 and other.vae_images.max() <= 1
    flip = build(TRANSFORMS, {"type": "RandomFlip", "probability": 1.0}, where="processor.augment")
    mirror = one_edit(tmp_path, "a", augment=[flip])
    assert torch.equal(mirror.vae_images, plain.vae_images.flip(3))
    assert not torch.equal(mirror.vit_patches, plain.vit_patches)


def test_an_evaluation_changes_nothing(data: Path, tmp_path: Path) -> None:
    """The losses on validation data before the first update are those without changes."""
    losses = []
    for name, changes in (("plain", []), ("changed", CHANGES)):
        settings = config(tmp_path / name, data, processor__augment=changes)
        settings["val_dataloader"] = {"split": 0.4}
        settings["custom_hooks"] = [{"type": "EvaluateHook", "interval": 100, "unit": "update", "at_start": True}]
        Runner.from_cfg(settings, max_updates=1).train()
        lines = [line for line in read_lines(tmp_path / name / "metrics.jsonl") if "val/loss" in line]
        losses.append(lines[0]["val/loss"])
    assert losses[0] == losses[1]


def test_a_change_of_another_shape_is_named(data: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Smaller returned \(1, 7, \d\) for an image of \(1, 8, \d\)"):
        train(tmp_path, data, processor__augment=[{"type": "Smaller"}])


@pytest.mark.parametrize(
    ("key", "spec", "message"),
    [
        ("augment", {"type": "RandomFlop"}, r"processor\.augment\[0\]\.type is 'RandomFlop'.*RandomFlip"),
        ("augment", {"type": "RandomCrop", "min_area": 0.0}, r"processor\.augment\[0\]\.min_area is 0\.0"),
    ],
)
def test_wrong_transforms_are_named(key: str, spec: Any, message: str, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        Runner.from_cfg(config(tmp_path, data, **{f"processor__{key}": [spec]}))


# --- edits ----------------------------------------------------------------------------------------------------------

COMPOSED = {"instruction": "draw one two", "input_images": ["0.png", "1.png"], "output_images": ["2.png", "3.png"]}
SEQUENCE = {"instruction": "draw three", "output_images": ["0.png", "1.png", "2.png"]}
SINGLE = {"instruction": "draw four", "input_image": "1.png", "output_image": "3.png"}
PLACED = {"instruction": "draw <image> one <image>", "input_images": ["0.png", "1.png"], "output_image": "2.png"}


def as_turns() -> list[Any]:
    inputs = [image("user", "0.png"), image("user", "1.png")]
    return [
        talk(*inputs, text("user", "draw one two"), image("assistant", "2.png"), image("assistant", "3.png")),
        talk(text("user", "draw three"), *(image("assistant", f"{k}.png") for k in range(3))),
        talk(image("user", "1.png"), text("user", "draw four"), image("assistant", "3.png")),
        talk(text("user", "draw"), inputs[0], text("user", "one"), inputs[1], image("assistant", "2.png")),
    ]


def test_edits_of_several_images_train_as_their_conversations(data: Path, tmp_path: Path) -> None:
    records = [COMPOSED, SEQUENCE, SINGLE, PLACED]
    expected = train(tmp_path / "turns", write_jsonl(data.parent / "turns.jsonl", as_turns()))
    assert train(tmp_path / "edits", write_jsonl(data.parent / "several.jsonl", records)) == expected
    parquet = write_parquet(data.parent / "several.parquet", records[:2])
    two = train(tmp_path / "two", write_jsonl(data.parent / "two.jsonl", as_turns()[:2]))
    assert train(tmp_path / "parquet", parquet) == two
    lines = ["instruction,input_images,output_images"]
    for record in records[:2]:
        cells = [json.dumps(record.get(key, [])).replace('"', '""') for key in ("input_images", "output_images")]
        lines.append(f'{record["instruction"]},"{cells[0]}","{cells[1]}"')
    (data.parent / "several.csv").write_text("\n".join(lines) + "\n")
    assert train(tmp_path / "csv", data.parent / "several.csv") == two


def test_every_image_has_its_position(data: Path) -> None:
    path = write_jsonl(data.parent / "positions.jsonl", [COMPOSED, SEQUENCE])
    dataset = UnifiedGenerationDataset(path, make_processor())
    kinds = [[getattr(split, "kind", "text") for split in dataset.sample(i).splits] for i in range(2)]
    condition = ["vae", "vit"]
    assert kinds[0] == [*condition, *condition, "text", "noise", *condition, "noise"]
    assert kinds[1] == ["text", "noise", *condition, "noise", *condition, "noise"]
    sizes = [[split.num_tokens - 2 for split in dataset.sample(i).splits if getattr(split, "kind", "") == "noise"]
             for i in range(2)]  # fmt: skip
    assert dataset.counts().image_targets.tolist() == [*map(sum, sizes)] and [*map(len, sizes)] == [2, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_images": []}, "output_images is"),
        ({"output_images": [3]}, r"output_images\[0\] is 3"),
        ({"instruction": "a <image> b"}, "instruction asks for 1 images and the record has 2"),
        ({"instruction": None}, "instruction is missing"),
        ({"input_images": 5}, "input_images is 5"),
    ],
)
def test_malformed_edits_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"x:1: {message}"):
        parse_record({**COMPOSED, **change}, "x:1")
