"""Autoencoders between pixels and latents. ``encode(images, noise)`` and ``decode(latents)``; always frozen here."""

from __future__ import annotations

from torch import Tensor, nn

from unigen_ds.core.registry import AUTOENCODERS


@AUTOENCODERS.register_module()
class PixelAutoencoder(nn.Module):
    """Latents are the pixels themselves: for images so small that a learned autoencoder has nothing to compress."""

    def __init__(self, *, channels: int = 3) -> None:
        super().__init__()
        self.latent_channels = channels
        self.downsample = 1

    def encode(self, images: Tensor, noise: Tensor) -> Tensor:
        """``[K, channels, H, W]`` in [-1, 1] -> the same; the posterior has no variance, so ``noise`` is not used."""
        return images

    def decode(self, latents: Tensor) -> Tensor:
        """Inverse of ``encode``."""
        return latents
