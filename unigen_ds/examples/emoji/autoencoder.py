"""The demo's autoencoder: as a JPEG file, it keeps the low frequencies of blocks of 8 x 8 pixels.

A block in colour has 192 numbers, more than the model's width of 128, and most of them are near zero in a picture
without noise. From the 48 that are kept (28 of brightness, 10 of each colour difference) the emoji are restored with a
signal-to-noise ratio of 27 dB (PSNR, mean); the demo's classifier accepts all of them.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn
from torch.nn import functional as F

from unigen_ds.config.registry import AUTOENCODERS, checked

BLOCK = 8
_COLOURS = ((3**-0.5, 3**-0.5, 3**-0.5), (2**-0.5, 0.0, -(2**-0.5)), (6**-0.5, -2 * 6**-0.5, 6**-0.5))
"""Of red, green and blue: brightness, red against blue, both against green; orthonormal."""

Diagonals = Annotated[int, Ge(1), Le(2 * BLOCK - 1)]


@AUTOENCODERS.register_module()
class CosineAutoencoder(nn.Module):
    """Latents are the lowest frequencies of each block of 8 x 8 pixels, of its brightness and two colour differences.

    The transform is orthonormal (the cosine transform of Ahmed et al., 1974), so ``decode`` restores what was kept and
    the error of a picture is what was left out. A frequency is divided by a fixed number (``divisor``).

    Args:
        luma: diagonals of frequencies that are kept of the brightness: n have n (n + 1) / 2 numbers, up to 8.
        chroma: the same, of each colour difference.
    """

    downsample = BLOCK

    @checked("model.vae")
    def __init__(self, *, luma: Diagonals = 7, chroma: Diagonals = 4) -> None:
        super().__init__()
        lowest = [(colour, *frequency) for colour, n in enumerate((luma, chroma, chroma)) for frequency in _lowest(n)]
        self.latent_channels = len(lowest)
        waves = _waves()
        colours = torch.tensor(_COLOURS, dtype=torch.float64)
        parts = [(colours[colour], waves[row], waves[column]) for colour, row, column in lowest]
        basis = torch.stack([torch.einsum("c,h,w->chw", *each) for each in parts])
        scale = torch.tensor([divisor(*frequency) for frequency in lowest], dtype=torch.float64)[:, None, None, None]
        self.analysis: Tensor
        self.synthesis: Tensor
        self.register_buffer("analysis", (basis / scale).float(), persistent=False)
        self.register_buffer("synthesis", (basis * scale).float(), persistent=False)

    def encode(self, images: Tensor, noise: Tensor) -> Tensor:
        """``[K, 3, H, W]`` in [-1, 1] -> ``[K, latent_channels, H / 8, W / 8]``; ``noise`` is not used."""
        return F.conv2d(images, self.analysis, stride=BLOCK)

    def decode(self, latents: Tensor) -> Tensor:
        """Inverse of ``encode`` on pictures that have no other frequencies."""
        return F.conv_transpose2d(latents, self.synthesis, stride=BLOCK)


def divisor(colour: int, row: int, column: int) -> float:
    """Return the number that a coefficient is divided by; ``row`` and ``column`` are its frequencies.

    The square root of its standard deviation in the emoji, by a fitted formula: so low frequencies weigh most in the
    loss, and high ones are not lost in the noise.
    """
    return math.sqrt((2.5 if colour else 5.0) / (1 + row + column) ** 1.4)


def _lowest(diagonals: int) -> list[tuple[int, int]]:
    """(row, column) of the frequencies on the first so many diagonals, the lowest first."""
    every = [(row, column) for row in range(BLOCK) for column in range(BLOCK) if row + column < diagonals]
    return sorted(every, key=sum)


def _waves() -> Tensor:
    """``[8, 8]``: frequency, pixel; orthonormal."""
    pixels = torch.arange(BLOCK, dtype=torch.float64)
    waves = torch.cos(math.pi / BLOCK * (pixels + 0.5) * pixels[:, None])
    return waves * torch.where(pixels == 0, 1.0, math.sqrt(2.0))[:, None] / math.sqrt(BLOCK)
