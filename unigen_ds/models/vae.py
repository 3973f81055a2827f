"""Autoencoders between pixels and latents. ``encode(images, noise)`` and ``decode(latents)``; always frozen here.

Their weights are held as buffers, not as parameters: no engine shards, gathers or rounds them, so the ranks of a step
may encode different numbers of images of different sizes without a collective going astray, and latents are computed
in fp32 in every precision. The cost is one whole copy on every rank.

``FluxAutoencoder`` is the one that BAGEL draws with: names and numbers of ``ae.safetensors``.

Shape suffixes: K images, C channels, H and W pixels, z latent channels.
Source: Black Forest Labs, FLUX.1 (2024); Esser et al., 2024.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from annotated_types import Ge, MinLen
from torch import Tensor, nn
from torch.nn import functional as F

from unigen_ds.config.registry import AUTOENCODERS, checked
from unigen_ds.config.values import Choices, Rule
from unigen_ds.core.batch import PackedBatch
from unigen_ds.core.errors import ConfigError
from unigen_ds.models.flow import patchify_latent


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
        for number, latent in zip(numbers, vae.encode(images, noise), strict=True):
            parts[number] = patchify_latent(latent, (rows, columns), patch)
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
        return latents


# ---- the autoencoder of FLUX ----

_GROUPS = 32


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(_GROUPS, channels, eps=1e-6)


def _conv3(channels_in: int, channels_out: int) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, 3, padding=1)


class ResnetBlock(nn.Module):
    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = _norm(channels_in), _conv3(channels_in, channels_out)
        self.norm2, self.conv2 = _norm(channels_out), _conv3(channels_out, channels_out)
        if channels_in != channels_out:
            self.nin_shortcut = nn.Conv2d(channels_in, channels_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.conv1(F.silu(self.norm1(x)))
        inner = self.conv2(F.silu(self.norm2(inner)))
        return inner + (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)


class AttnBlock(nn.Module):
    """One head over all pixels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _norm(channels)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (conv(h).flatten(2).transpose(1, 2)[:, None] for conv in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v)[:, 0].transpose(1, 2)
        return x + self.proj_out(out.reshape_as(x))


def _chain(**parts: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(parts))


def _downsample(channels: int) -> nn.Sequential:
    """Half the sides; the zero padding is at right and bottom alone."""
    return _chain(pad=nn.ZeroPad2d((0, 1, 0, 1)), conv=nn.Conv2d(channels, channels, 3, stride=2))


def _upsample(channels: int) -> nn.Sequential:
    return _chain(scale=nn.Upsample(scale_factor=2.0, mode="nearest"), conv=_conv3(channels, channels))


def _middle(channels: int) -> nn.Sequential:
    return _chain(
        block_1=ResnetBlock(channels, channels), attn_1=AttnBlock(channels), block_2=ResnetBlock(channels, channels)
    )


def _level(channels_in: int, channels_out: int, num_blocks: int, **resample: nn.Module) -> nn.Sequential:
    """The blocks of one resolution, and the step to the next."""
    blocks = [ResnetBlock(channels_in if i == 0 else channels_out, channels_out) for i in range(num_blocks)]
    return _chain(block=nn.Sequential(*blocks), **resample)


class Encoder(nn.Module):
    def __init__(self, widths: Sequence[int], base: int, num_blocks: int, channels: int, latent_channels: int) -> None:
        super().__init__()
        self.conv_in = _conv3(channels, base)
        last = len(widths) - 1
        levels = (
            _level(before, width, num_blocks, **({} if i == last else {"downsample": _downsample(width)}))
            for i, (before, width) in enumerate(zip((base, *widths), widths, strict=False))
        )
        self.down = nn.Sequential(*levels)
        self.mid = _middle(widths[-1])
        self.norm_out, self.conv_out = _norm(widths[-1]), _conv3(widths[-1], 2 * latent_channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid(self.down(self.conv_in(x)))
        return self.conv_out(F.silu(self.norm_out(x)))


class ImageDecoder(nn.Module):
    """``up`` is numbered as ``down`` is: the last level runs first."""

    def __init__(self, widths: Sequence[int], num_blocks: int, channels: int, latent_channels: int) -> None:
        super().__init__()
        self.conv_in = _conv3(latent_channels, widths[-1])
        self.mid = _middle(widths[-1])
        self.up = nn.ModuleList(
            _level(before, width, num_blocks + 1, **({} if i == 0 else {"upsample": _upsample(width)}))
            for i, (before, width) in enumerate(zip((*widths[1:], widths[-1]), widths, strict=True))
        )
        self.norm_out, self.conv_out = _norm(widths[0]), _conv3(widths[0], channels)

    def forward(self, z: Tensor) -> Tensor:
        x = self.mid(self.conv_in(z))
        for level in reversed(self.up):
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(x)))


@AUTOENCODERS.register_module()
class FluxAutoencoder(nn.Module):
    """``encode`` draws from the posterior, as BAGEL always does; latents are shifted and scaled to about N(0, 1).

    Args:
        base_channels: width of the first convolution; a multiple of 32.
        channel_multipliers: width of each resolution, in ``base_channels``; each but the last halves the sides.
        num_blocks: residual blocks of a resolution (one more in the decoder).
        latent_channels: channels of a latent.
        channels: channels of an image.
        scale_factor: latent = scale_factor * (sample - shift_factor).
        shift_factor: see ``scale_factor``.
    """

    @checked("model.vae")
    def __init__(
        self,
        *,
        base_channels: Annotated[int, Ge(1)] = 128,
        channel_multipliers: Annotated[Sequence[Annotated[int, Ge(1)]], MinLen(1)] = (1, 2, 4, 4),
        num_blocks: Annotated[int, Ge(1)] = 2,
        latent_channels: Annotated[int, Ge(1)] = 16,
        channels: Annotated[int, Ge(1)] = 3,
        scale_factor: Annotated[float, Rule(lambda value: value != 0), Choices("a number other than 0")] = 0.3611,
        shift_factor: float = 0.1159,
    ) -> None:
        super().__init__()
        widths = [base_channels * multiplier for multiplier in channel_multipliers]
        if any(width % _GROUPS for width in (base_channels, *widths)):
            raise ConfigError(f"model.vae: widths {base_channels}, {widths}", allowed=f"multiples of {_GROUPS}")
        self.latent_channels, self.downsample = latent_channels, 2 ** (len(widths) - 1)
        self.scale_factor, self.shift_factor = scale_factor, shift_factor
        self.encoder = Encoder(widths, base_channels, num_blocks, channels, latent_channels)
        self.decoder = ImageDecoder(widths, num_blocks, channels, latent_channels)

    def posterior(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance ``[K, z, H / downsample, W / downsample]`` of images ``[K, C, H, W]`` in [-1, 1]."""
        mean, logvar = self.encoder(images.to(self.encoder.conv_in.weight.dtype)).chunk(2, dim=1)
        return mean, logvar

    def encode(self, images: Tensor, noise: Tensor) -> Tensor:
        """Latents sampled with ``noise``, in fp32. Padding changes them, far from the border too (group norms,
        attention): pass images of one size, without padding, if they are not to depend on what else is in the batch.
        """
        mean, logvar = (part.float() for part in self.posterior(images))
        return self.scale_factor * (mean + torch.exp(0.5 * logvar) * noise - self.shift_factor)

    def decode(self, latents: Tensor) -> Tensor:
        """Images in about [-1, 1], in fp32."""
        z = latents / self.scale_factor + self.shift_factor
        return self.decoder(z.to(self.decoder.conv_in.weight.dtype)).float()
