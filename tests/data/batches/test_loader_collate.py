"""Micro-batches: the golden pack of the public code, skips, dropout, noise, padding."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.data.support import NumberTokenizer, image, make_processor, mixed_dataset, picture, talk, text, write_jsonl
from tests.support.golden_files import BAGEL, BAGEL_META, read_json
from unigen_ds.core.batch import CAUSAL, FULL, NOISE, PackedBatch
from unigen_ds.data.batches.loader import collate
from unigen_ds.data.datasets.dataset import UnifiedGenerationDataset
from unigen_ds.data.images.image_files import ImageTransform
from unigen_ds.data.order.order import Draw
from unigen_ds.families.bagel.processor import UnifiedProcessor

MODES = {"causal": CAUSAL, "full": FULL, "noise": NOISE}


def same(one: PackedBatch, other: PackedBatch) -> None:
    for field in dataclasses.fields(PackedBatch):
        a, b = getattr(one, field.name), getattr(other, field.name)
        assert torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, Tensor) else a == b, field.name


class StatedSizes(ImageTransform):
    """Returns for each image, identified by its size in the file, the size that the pack states."""

    def __init__(self, max_size: int, min_size: int, stride: int) -> None:
        super().__init__(max_size, min_size, stride)
        self.stated: dict[tuple[int, int], tuple[int, int]] = {}

    def size(self, width: int, height: int) -> tuple[int, int]:
        return self.stated[width, height]


def golden_processor(facts: dict[str, Any], **changes: Any) -> UnifiedProcessor:
    down = facts["vae_params"]["downsample"]
    patch = facts["bagel_config"]["latent_patch_size"]
    return UnifiedProcessor(
        NumberTokenizer(),
        vit_transform=StatedSizes(*facts["vit_transform"]),
        vit_patch_size=facts["vit_patch_size"],
        vae_transform=StatedSizes(*facts["vae_transform"]),
        latent_channels=facts["vae_params"]["z_channels"],
        latent_patch_size=patch,
        vae_spatial_downsample=down,
        max_latent_size=facts["bagel_config"]["max_latent_size"],
        vit_max_patches_per_side=facts["bagel_config"]["vit_max_num_patch_per_side"],
        **changes,
    )


def golden_records(folder: Path, pack: dict[str, Any], processor: UnifiedProcessor) -> list[Any]:
    """The four samples of the public pack; each file has another size, for the pack's own sizes of both encoders."""
    shapes = {kind: [tuple(shape[:0:-1]) for shape in pack[f"{kind}_image_shapes"]] for kind in ("vae", "vit")}
    transforms = {"vae": processor.vae_transform, "vit": processor.vit_transform}

    def draw(name: str, *kinds: str) -> str:
        source = (20 + len(list(folder.glob("*.png"))), 20)
        picture(folder / name, *source)
        for kind in kinds:
            transforms[kind].stated[source] = shapes[kind].pop(0)
        return name

    drawing, photo, before, result = (
        draw("drawn.png", "vae"), draw("seen.png", "vit"), draw("edited.png", "vae", "vit"), draw("result.png", "vae")
    )  # fmt: skip
    assert shapes == {"vae": [], "vit": []}
    t2i, und, edit, plain = ([" ".join(map(str, ids)) for ids in s["texts"]] for s in pack["samples"])
    return [
        talk(text("user", t2i[0]), image("assistant", drawing)),
        talk(image("user", photo), text("user", und[0]), text("assistant", und[1])),
        talk(image("user", before), text("user", edit[0]), image("assistant", result)),
        talk(text("assistant", plain[0])),
    ]


