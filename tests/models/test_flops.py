"""``flops`` of the models compared with torch's counter of the operations of the same step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.data.support import ByteTokenizer, make_processor, mixed_dataset
from unigen_ds.core.batch import PackedBatch
from unigen_ds.data.batches.loader import collate, pack_documents
from unigen_ds.data.order.order import Draw
from unigen_ds.data.samples.sample import LoadedSplit
from unigen_ds.data.samples.splits import TokenSplit
from unigen_ds.families.bagel.model import UnifiedModel
from unigen_ds.families.nanovlm.model import VLM
from unigen_ds.families.nanovlm.processor import LoadedTiles, TiledSplit, VLMProcessor
from unigen_ds.models.lora import add_adapters
from unigen_ds.models.settings import Lora
from unigen_ds.models.vae import encode_by_size

WITHIN = 0.03
"""The counter also counts padding between documents of different lengths."""
LLM = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 6}
LLM |= {"num_key_value_heads": 2, "vocab_size": 300}
VIT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
VIT |= {"image_size": 16, "patch_size": 4}


def assert_counted(model: torch.nn.Module, batch: PackedBatch, terms: Any = None) -> None:
    terms = terms or model
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        torch.stack(list(terms(batch).sums.values())).sum().backward()
    ours, theirs = model.flops(batch), counter.get_total_flops()  # type: ignore[operator]
    print(f"{ours / theirs:.4f} of {theirs:.3g} operations")
    assert abs(ours / theirs - 1) < WITHIN


@pytest.mark.parametrize("freeze", [(), ("vit",), ("vit", "llm")], ids=str)
def test_vlm(freeze: Sequence[str]) -> None:
    class Tokenizer(ByteTokenizer):
        image_id = ByteTokenizer.image_end_id

    model = VLM(llm=LLM, vit=VIT, pixel_shuffle_factor=2, freeze=freeze)
    processor = VLMProcessor(Tokenizer(), tile_size=16, vit_patch_size=4, pixel_shuffle_factor=2)  # type: ignore[arg-type]
    image = (Tokenizer.image_start_id, *[Tokenizer.image_id] * 4)
    documents: list[list[LoadedSplit]] = [
        [
            LoadedTiles(TiledSplit("", image * 2, Tokenizer.image_id, 2), torch.randn(2 * 16, 48)),
            TokenSplit(tuple(range(n)), tuple(range(n // 2)) + (-100,) * (n - n // 2)),
        ]
        for n in (40, 41, 60, 63, 150)
    ]
    assert_counted(model, pack_documents(documents, processor))


@pytest.mark.parametrize("freeze", [(), ("vit", "connector")], ids=str)
def test_unified(tmp_path: Path, freeze: Sequence[str]) -> None:
    processor = make_processor()
    model = UnifiedModel(
        llm=LLM,
        vit=VIT,
        vae={"type": "FluxAutoencoder", "base_channels": 32, "channel_multipliers": (1, 1, 1), "num_blocks": 1}
        | {"latent_channels": processor.latent_channels},
        latent_patch_size=processor.latent_patch_size,
        max_latent_size=processor.max_latent_size,
        freeze=freeze,
    )
    data = mixed_dataset(tmp_path, 8, processor=processor)
    rows = [(Draw(0, index, 0),) for index in range(8)]
    batch = collate(rows, [data], processor, seq_length=256)
    assert len(set(batch.latent_shapes)) > 1 and batch.vit_lengths
    clean = encode_by_size(model.vae, batch, model.latent_patch_size)  # is not counted
    assert_counted(model, batch, lambda batch: model.loss_terms(batch, clean))


def test_adapters() -> None:
    """An adapted layer has its base layer inside, which counts once."""
    pytest.importorskip("peft")
    model = VLM(llm=LLM, vit=VIT, pixel_shuffle_factor=2)
    add_adapters(model, Lora(r=2, target_modules="k_proj"), seed=0)
    processor = VLMProcessor(ByteTokenizer(), tile_size=16, vit_patch_size=4, pixel_shuffle_factor=2)  # type: ignore[arg-type]
    assert_counted(model, pack_documents([[TokenSplit(tuple(range(40)), tuple(range(40)))]], processor))
