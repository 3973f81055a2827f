"""``DatasetAdapter`` in real runs: lengths from the data set or read once, roles of images, and what is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.datasets import adapted
from tests.data.support import make_processor
from tests.tiny import tiny_config
from unigen_ds.core.errors import DataError
from unigen_ds.data.batches.loader import collate
from unigen_ds.data.datasets.adapter import DatasetAdapter
from unigen_ds.data.order.order import Draw
from unigen_ds.runner import Runner
from unigen_ds.system.journals import read_lines


def config(folder: Path, kind: str, *, more: Any = None, resume: Any = False, **arguments: Any) -> Any:
    options = {"train_dataloader__batch_size": 1, "train_dataloader__packing__window": 8}
    settings = tiny_config(folder, folder, resume=resume, **options)
    own = {"type": f"tests.data.datasets.adapted.{kind}", **arguments}
    settings["train_dataloader"]["dataset"] = {"type": "DatasetAdapter", "name": "own", "dataset": own, **(more or {})}
    return settings


def train(folder: Path, kind: str, *, updates: int = 3, **more: Any) -> tuple[list[Any], list[Any]]:
    Runner.from_cfg(config(folder, kind, **more), max_updates=updates).train()
    losses = [line["loss"] for line in read_lines(folder / "metrics.jsonl") if "loss" in line]
    return losses, [line["digest"] for line in read_lines(folder / "ledger.jsonl")]


def reads(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def test_a_data_set_with_lengths_is_not_read_for_them(tmp_path: Path) -> None:
    read = train(tmp_path / "read", "Items", reads=str(tmp_path / "a"))
    with_lengths = train(tmp_path / "given", "WithLengths", reads=str(tmp_path / "b"))
    assert with_lengths == read, "the same sequences with the same content"
    assert len(reads(tmp_path / "b")) == len(reads(tmp_path / "a")) - adapted.NUMBER
    train(tmp_path / "cut", "WithLengths", updates=1, reads=str(tmp_path / "c"))
    assert train(tmp_path / "cut", "WithLengths", reads=str(tmp_path / "c"), resume=True) == with_lengths


def test_an_item_of_another_length_is_a_counted_skip(tmp_path: Path) -> None:
    settings = config(tmp_path, "WithLengths", reads=str(tmp_path / "a"), extra=2)
    settings["train_dataloader"]["max_skipped_fraction"] = 1.0
    Runner.from_cfg(settings, max_updates=1).train()
    lines = [json.loads(line) for line in (tmp_path / "skipped_samples.jsonl").read_text().splitlines()]
    assert lines and "tokens, but" in str(lines[0])


@pytest.mark.parametrize("measured", [False, True], ids=["read", "measured"])
def test_each_image_has_its_role(measured: bool, tmp_path: Path) -> None:
    losses, _ = train(tmp_path, "Edits", measured=measured)
    assert len(losses) == 3 and all(loss > 0 for loss in losses)
    assert {"loss/image", "loss/text"} <= set(next(iter(read_lines(tmp_path / "metrics.jsonl"))))


def test_roles_are_the_places_of_images() -> None:
    kinds: dict[str, Any] = {"target": 2, "edited": 1, "condition": 1}
    for roles in (["target", "edited", "condition"], ["condition", "target", "target"]):
        images = [torch.full((3, 8, 8), k / 4) for k in range(3)]
        item = {"input_ids": [1, 2], "labels": [1, 2], "padded_images": images, "image_roles": roles}
        adapter = DatasetAdapter([item], make_processor())
        batch = collate([(Draw(0, 0, 0),)], [adapter], adapter.processor, seq_length=60)
        before = [kinds[role] for role in roles if role != "target"]
        assert batch.split_modes.tolist() == [*before, 0, *[2] * roles.count("target")] and not batch.skipped
        targets = [k / 4 for k, role in enumerate(roles) if role == "target"]
        vae_images = batch.vae_images[-len(targets) :]
        assert [float(one.mean()) for one in vae_images] == pytest.approx(targets)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_roles": ["target"]}, r"image_roles is \['target'\]. Allowed: a list of 2"),
        ({"image_roles": ["target", "both"]}, r"image_roles\[1\] is 'both'. Allowed: 'target', 'condition', 'edited'"),
        ({"image_roles": "target"}, "image_roles is 'target'"),
    ],
)
def test_malformed_roles_are_named(change: dict[str, Any], message: str) -> None:
    item = {"input_ids": [1, 2], "labels": [1, 2], "padded_images": torch.zeros(2, 3, 8, 8), **change}
    with pytest.raises(DataError, match=rf"list\[0\]\.{message}"):
        DatasetAdapter([item], make_processor()).lengths()


@pytest.mark.parametrize(
    ("lengths", "message"),
    [([3], r"lengths\(\) has 1 values"), ([3, "4"], r"lengths\(\)\[1\] is '4'"), ([3, -1], r"lengths\(\)\[1\] is -1")],
)
def test_malformed_lengths_are_named(lengths: Any, message: str) -> None:
    class Own(list[Any]):
        def lengths(self) -> Any:
            return lengths

    with pytest.raises(DataError, match=message):
        DatasetAdapter(Own([1, 2]), make_processor()).lengths()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"padded_image": None}, r"own\[3\] has the key 'padded_image', which.*did you mean 'padded_images'"),
        ({"input_ids": [3.7, 1.0], "labels": [1, 2]}, r"own\[3\].input_ids\[0\] is 3.7. Allowed: whole numbers"),
        ({"input_ids": [1, 5000], "labels": [1, 2]}, r"own\[3\].input_ids\[1\] is 5000. Allowed: 0 to \d+, the ids of"),
        ({"input_ids": [1, -3], "labels": [1, 2]}, r"own\[3\].input_ids\[1\] is -3"),
        ({"input_ids": [1, 2], "labels": [1, 5000]}, r"own\[3\].labels\[1\] is 5000"),
        ("uint8", r"own\[3\].padded_images\[0\] is a tensor of torch.uint8.*Allowed: floating point values from -1"),
        ("bytes", r"own\[3\].padded_images\[0\] is a tensor with values from 200 to 200"),
        ("raise", r"own\[3\] cannot be read: ValueError: no such file \(adapted.py, line \d+\)"),
    ],
)
def test_a_wrong_item_is_named(change: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"(?s){message}"):
        Runner.from_cfg(config(tmp_path, "Wrong", reads=str(tmp_path / "reads"), change=change))


def test_data_without_an_item_or_a_target_stops_the_start(tmp_path: Path) -> None:
    options = {"reads": str(tmp_path / "reads"), "change": "unlearned", "every": True}
    with pytest.raises(DataError, match="own: none of its 40 items has a target: labels are -100"):
        Runner.from_cfg(config(tmp_path, "Wrong", **options))
    with pytest.raises(DataError, match="own: the data set has no item"):
        Runner.from_cfg(config(tmp_path, "Wrong", number=0, **options))
    change = {"input_ids": [5000, 1, 2], "labels": [5000, 1, 2], "attention_mask": [0.0, 1.0, 1.0]}
    Runner.from_cfg(config(tmp_path, "Wrong", reads=options["reads"], change=change), max_updates=1).train()


def test_token_types_of_zeros_are_not_used_and_others_are_refused(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", "Items", reads=str(tmp_path / "b"))
    assert train(tmp_path / "typed", "TypedItems", reads=str(tmp_path / "a")) == plain
    with pytest.raises(DataError, match=r"own\[3\] has the key 'token_type_ids', .*token_type_ids where all are 0"):
        Runner.from_cfg(config(tmp_path / "other", "TypedItems", reads=str(tmp_path / "c"), second=3))