@pytest.mark.parametrize("reweight", [False, True])
def test_golden_pack(tmp_path: Path, reweight: bool) -> None:
    pack, golden = read_json(BAGEL / "train.json"), load_file(BAGEL / "train.safetensors")
    processor = golden_processor(BAGEL_META, ce_reweight=reweight)
    path = write_jsonl(tmp_path / "pack.jsonl", golden_records(tmp_path, pack, processor))
    dataset = UnifiedGenerationDataset(path, processor)
    assert dataset.lengths()[0].tolist() == pack["sample_lens"]
    row = tuple(Draw(0, i, 0) for i in range(len(pack["samples"])))
    batch = collate([row], [dataset], processor, seq_length=pack["sequence_length"])

    assert batch.num_tokens == pack["sequence_length"] and not batch.skipped
    names = {
        "position_ids": "packed_position_ids",
        "text_ids": "packed_text_ids",
        "text_index": "packed_text_indexes",
        "text_target_ids": "packed_label_ids",
        "text_target_index": "ce_loss_indexes",
        "image_target_index": "mse_loss_indexes",
        "latent_index": "packed_vae_token_indexes",
        "latent_position_ids": "packed_latent_position_ids",
        "vit_index": "packed_vit_token_indexes",
        "vit_position_ids": "packed_vit_position_ids",
    }
    for ours, theirs in names.items():
        assert torch.equal(getattr(batch, ours), golden[theirs]), ours
    assert torch.bincount(batch.split_ids).tolist() == pack["split_lens"]
    assert batch.split_modes.tolist() == [MODES[mode] for mode in pack["attn_modes"]]
    assert torch.bincount(batch.document_ids).tolist() == pack["sample_lens"]
    assert list(batch.vit_lengths) == golden["vit_token_seqlens"].tolist()
    assert [list(shape) for shape in batch.latent_shapes] == pack["patchified_vae_latent_shapes"]
    assert torch.equal(batch.timesteps.isinf(), golden["packed_timesteps"].isinf())
    for ours, theirs in (("vae_images", "padded_images"), ("vae_noise", "vae_noise"), ("flow_noise", "flow_noise")):
        assert getattr(batch, ours).shape == golden[theirs].shape, ours
    assert batch.vit_patches.shape == golden["packed_vit_tokens"].shape
    weights = golden["ce_loss_weights"] if reweight else torch.ones(pack["n_ce"])
    torch.testing.assert_close(batch.text_target_weight, weights)
    assert batch.target_counts()["image"] == pack["n_mse"]
    assert torch.equal(mask(batch), golden["attention_mask"])


def mask(batch: PackedBatch) -> Tensor:
    """Which position attends to which, computed from document, split and mode."""
    t = torch.arange(batch.num_tokens)
    document, split, mode = batch.document_ids, batch.split_ids, batch.split_modes[batch.split_ids]
    same_split = split[:, None] == split[None]
    earlier = (t[:, None] >= t[None]) & (mode[None] != NOISE)
    inside = same_split & (mode[None] != CAUSAL)
    return (document[:, None] == document[None]) & ((earlier & ~inside) | inside)


def test_randomness_is_keyed_by_sample_pass_and_seed(tmp_path: Path) -> None:
    dataset = mixed_dataset(tmp_path, 8)

    def noise(index: int, number: int, seed: int) -> Tensor:
        row = (Draw(0, index, number),)
        batch = collate([row], [dataset], dataset.processor, seq_length=200, seed=seed)
        return torch.cat([batch.flow_noise.flatten(), batch.vae_noise.flatten(), batch.timesteps])

    assert torch.equal(noise(1, 0, 1), noise(1, 0, 1))
    for other in ((1, 1, 1), (1, 0, 2)):
        assert not torch.equal(noise(1, 0, 1), noise(*other))
    edit = collate([(Draw(0, 3, 0),)], [dataset], dataset.processor, seq_length=200)
    clean = math.prod(edit.latent_shapes[0])
    assert edit.timesteps[:clean].isinf().all() and edit.timesteps[clean:].isfinite().all()
    assert len(edit.timesteps[clean:].unique()) == 1 and edit.image_target_index.numel() == len(edit.timesteps) - clean


