"""Autoencoders between pixels and latents. ``encode(images, noise)`` and ``decode(latents)``; always frozen here.

Their weights are held as buffers, not as parameters: no engine shards, gathers or rounds them, so the ranks of a step
may encode different numbers of images of different sizes without a collective going astray, and latents are computed
in fp32 in every precision. The cost is one whole copy on every rank.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor, nn

from unigen_ds.config.registry import AUTOENCODERS, checked
from unigen_ds.core.batch import PackedBatch
from unigen_ds.models.flow import patchify_latents


def hold_as_buffers(module: nn.Module) -> nn.Module:
    """Turn every parameter into a buffer of the same name; in place."""
    for part in [*module.modules()]:
        for name, parameter in [*part.named_parameters(recurse=False)]:
            delattr(part, name)
            part.register_buffer(name, parameter.detach())
    return module


def encode_by_size(vae: Any, batch: PackedBatch, patch: int) -> Tensor:
    """Clean latent patches ``[L, patch * patch * z]`` of a micro-batch; images of one size are encoded together.

    BAGEL's own code encodes all images padded to the largest of the pack, and as the padding reaches the latents
    (0.4 to 1.1 of them) its loss depends on which samples share a pack. Here an image is encoded as if alone, so that
    the loss of a sample is the same however a batch is split into micro-batches.
    """
    members: dict[tuple[int, int], list[int]] = {}
    for number, shape in enumerate(batch.latent_shapes):
        members.setdefault(shape, []).append(number)
    parts: dict[int, Tensor] = {}
    for (rows, columns), numbers in members.items():
        h, w, down = rows * patch, columns * patch, vae.downsample
        # stacked, because a list as an index is copied to the device while the host waits
        images = torch.stack([batch.vae_images[number, :, : h * down, : w * down] for number in numbers])
        noise = torch.stack([batch.vae_noise[number, :, :h, :w] for number in numbers])
        latents = vae.encode(images, noise)
        patches = patchify_latents(latents, [(rows, columns)] * len(numbers), patch)
        parts |= zip(numbers, patches.split(rows * columns), strict=True)
    empty = batch.flow_noise.new_zeros((0, batch.flow_noise.shape[1]))
    return torch.cat([parts[number] for number in range(len(parts))]) if parts else empty


@AUTOENCODERS.register_module()
class PixelAutoencoder(nn.Module):
    """Latents are the pixels themselves: for images so small that a learned autoencoder has nothing to compress.

    Args:
        channels: channels of the image: 1 for grey.
    """

    @checked("model.vae")
    def __init__(self, *, channels: Annotated[int, Ge(1)] = 3) -> None:
        super().__init__()
        self.latent_channels = channels
        self.downsample = 1

    def encode(self, images: Tensor, noise: Tensor) -> Tensor:
        """``[K, channels, H, W]`` in [-1, 1] -> the same; the posterior has no variance, so ``noise`` is not used."""
        return images

    def decode(self, latents: Tensor) -> Tensor:
        """Inverse of ``encode``."""
        return latents
