"""The demo's own model, autoencoder, tokenizer and family: ``UnifiedModel`` predicts the picture, not the velocity.

Noise needs all numbers of a patch, a picture few of them. Li and He ("Back to Basics: Let Denoising Generative Models
Denoise", 2025) therefore let the network predict the picture and compute the velocity from it.

As a JPEG file, the autoencoder keeps the low frequencies of blocks of 8 x 8 pixels. A block in colour has 192 numbers,
more than the model's width of 128, and most of them are near zero in a picture without noise. From the 48 that are kept
(28 of brightness, 10 of each colour difference) the emoji are restored with a signal-to-noise ratio of 27 dB (PSNR,
mean); the demo's classifier accepts all of them.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unigen_ds.config.registry import AUTOENCODERS, FAMILIES, MODELS, TOKENIZERS
from unigen_ds.data.text.tokenizers import WordTokenizer
from unigen_ds.examples.emoji.catalogue import vocabulary
from unigen_ds.families.bagel.family import Bagel
from unigen_ds.families.bagel.model import UnifiedModel
from unigen_ds.families.base import PublishedFormat

_LEAST_T = 0.05


@MODELS.register_module()
class EmojiModel(UnifiedModel):
    """``x_t = (1 - t) x_0 + t e``, so the velocity ``e - x_0`` is ``(x_t - x_0) / t``; ``t`` counts as 0.05 at least,
    which bounds the weight of the last steps.
    """

    def velocity_of(self, hidden_MD: Tensor, noisy_MC: Tensor, t_M: Tensor) -> Tensor:
        clean_MC = self.llm2vae(hidden_MD)
        return (noisy_MC - clean_MC) / t_M.clamp(min=_LEAST_T)[:, None].to(clean_MC.dtype)


@FAMILIES.register_module()
class EmojiFamily(Bagel):
    """The family ``Bagel`` without its export: a model in BAGEL's directory predicts the velocity."""

    model = EmojiModel
    published: ClassVar[tuple[PublishedFormat, ...]] = ()


@TOKENIZERS.register_module()
class EmojiTokenizer(WordTokenizer):
    """A ``WordTokenizer`` with every word of the prompts and answers of ``EmojiDataset``."""

    def __init__(self) -> None:
        super().__init__(words=vocabulary())


_BLOCK = 8
_COLOURS = ((3**-0.5, 3**-0.5, 3**-0.5), (2**-0.5, 0.0, -(2**-0.5)), (6**-0.5, -2 * 6**-0.5, 6**-0.5))
"""Weights of red, green and blue in brightness, in red against blue, and in both against green; orthonormal."""
DIAGONALS = (7, 4, 4)
"""Number of diagonals of frequencies that each of them keeps: n diagonals have n (n + 1) / 2 numbers."""


@AUTOENCODERS.register_module()
class CosineAutoencoder(nn.Module):
    """Latents are the lowest frequencies of each block of 8 x 8 pixels, of its brightness and two colour differences.

    The transform is orthonormal (the cosine transform of Ahmed et al., 1974), so ``decode`` restores what was kept and
    the error of a picture is what was left out. A frequency is divided by the square root of its standard deviation in
    the emoji, by a fitted formula: so low frequencies weigh most in the loss, and high ones are not lost in the noise.
    """

    downsample = _BLOCK

    def __init__(self) -> None:
        super().__init__()
        every = sorted(((row, column) for row in range(_BLOCK) for column in range(_BLOCK)), key=sum)
        lowest = [(n, *each) for n, diagonals in enumerate(DIAGONALS) for each in every if sum(each) < diagonals]
        self.latent_channels = len(lowest)
        pixels = torch.arange(_BLOCK, dtype=torch.float64)
        waves = torch.cos(math.pi / _BLOCK * (pixels + 0.5) * pixels[:, None])  # [8, 8]: frequency, pixel; orthonormal
        waves = waves * torch.where(pixels == 0, 1.0, math.sqrt(2.0))[:, None] / math.sqrt(_BLOCK)
        colours = torch.tensor(_COLOURS, dtype=torch.float64)
        parts = [(colours[colour], waves[row], waves[column]) for colour, row, column in lowest]
        basis = torch.stack([torch.einsum("c,h,w->chw", *each) for each in parts])
        divisors = [math.sqrt((2.5 if n else 5.0) / (1 + row + column) ** 1.4) for n, row, column in lowest]
        scale = torch.tensor(divisors, dtype=torch.float64)[:, None, None, None]
        self.analysis: Tensor
        self.synthesis: Tensor
        self.register_buffer("analysis", (basis / scale).float(), persistent=False)
        self.register_buffer("synthesis", (basis * scale).float(), persistent=False)

    def encode(self, images: Tensor, noise: Tensor) -> Tensor:
        """``[K, 3, H, W]`` in [-1, 1] -> ``[K, latent_channels, H / 8, W / 8]``; ``noise`` is not used."""
        return F.conv2d(images, self.analysis, stride=_BLOCK)

    def decode(self, latents: Tensor) -> Tensor:
        """Inverse of ``encode`` on pictures that have no other frequencies."""
        return F.conv_transpose2d(latents, self.synthesis, stride=_BLOCK)