def test_condition_dropout(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", 8, 8)
    record = talk(image("user", "a.png"), text("user", "ed"), image("assistant", "a.png"))
    path = write_jsonl(tmp_path / "t.jsonl", [record])

    def batch(number: int = 0, **dropout: float) -> PackedBatch:
        dataset = UnifiedGenerationDataset(path, make_processor(**dropout))
        return collate([(Draw(0, 0, number),)], [dataset], dataset.processor, seq_length=200)

    whole = batch()
    assert whole.split_modes.tolist() == [FULL, FULL, CAUSAL, NOISE]
    no_text = batch(text_dropout=1.0)
    assert no_text.split_modes.tolist() == [FULL, FULL, NOISE]
    assert no_text.position_ids.tolist() == [0] * 3 + [1] * 6 + [2] * 3  # a dropped text does not use positions
    no_vae, no_vit = batch(vae_dropout=1.0), batch(vit_dropout=1.0)
    assert no_vae.position_ids[0] == 1 and no_vae.position_ids[-1] == whole.position_ids[-1]
    assert no_vit.position_ids.tolist() == [0] * 3 + [2, 3, 4, 5] + [6] * 3
    assert len(no_vit.vit_patches) == 0 and no_vit.vit_patches.shape[1] == whole.vit_patches.shape[1]
    assert torch.equal(no_vit.flow_noise, whole.flow_noise)  # the remaining images have the same noise
    everything = batch(text_dropout=1.0, vit_dropout=1.0, vae_dropout=1.0)
    assert everything.split_modes.tolist() == [NOISE] and everything.position_ids.tolist() == [2] * 3
    drops = sum(batch(number, text_dropout=0.3).split_modes.numel() == 3 for number in range(300))
    assert 60 < drops < 120
    spoken = write_jsonl(tmp_path / "spoken.jsonl", [talk(text("user", "ask"), text("assistant", "yes"))])
    dataset = UnifiedGenerationDataset(spoken, make_processor(text_dropout=1.0))
    answer = collate([(Draw(0, 0, 0),)], [dataset], dataset.processor, seq_length=200)
    assert len(answer.text_ids) == 5 and len(answer.text_target_ids) == 4, "targets are never dropped"


def test_a_noise_image_uses_up_no_position(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", 8, 8)
    turns = [text("user", "x"), image("assistant", "a.png"), text("user", "y"), text("assistant", "z")]
    dataset = UnifiedGenerationDataset(write_jsonl(tmp_path / "t.jsonl", [talk(*turns)]), make_processor())
    batch = collate([(Draw(0, 0, 0),)], [dataset], dataset.processor, seq_length=200)
    assert batch.split_modes.tolist() == [CAUSAL, NOISE, FULL, CAUSAL, CAUSAL]
    assert batch.position_ids.tolist() == [0, 1, 2, *[3] * 3, *[3] * 6, 4, 5, 6, 7, 8, 9]


def test_unreadable_images_become_padding_of_the_planned_length(tmp_path: Path) -> None:
    for name in ("whole", "truncated", "replaced", "gone"):
        picture(tmp_path / f"{name}.png", 16, 16)
    (tmp_path / "never.png").write_bytes(b"no picture")
    names = ["truncated", "replaced", "gone", "never", "whole"]
    records: list[Any] = [{"text_prompt": "p", "image_path": f"{name}.png"} for name in names]
    dataset = UnifiedGenerationDataset(write_jsonl(tmp_path / "t.jsonl", records), make_processor(), name="t")
    lengths = dataset.lengths()[0].tolist()
    assert lengths[3] < lengths[4]  # never readable: planned with the smallest size
    (tmp_path / "truncated.png").write_bytes((tmp_path / "truncated.png").read_bytes()[:100])
    picture(tmp_path / "replaced.png", 32, 16)
    (tmp_path / "gone.png").unlink()
    picture(tmp_path / "never.png", 16, 16)  # repaired after indexing: the length of the plan, and still skipped
    row = tuple(Draw(0, i, 0) for i in range(5))
    batch = collate([row], [dataset], dataset.processor, seq_length=200)
    assert torch.bincount(batch.document_ids).tolist() == lengths
    assert [skip["sample"] for skip in batch.skipped] == ["t:0:0", "t:1:0", "t:2:0", "t:3:0"]
    assert [Path(skip["path"]).stem for skip in batch.skipped] == names[:4]
    assert all(skip["why"] for skip in batch.skipped)
    assert batch.sample_ids == tuple(f"t:{i}:0" for i in range(5)) and batch.num_samples == 5
    first = batch.text_ids[batch.text_index < lengths[0]]
    assert first.tolist() == [258] * lengths[0]
    alone = collate([row[4:]], [dataset], dataset.processor, seq_length=200)
    assert batch.target_counts() == alone.target_counts()
    assert torch.equal(batch.flow_noise, alone.flow_noise) and torch.equal(batch.vae_images, alone.vae_images)
    short = collate([row[:1]], [dataset], dataset.processor, seq_length=5)
    assert short.num_tokens == 3 and not short.skipped  # the broken image is after the truncation


def test_empty_rows_are_one_padding_token(tmp_path: Path) -> None:
    dataset = mixed_dataset(tmp_path, 4)
    batch = collate([(), ()], [dataset], dataset.processor, seq_length=50)
    assert batch.text_ids.tolist() == [258, 258] and batch.document_ids.tolist() == [0, 1]
    assert batch.target_counts() == {"text": 0.0, "image": 0.0}
    assert batch.num_sequences == 2 and batch.num_samples == 0
    processor = dataset.processor
    assert batch.vit_patches.shape == (0, 48) and batch.flow_noise.shape == (0, 12)
    assert batch.vae_images.shape == (0, 3, 8, 8) and batch.vae_noise.shape == (0, 3, 2, 2)
    for name in ("vit_index", "latent_index", "image_target_index", "text_target_ids"):
        assert getattr(batch, name).dtype == torch.int64 and getattr(batch, name).shape == (0,), name
    assert processor.vit_channels == 3
