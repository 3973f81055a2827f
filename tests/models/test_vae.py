"""Every autoencoder of a unified model, also a user's own: frozen, not sharded, in fp32, under its own names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unigen_ds.config.registry import AUTOENCODERS
from unigen_ds.families.bagel.model import UnifiedModel

LLM = dict(
    vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1,
)  # fmt: skip
VIT = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4)


@AUTOENCODERS.register_module()
class OwnAutoencoder(nn.Module):
    """With ordinary parameters, as a user would write it."""

    latent_channels, downsample = 2, 2

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 2, 2, stride=2)
        self.shift = nn.Parameter(torch.ones(1))

    def encode(self, images: Tensor, noise: Tensor) -> Tensor:
        return self.down(images) + self.shift * noise


@pytest.mark.parametrize(
    "spec",
    [dict(type="OwnAutoencoder"), dict(type="FluxAutoencoder", base_channels=32, channel_multipliers=(1, 1))],
    ids=lambda spec: spec["type"],
)
def test_its_weights_are_buffers_under_the_same_names(spec: dict[str, Any]) -> None:
    """Buffers are not sharded, gathered or rounded by any engine, so ranks can encode different numbers of images."""
    torch.manual_seed(3)
    alone = AUTOENCODERS.build(spec)
    torch.manual_seed(3)
    model = UnifiedModel(llm=LLM, vit=VIT, vae=spec)
    assert not [name for name, _ in model.named_parameters() if name.startswith("vae.")]
    assert alone.state_dict().keys() == model.vae.state_dict().keys() and len(alone.state_dict()) > 2
    for name, value in alone.state_dict().items():
        assert torch.equal(model.get_buffer(f"vae.{name}"), value)
        assert f"vae.{name}" in model.state_dict()
    images, noise = torch.rand(2, 3, 8, 8), torch.randn(2, model.vae.latent_channels, 4, 4)
    latents = model.vae.encode(images, noise)
    assert torch.equal(latents, alone.encode(images, noise)) and not latents.requires_grad
