"""Each sample packed = alone, with images of several sizes: latents, hidden states, losses and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.data.support import make_processor, mixed_dataset
from unigen_ds.core.batch import PackedBatch
from unigen_ds.data.batches.loader import collate
from unigen_ds.data.order.order import Draw
from unigen_ds.families.bagel.model import UnifiedModel
from unigen_ds.models import flow
from unigen_ds.models.vae import encode_by_size

NUM_SAMPLES, SEQ_LENGTH = 12, 96
WEIGHTS = {"text": 1.0, "image": 1.0}


@pytest.fixture(scope="module")
def batches(tmp_path_factory) -> tuple[PackedBatch, list[PackedBatch]]:
    """All samples in one batch, and each in a batch of its own: texts, generation, captions and edits."""
    processor = make_processor()
    dataset = mixed_dataset(tmp_path_factory.mktemp("mixed"), NUM_SAMPLES, processor=processor)
    draws = [Draw(0, index, 0) for index in range(NUM_SAMPLES)]

    def batch(*rows: list[Draw]) -> PackedBatch:
        return collate(rows, [dataset], processor, seq_length=SEQ_LENGTH)

    return batch(draws[:5], draws[5:]), [batch([draw]) for draw in draws]


@pytest.fixture(scope="module")
def model() -> UnifiedModel:
    torch.manual_seed(0)
    model = UnifiedModel(
        llm=dict(
            vocab_size=261, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2,
        ),
        vit=dict(
            hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=16,
            patch_size=4,
        ),
        vae=dict(
            type="FluxAutoencoder", base_channels=32, channel_multipliers=(1, 1, 1), num_blocks=1, latent_channels=3
        ),
        latent_patch_size=2,
        max_latent_size=4,
    )  # fmt: skip
    torch.nn.init.normal_(model.llm2vae.weight)  # initially zero, with which no error would change the image loss
    return model


def inside(model: UnifiedModel, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Clean latents ``[L, C]`` and final hidden states ``[T, D]``."""
    with torch.no_grad():
        clean = encode_by_size(model.vae, batch, model.latent_patch_size)
        t_L = flow.training_timesteps(batch.timesteps, model.timestep_shift)
        hidden, index_of = model.hidden_states(batch, flow.interpolate(clean, batch.flow_noise, t_L), t_L)
    return clean, hidden[index_of]


def test_hidden_states_and_latents(model, batches) -> None:
    packed, alone = batches
    latents, hidden = inside(model, packed)
    found = [inside(model, batch) for batch in alone]
    assert tuple(len(h) for _, h in found) == packed.document_lengths
    for (clean, states), a, b in zip(
        found,
        latents.split([len(clean) for clean, _ in found]),
        hidden.split(packed.document_lengths),
        strict=True,
    ):
        torch.testing.assert_close(a, clean, atol=1e-5, rtol=0)
        torch.testing.assert_close(b, states, atol=1e-5, rtol=0)


def test_losses_and_gradients_add_up(model, batches) -> None:
    packed, alone = batches
    counts = packed.target_counts()
    assert counts == {k: sum(b.target_counts()[k] for b in alone) for k in counts} and min(counts.values()) > 0
    results = []
    for group in ([packed], alone):
        model.zero_grad()
        losses = [model(batch).weighted(WEIGHTS, counts) for batch in group]
        sum(losses).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
        results.append((sum(losses).item(), gradients))
    (loss, gradients), (loss_alone, gradients_alone) = results
    assert loss == pytest.approx(loss_alone, rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, gradients_alone[name], atol=1e-5 * gradient.abs().max().item() + 1e-7, rtol=0
        )
        assert gradient.abs().max() > 1e-6 or name.endswith("k_proj.bias"), name
