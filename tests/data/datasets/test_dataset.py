"""Shipped examples load; a user's own data set works as any source; the digits are real and written once."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.support import make_processor, mixed_dataset, picture
from unigen_ds.config.registry import DATASETS, build
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.data.batches.loader import collate
from unigen_ds.data.datasets.adapter import DatasetAdapter
from unigen_ds.data.datasets.dataset import UnifiedGenerationDataset, source_names
from unigen_ds.data.datasets.groups import dataset_weights
from unigen_ds.data.order.order import Draw
from unigen_ds.examples.digits.dataset import write_digits

EXAMPLE = Path(__file__).parents[3] / "docs" / "sample_data_format.json"


def test_every_shipped_example_loads(tmp_path: Path) -> None:
    records = json.loads(EXAMPLE.read_text())
    for record in records:
        for turn in [record, *record.get("conversations", [])]:
            if "image_path" in turn:
                picture(tmp_path / turn["image_path"], 24, 16)
    path = tmp_path / "train.json"
    path.write_text(EXAMPLE.read_text())
    dataset = UnifiedGenerationDataset(path, make_processor())
    assert len(dataset) == len(records) and dataset.counts().unreadable.sum() == 0
    batch = collate([tuple(Draw(0, i, 0) for i in range(len(records)))], [dataset], dataset.processor, seq_length=999)
    assert not batch.skipped and len(batch.document_ids.unique()) == len(records)
    assert batch.num_tokens == dataset.lengths()[0].sum()
    counts = dataset.counts()
    assert batch.target_counts() == {"text": counts.text_targets.sum(), "image": counts.image_targets.sum()}


def test_names_and_weights(tmp_path: Path) -> None:
    sets: list[Any] = [mixed_dataset(tmp_path / name, 4) for name in "abc"]
    assert source_names(sets) == ("train", "train#1", "train#2")
    assert dataset_weights(sets) is None
    sets[1].weight = 2.0
    with pytest.raises(ConfigError, match="without a weight"):
        dataset_weights(sets)
    sets[0].weight = sets[2].weight = 1.0
    assert dataset_weights(sets) == [1.0, 2.0, 1.0]


class Own:
    """A user's data set: one padded text with a Hugging Face mask, and some images."""

    def __init__(self, number: int = 6, noisy: bool = False) -> None:
        self.number, self.noisy = number, noisy

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = torch.full((3, 8, 16), index / 10)
        if self.noisy:
            image = image + torch.rand(3, 8, 16) + random.random() + np.random.rand()
        return {
            "input_ids": torch.tensor([258, 10, 11, 12, 258]),
            "attention_mask": torch.tensor([0, 1, 1, 1, 0]),
            "labels": torch.tensor([-100, -100, 11, 12, -100]),
            "padded_images": None if index == 0 else image if index == 1 else torch.stack([image, image]),
        }


def test_adapter_shifts_labels_and_drops_padding() -> None:
    adapter = DatasetAdapter(Own(), make_processor())
    batch = collate([(Draw(0, 0, 0),)], [adapter], adapter.processor, seq_length=50)
    assert batch.text_ids.tolist() == [10, 11, 12] and batch.position_ids.tolist() == [0, 1, 2]
    assert batch.text_target_index.tolist() == [0, 1] and batch.text_target_ids.tolist() == [11, 12]


@pytest.mark.parametrize(("images", "modes"), [("generate", [0, 2, 2]), ("understand", [1, 1, 0])])
def test_adapter_images(images: Any, modes: list[int]) -> None:
    adapter = DatasetAdapter(Own(), make_processor(), images=images)
    grid = 2 if images == "generate" else 8
    assert adapter.lengths()[0].tolist() == [3, 3 + grid + 2] + [3 + 2 * (grid + 2)] * 4
    batch = collate([(Draw(0, 2, 0),)], [adapter], adapter.processor, seq_length=50)
    assert batch.split_modes.tolist() == modes and not batch.skipped
    pixels = batch.vae_images if images == "generate" else batch.vit_patches
    torch.testing.assert_close(pixels, torch.full_like(pixels, 0.2))
    assert batch.target_counts() == {"text": 2.0, "image": 4.0 if images == "generate" else 0.0}


def test_adapter_from_config_and_its_errors() -> None:
    spec = dict(type="DatasetAdapter", dataset=dict(type=Own, number=3), name="own")
    adapter = build(DATASETS, spec, where="dataset", processor=make_processor())
    assert len(adapter) == 3 and adapter.name == "own"
    by_name = DatasetAdapter({"type": "collections.UserList", "initlist": [1]}, make_processor())
    with pytest.raises(DataError, match=r"UserList\[0\] is of type int"):
        by_name.lengths()
    for wrong in ({"type": "no.such.Thing"}, {"type": Own, "nmber": 3}, {"type": "Own"}, 5):
        with pytest.raises(ConfigError, match="DatasetAdapter"):
            DatasetAdapter(wrong, make_processor())
    with pytest.raises(ConfigError, match="'generate', 'understand'"):
        DatasetAdapter(Own(), make_processor(), images="both")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": None}, r"list\[0\]\.labels is missing"),
        ({"labels": [1, 2]}, "have 3, 2 and 3 positions"),
        ({"input_ids": "abc"}, r"list\[0\]\.input_ids is str"),
        ({"padded_images": torch.zeros(1, 8, 8)}, r"padded_images\[0\] is a tensor of shape \(1, 8, 8\)"),
        ({"padded_images": torch.zeros(3, 8, 12)}, "multiples of 8, at most 32"),
        ({"padded_images": [1]}, "padded_images is list"),
    ],
)
def test_adapter_names_the_malformed_field(change: dict[str, Any], message: str) -> None:
    item: dict[str, Any] = {"input_ids": [1, 2, 3], "labels": [1, 2, 3], "attention_mask": [1, 1, 1], **change}
    with pytest.raises(DataError, match=message):
        DatasetAdapter([item], make_processor()).lengths()


def test_a_users_random_numbers_are_keyed_and_leave_ours_alone() -> None:
    adapter = DatasetAdapter(Own(noisy=True), make_processor())
    torch.manual_seed(1)
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()

    def image(number: int) -> torch.Tensor:
        return collate([(Draw(0, 1, number),)], [adapter], adapter.processor, seq_length=50).vae_images

    one, again, other = image(0), image(0), image(1)
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1] and np.random.get_state()[1].tolist() == state[2]


def test_digits_are_written_once_by_processes_that_start_together(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    root = tmp_path / "deep" / "digits"
    errors: list[BaseException] = []

    def start() -> None:
        try:
            write_digits(root)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and (root / "complete").exists()
    assert [p.name for p in root.parent.iterdir()] == ["digits"]  # no incomplete file is left
    time_of_write = (root / "complete").stat().st_mtime_ns
    write_digits(root)
    assert (root / "complete").stat().st_mtime_ns == time_of_write
